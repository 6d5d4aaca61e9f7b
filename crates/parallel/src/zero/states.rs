//! Optimizer states and master weights in chunks, in the memory that the run gives them (ZeRO-Offload, arXiv 2101.06840;
//! ZeRO-Infinity, arXiv 2104.07857).
//!
//! In device memory, an update works on them where they lie. In host memory or on disk, each chunk visits the device:
//! the chunks ahead arrive while the update works on one, and the chunks behind return meanwhile. The order of the chunks
//! is that of the update, so nothing has to be guessed. Between disk and a device that the host cannot address, they pass
//! through host memory.

use std::collections::VecDeque;
use std::ops::Range;

use phalanx_tensor::{Category, DType, Device, DeviceError, Memory, PendingCopy, Tensor, ViewMut};

/// Chunks that arrive while the update works on an earlier one. Two keep a transfer waiting behind the one that runs, so
/// that the stream does not idle between them.
const AHEAD: usize = 2;

/// Chunks that return while the update works on a later one.
const BEHIND: usize = 2;

/// The f32 tensors that the optimizer keeps for each chunk: its states and then, for parameters of 16 bits, the master
/// weights.
pub(super) struct States {
    device: Device,
    memory: Memory,
    has_master: bool,
    /// For each chunk, where it is stored. Empty while the chunk is in flight or visits the device.
    stored: Vec<Vec<Tensor>>,
    /// Chunks that arrive on the device, in order.
    arriving: VecDeque<Vec<Arriving>>,
    /// Chunks that return, in order, with their numbers.
    returning: VecDeque<(usize, Vec<Returning>)>,
    /// The chunk that visits the device.
    visitor: Option<Visitor>,
}

/// A chunk on the device whose place is elsewhere.
struct Visitor {
    chunk: usize,
    /// Where it returns to.
    stored: Vec<Tensor>,
    /// On the device.
    here: Vec<Tensor>,
}

/// A tensor on its way to the device.
enum Arriving {
    Direct(PendingCopy),
    /// From disk to host memory, the first half of the way.
    ToHost(PendingCopy),
}

/// A tensor on its way back.
enum Returning {
    Direct(PendingCopy),
    /// To host memory, the first half of the way to its place on disk.
    ToHost(PendingCopy, Tensor),
}

impl States {
    /// Allocates `count` states and, with `has_master`, master weights, of `elements` f32 numbers for each chunk, in
    /// `memory`.
    pub(super) fn new(
        device: &Device,
        memory: Memory,
        (count, has_master): (usize, bool),
        elements: impl Iterator<Item = usize>,
    ) -> States {
        let store = |elements: usize, name| match memory {
            Memory::Device => device.alloc(DType::F32, [elements], Category::Optimizer, name),
            Memory::Host => device.alloc_host(DType::F32, [elements], Category::Optimizer, name),
            Memory::Disk => device.alloc_disk(DType::F32, [elements], Category::Optimizer, name),
        };
        let chunk = |elements: usize| {
            let states = (0..count).map(|_| store(elements, "optimizer_state"));
            states.chain(has_master.then(|| store(elements, "master_weights"))).collect()
        };
        let stored = elements.map(chunk).collect();
        let (arriving, returning, visitor) = (VecDeque::new(), VecDeque::new(), None);
        States { device: device.clone(), memory, has_master, stored, arriving, returning, visitor }
    }

    /// An update begins: the first chunks start to arrive.
    pub(super) fn begin(&mut self) {
        if self.memory != Memory::Device {
            (0..self.stored.len().min(AHEAD)).for_each(|chunk| self.fetch(chunk));
        }
    }

    /// Waits until `chunk` is on the device. Chunks are entered in order, from the first to the last.
    pub(super) fn enter(&mut self, chunk: usize) -> Result<(), DeviceError> {
        if self.memory == Memory::Device {
            return Ok(());
        }
        if chunk + AHEAD < self.stored.len() {
            self.fetch(chunk + AHEAD);
        }
        let (mut stored, mut here) = (Vec::new(), Vec::new());
        for tensor in self.arriving.pop_front().expect("each chunk is fetched before it is entered") {
            let (from, to) = self.arrive(tensor)?;
            stored.push(from);
            here.push(to);
        }
        self.visitor = Some(Visitor { chunk, stored, here });
        Ok(())
    }

