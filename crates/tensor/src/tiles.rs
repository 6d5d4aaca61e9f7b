//! Copies between one tensor and tiles: tensors that together hold one row of elements, one behind another.
//!
//! Data larger than a buffer is stored in tiles, each of which can be moved alone. These copies move any span of the row to or
//! from a tensor in another memory. They run on the streams of other copies ([`copies`](crate::copies)).

use std::ops::Range;

use phalanx_plan::trace::{Memory, Site};

use crate::access::Access;
use crate::backend::{DeviceError, StreamEvent};
use crate::buffer::Tensor;
use crate::device::Device;
use crate::flights::InFlight;

/// A copy between a tensor and tiles that was started: it owns all of them until it is done.
#[must_use = "a copy is over only when it was waited for"]
pub struct PendingTiles {
    device: Device,
    tensors: Option<(Tensor, Vec<Tensor>)>,
    flights: Vec<InFlight>,
    done: StreamEvent,
}

impl PendingTiles {
    /// Blocks until the copy is over; gives back the tensor and the tiles.
    ///
    /// # Errors
    /// When the device failed.
    #[track_caller]
    pub fn wait(mut self) -> Result<(Tensor, Vec<Tensor>), DeviceError> {
        let site = Site::caller();
        let backend = &self.device.backend;
        backend.synchronize(self.done)?;
        // Their owner may write any of them from here on.
        let tensors = self.tensors.iter().flat_map(|(whole, tiles)| tiles.iter().chain([whole]));
        for tensor in tensors.filter(|tensor| tensor.memory() == Memory::Host) {
            backend.check_host_access(tensor.view(), Access::Write, "PendingTiles::wait", site)?;
        }
        self.flights.clear();
        Ok(self.tensors.take().expect("taken once, here"))
    }
}

impl Drop for PendingTiles {
    fn drop(&mut self) {
        let Some(tensors) = self.tensors.take() else { return };
        if self.device.backend.synchronize(self.done).is_err() {
            // As for a copy of two tensors.
            std::mem::forget(tensors);
        }
        self.flights.clear();
    }
}

/// Each tile that has elements of span `span` of the row: its number, its elements of the span, and where these begin in it.
fn parts(tiles: &[Tensor], span: &Range<usize>) -> Vec<(usize, Range<usize>, usize)> {
    let mut parts = Vec::new();
    let mut begin = 0;
    for (number, tile) in tiles.iter().enumerate() {
        let end = begin + tile.shape().elements();
        let inside = span.start.max(begin)..span.end.min(end);
        if !inside.is_empty() {
            parts.push((number, inside.start - span.start..inside.end - span.start, inside.start - begin));
        }
        begin = end;
    }
    assert!(!span.is_empty() && span.end <= begin, "elements {span:?} of tiles of {begin} elements");
    parts
}

/// The name of a copy between two memories.
fn name([from, to]: [Memory; 2]) -> &'static str {
    match (from, to) {
        (Memory::Disk, _) => "copy_from_disk",
        (_, Memory::Disk) => "copy_to_disk",
        (_, Memory::Device) => "copy_to_device",
        (_, Memory::Host) => "copy_to_host",
    }
}

impl Device {
    /// Starts to copy elements of tiles, from element `start` of their row on, into the whole of a tensor of the same
    /// element type. Kernels that are issued before it is waited for run beside it.
    #[track_caller]
    pub fn copy_from_tiles(&self, from: Vec<Tensor>, start: usize, mut to: Tensor) -> PendingTiles {
        let site = Site::caller();
        let memories = [from[0].memory(), to.memory()];
        self.check_tile_copy(memories);
        let span = start..start + to.shape().elements();
        let flights = flights((&to, Access::Write), (&from, Access::Read), memories, site);
        let mut done = None;
        for (number, inside, at) in parts(&from, &span) {
            let part = from[number].view().range(at..at + inside.len());
            done = Some(self.start_copy(name(memories), memories, part, to.view_mut().range(inside), site));
        }
        let done = done.expect("at least one part");
        PendingTiles { device: self.clone(), tensors: Some((to, from)), flights, done }
    }

    /// Starts to copy elements `part` of a tensor into tiles of the same element type, to element `start` of their row and
    /// those behind it.
    #[track_caller]
    pub fn copy_to_tiles(
        &self,
        from: Tensor,
        part: Range<usize>,
        mut to: Vec<Tensor>,
        start: usize,
    ) -> PendingTiles {
        let site = Site::caller();
        let memories = [from.memory(), to[0].memory()];
        self.check_tile_copy(memories);
        let flights = flights((&from, Access::Read), (&to, Access::Write), memories, site);
        let mut done = None;
        for (number, inside, at) in parts(&to, &(start..start + part.len())) {
            let source = from.view().range(part.start + inside.start..part.start + inside.end);
            let target = to[number].view_mut().range(at..at + inside.len());
            done = Some(self.start_copy(name(memories), memories, source, target, site));
        }
        let done = done.expect("at least one part");
        PendingTiles { device: self.clone(), tensors: Some((from, to)), flights, done }
    }

    #[track_caller]
    fn check_tile_copy(&self, memories: [Memory; 2]) {
        let [from, to] = memories;
        let is_between_memories = from != to;
        let passes_host = memories.contains(&Memory::Disk) && memories.contains(&Memory::Device);
        assert!(
            is_between_memories && (!passes_host || self.is_host_addressable()),
            "no copy leads from {} to {} memory",
            from.name(),
            to.name()
        );
    }
}

fn flights(
    (whole, whole_access): (&Tensor, Access),
    (tiles, tiles_access): (&[Tensor], Access),
    memories: [Memory; 2],
    site: Site,
) -> Vec<InFlight> {
    let name = name(memories);
    let of_tiles = tiles.iter().map(|tile| tile.in_flight(tiles_access, name, site));
    std::iter::once(whole.in_flight(whole_access, name, site)).chain(of_tiles).collect()
}
