//! Transfers of tiles between the memory in which they stay and device memory. What is larger than a buffer is stored in tiles;
//! forward wants all of a chunk at once, an update one tile after another.
//!
//! Host memory is one copy away. Disk is one copy away from a device whose memory the host can address; otherwise elements
//! pass through host memory, and whoever waits for them starts the second half of their way.

use std::ops::Range;

use phalanx_tensor::{Category, DType, Device, DeviceError, Memory, PendingCopy, PendingTiles, Tensor};

/// Elements of tiles on their way to the device.
pub(crate) enum Arriving {
    Direct(PendingTiles),
    /// From disk to host memory, the first half of the way; with what they are on the device.
    ToHost(PendingTiles, Category),
    /// From host memory to the device, the second half; with the tiles on disk.
    FromHost(Vec<Tensor>, PendingCopy),
}

/// Elements on their way to their tiles.
pub(crate) enum Leaving {
    Direct(PendingTiles),
    /// To host memory, the first half of the way to the tiles on disk, from this element of their row on.
    ToHost(PendingTiles, Vec<Tensor>, usize),
}

/// Starts to bring elements `span` of the row of tiles into a new tensor on the device.
pub(crate) fn bring(device: &Device, tiles: Vec<Tensor>, span: Range<usize>, category: Category) -> Arriving {
    let dtype = tiles[0].dtype();
    if is_two_copies_away(device, &tiles) {
        let passage = passage(device, dtype, span.len());
        return Arriving::ToHost(device.copy_from_tiles(tiles, span.start, passage), category);
    }
    let window = device.alloc(dtype, [span.len()], category, "visitor");
    Arriving::Direct(device.copy_from_tiles(tiles, span.start, window))
}

/// Starts the second half of a way to the device that leads through host memory.
pub(crate) fn continue_arrival(device: &Device, arriving: Arriving) -> Result<Arriving, DeviceError> {
    Ok(match arriving {
        Arriving::ToHost(pending, category) => {
            let (passage, tiles) = pending.wait()?;
            let window = device.alloc(passage.dtype(), passage.shape(), category, "visitor");
            Arriving::FromHost(tiles, device.copy_to_device(passage, window))
        }
        other => other,
    })
}

/// Waits for elements: the tiles, and the tensor on the device.
pub(crate) fn arrive(device: &Device, arriving: Arriving) -> Result<(Vec<Tensor>, Tensor), DeviceError> {
    match continue_arrival(device, arriving)? {
        Arriving::Direct(pending) => pending.wait().map(|(here, tiles)| (tiles, here)),
        Arriving::FromHost(tiles, pending) => pending.wait().map(|(_, here)| (tiles, here)),
        Arriving::ToHost(..) => unreachable!("the second half has begun"),
    }
}

/// Starts to move elements `part` of a tensor on the device to element `start` of the row of tiles and those behind it. The
/// tensor is freed when it was read.
pub(crate) fn send(
    device: &Device,
    here: Tensor,
    part: Range<usize>,
    tiles: Vec<Tensor>,
    start: usize,
) -> Leaving {
    if is_two_copies_away(device, &tiles) {
        let passage = passage(device, here.dtype(), part.len());
        return Leaving::ToHost(device.copy_to_tiles(here, part, vec![passage], 0), tiles, start);
    }
    Leaving::Direct(device.copy_to_tiles(here, part, tiles, start))
}

/// Starts the second half of a way from the device that leads through host memory.
pub(crate) fn continue_departure(device: &Device, leaving: Leaving) -> Result<Leaving, DeviceError> {
    Ok(match leaving {
        Leaving::ToHost(pending, tiles, start) => {
            let (_, mut passage) = pending.wait()?;
            let passage = passage.pop().expect("one passage");
            let all = 0..passage.shape().elements();
            Leaving::Direct(device.copy_to_tiles(passage, all, tiles, start))
        }
        other => other,
    })
}

/// Waits until elements are in their tiles.
pub(crate) fn depart(device: &Device, leaving: Leaving) -> Result<Vec<Tensor>, DeviceError> {
    match continue_departure(device, leaving)? {
        Leaving::Direct(pending) => pending.wait().map(|(_, tiles)| tiles),
        Leaving::ToHost(..) => unreachable!("the second half has begun"),
    }
}

/// Host memory that elements pass between disk and device.
fn passage(device: &Device, dtype: DType, elements: usize) -> Tensor {
    device.alloc_host(dtype, [elements], Category::Workspace, "passage")
}

fn is_two_copies_away(device: &Device, tiles: &[Tensor]) -> bool {
    tiles[0].memory() == Memory::Disk && !device.is_host_addressable()
}