    /// The elements `local` of the chunk that was entered: its states, and its master weights.
    pub(super) fn views(
        &mut self,
        chunk: usize,
        local: &Range<usize>,
    ) -> (Vec<ViewMut<'_>>, Option<ViewMut<'_>>) {
        let tensors = match &mut self.visitor {
            Some(visitor) if visitor.chunk == chunk => &mut visitor.here,
            _ => &mut self.stored[chunk],
        };
        let mut views: Vec<ViewMut> =
            tensors.iter_mut().map(|tensor| tensor.view_mut().range(local.clone())).collect();
        let master = if self.has_master { views.pop() } else { None };
        (views, master)
    }

    /// The update of the chunk that was entered has been issued: it returns.
    pub(super) fn leave(&mut self) -> Result<(), DeviceError> {
        let Some(Visitor { chunk, stored, here }) = self.visitor.take() else { return Ok(()) };
        let returning = here.into_iter().zip(stored).map(|(here, stored)| self.send(here, stored)).collect();
        self.returning.push_back((chunk, returning));
        if self.returning.len() > BEHIND { self.receive() } else { Ok(()) }
    }

    /// Waits until all chunks are in their places.
    pub(super) fn finish(&mut self) -> Result<(), DeviceError> {
        while !self.returning.is_empty() {
            self.receive()?;
        }
        Ok(())
    }

    /// Elements `range` of state `index` of a chunk, for checkpoints; the master weights come after the states.
    pub(super) fn read(
        &self,
        (chunk, index): (usize, usize),
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        self.device.read_stored(&self.stored[chunk][index], range, out)
    }

    /// Overwrites elements `range` of state `index` of a chunk.
    pub(super) fn write(
        &mut self,
        (chunk, index): (usize, usize),
        range: Range<usize>,
        from: &[f32],
    ) -> Result<(), DeviceError> {
        self.device.write_stored(from, &mut self.stored[chunk][index], range)
    }

    /// Starts to bring a chunk to the device.
    fn fetch(&mut self, chunk: usize) {
        let stored = std::mem::take(&mut self.stored[chunk]);
        let arriving = stored.into_iter().map(|stored| {
            let elements = stored.shape().elements();
            match self.memory {
                Memory::Disk if self.device.is_host_addressable() => {
                    Arriving::Direct(self.device.copy_from_disk(stored, self.window(elements)))
                }
                Memory::Disk => Arriving::ToHost(self.device.copy_from_disk(stored, self.passage(elements))),
                _ => Arriving::Direct(self.device.copy_to_device(stored, self.window(elements))),
            }
        });
        let arriving = arriving.collect();
        self.arriving.push_back(arriving);
    }

    /// The tensor in its place, and its copy on the device.
    fn arrive(&self, arriving: Arriving) -> Result<(Tensor, Tensor), DeviceError> {
        match arriving {
            Arriving::Direct(pending) => pending.wait(),
            Arriving::ToHost(pending) => {
                let (disk, passage) = pending.wait()?;
                let window = self.window(passage.shape().elements());
                let (_, window) = self.device.copy_to_device(passage, window).wait()?;
                Ok((disk, window))
            }
        }
    }

    fn send(&self, here: Tensor, stored: Tensor) -> Returning {
        match self.memory {
            Memory::Disk if self.device.is_host_addressable() => {
                Returning::Direct(self.device.copy_to_disk(here, stored))
            }
            Memory::Disk => {
                let passage = self.passage(here.shape().elements());
                Returning::ToHost(self.device.copy_to_host(here, passage), stored)
            }
            _ => Returning::Direct(self.device.copy_to_host(here, stored)),
        }
    }

    /// Waits until the chunk that returns first is in its place.
    fn receive(&mut self) -> Result<(), DeviceError> {
        let Some((chunk, returning)) = self.returning.pop_front() else { return Ok(()) };
        for tensor in returning {
            let (_, stored) = match tensor {
                Returning::Direct(pending) => pending.wait()?,
                Returning::ToHost(pending, disk) => {
                    let (_, passage) = pending.wait()?;
                    self.device.copy_to_disk(passage, disk).wait()?
                }
            };
            self.stored[chunk].push(stored);
        }
        Ok(())
    }

    /// Device memory of a visiting tensor.
    fn window(&self, elements: usize) -> Tensor {
        self.device.alloc(DType::F32, [elements], Category::Workspace, "optimizer.window")
    }

    /// Host memory that a tensor passes between disk and device.
    fn passage(&self, elements: usize) -> Tensor {
        self.device.alloc_host(DType::F32, [elements], Category::Workspace, "optimizer.passage")
    }
}
