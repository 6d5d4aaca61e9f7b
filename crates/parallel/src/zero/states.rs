//! Optimizer states, master weights and, where they are not in device memory, parameter shards in chunks, in the memory
//! that the run gives them (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857).
//!
//! In device memory, an update works on them where they lie. Chunks with a part in host memory or on disk visit the device:
//! the visitors ahead arrive while the update works on a chunk, and those behind return meanwhile. The order of the chunks
//! is that of the update, so nothing has to be guessed. Between disk and a device that the host cannot address, they pass
//! through host memory.

use std::collections::VecDeque;
use std::ops::Range;

use phalanx_plan::Precision;
use phalanx_tensor::{Category, DType, Device, DeviceError, Element, Memory, Tensor, ViewMut};

use crate::ways::{Arriving, Leaving, Ways};

use super::residence::{ChunkResidence, Residence};

/// Visitors that arrive while the update works on an earlier one. Two keep a transfer waiting behind the one that runs, so
/// that the stream does not idle between them.
const AHEAD: usize = 2;

/// Visitors that return while the update works on a later one.
const BEHIND: usize = 2;

/// What is stored for each chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// A state of the optimizer, f32.
    State,
    /// Master weights, f32.
    Master,
    /// This rank's shard of the parameters, in the compute type.
    Parameters,
}

/// A tensor of a chunk.
#[derive(Clone, Copy)]
struct Slot {
    role: Role,
    dtype: DType,
    memory: Memory,
}

/// What is stored of one chunk.
struct Stored {
    /// States, then master weights, then parameters that are not in device memory.
    slots: Vec<Slot>,
    /// One for each slot. Empty while the chunk is in flight or visits the device.
    tensors: Vec<Tensor>,
}

/// The tensors that the update of each chunk works on, beside gradients and parameters in device memory.
pub(super) struct States {
    device: Device,
    chunks: Vec<Stored>,
    /// The chunks that visit the device in an update, in order.
    visitors: Vec<usize>,
    /// How many of them this update has begun to fetch.
    fetched: usize,
    /// Chunks that arrive on the device, in order.
    arriving: VecDeque<Vec<Arriving>>,
    /// Chunks that return, in order, with their numbers.
    returning: VecDeque<(usize, Vec<Leaving>)>,
    /// The chunk that visits the device.
    visitor: Option<Visitor>,
}

/// What an update writes of a chunk, beside parameters in device memory.
pub(super) struct Updated<'a> {
    pub(super) states: Vec<ViewMut<'a>>,
    pub(super) master: Option<ViewMut<'a>>,
    /// This rank's parameters, where they are not in device memory.
    pub(super) parameters: Option<ViewMut<'a>>,
}

/// A chunk on the device whose place is elsewhere.
struct Visitor {
    chunk: usize,
    /// For each slot: where it returns to; None for what lies in device memory.
    stored: Vec<Option<Tensor>>,
    /// On the device.
    here: Vec<Tensor>,
}

impl States {
    /// Allocates `states` states and, where parameters have 16 bits, master weights; `elements` has the elements of each
    /// chunk that this rank updates. Parameters are stored here when they do not lie in device memory.
    pub(super) fn new(
        device: &Device,
        residence: &Residence,
        (states, precision): (usize, Precision),
        elements: impl Iterator<Item = usize>,
    ) -> States {
        let chunk = |(chunk, elements): (usize, usize)| {
            let slots = Stored::slots(residence.of(chunk), states, precision);
            let tensors = slots.iter().map(|slot| slot.store(device, elements)).collect();
            Stored { slots, tensors }
        };
        let chunks: Vec<Stored> = elements.enumerate().map(chunk).collect();
        let visitors = (0..chunks.len()).filter(|chunk| chunks[*chunk].visits()).collect();
        let (arriving, returning, visitor) = (VecDeque::new(), VecDeque::new(), None);
        States { device: device.clone(), chunks, visitors, fetched: 0, arriving, returning, visitor }
    }

    /// The number of the slot that has the f32 parameters of a chunk, for checkpoints: master weights, or f32 parameters
    /// that are stored here.
    pub(super) fn exact_parameters(&self, chunk: usize) -> Option<usize> {
        let exact = |slot: &Slot| slot.role != Role::State && slot.dtype == DType::F32;
        self.chunks[chunk].slots.iter().position(exact)
    }

    /// The number of the slot of a chunk's parameters, when they are stored here.
    pub(super) fn parameters(&self, chunk: usize) -> Option<usize> {
        self.chunks[chunk].position(Role::Parameters)
    }

    /// An update begins: the first visitors start to arrive.
    pub(super) fn begin(&mut self) {
        self.fetched = 0;
        (0..AHEAD).for_each(|_| self.fetch_next());
    }

    /// Waits until `chunk` is on the device. Chunks are entered in order, from the first to the last.
    pub(super) fn enter(&mut self, chunk: usize) -> Result<(), DeviceError> {
        if !self.chunks[chunk].visits() {
            return Ok(());
        }
        self.fetch_next();
        let (mut stored, mut here) = (Vec::new(), Vec::new());
        for tensor in self.arriving.pop_front().expect("each visitor is fetched before it is entered") {
            let (from, to) = ways(&self.device).arrive(tensor)?;
            stored.push(from);
            here.push(to);
        }
        self.visitor = Some(Visitor { chunk, stored, here });
        Ok(())
    }

    /// The elements `local` of this rank's part of the chunk that was entered.
    pub(super) fn updated(&mut self, chunk: usize, local: &Range<usize>) -> Updated<'_> {
        let Stored { slots, tensors } = &mut self.chunks[chunk];
        let tensors = match &mut self.visitor {
            Some(visitor) if visitor.chunk == chunk => &mut visitor.here,
            _ => tensors,
        };
        let mut updated = Updated { states: Vec::new(), master: None, parameters: None };
        for (slot, tensor) in slots.iter().zip(tensors) {
            let view = tensor.view_mut().range(local.clone());
            match slot.role {
                Role::State => updated.states.push(view),
                Role::Master => updated.master = Some(view),
                Role::Parameters => updated.parameters = Some(view),
            }
        }
        updated
    }

    /// The update of the chunk that was entered has been issued: it returns.
    pub(super) fn leave(&mut self) -> Result<(), DeviceError> {
        let Some(Visitor { chunk, stored, here }) = self.visitor.take() else { return Ok(()) };
        let returning = here
            .into_iter()
            .zip(stored)
            .map(|(here, stored)| ways(&self.device).send(here, stored))
            .collect();
        self.returning.push_back((chunk, returning));
        // While the device works on this chunk, the next one goes on from host memory to the device.
        if let Some(next) = self.arriving.pop_front() {
            let next = next.into_iter().map(|tensor| ways(&self.device).continue_arrival(tensor));
            let next = next.collect::<Result<_, _>>()?;
            self.arriving.push_front(next);
        }
        if self.returning.len() > BEHIND { self.receive() } else { Ok(()) }
    }

    /// Waits until all chunks are in their places.
    pub(super) fn finish(&mut self) -> Result<(), DeviceError> {
        while !self.returning.is_empty() {
            self.receive()?;
        }
        Ok(())
    }

    /// Starts to bring this rank's parameters of a chunk to the device, for forward or backward.
    pub(super) fn fetch_parameters(&mut self, chunk: usize) -> Arriving {
        let stored =
            self.chunks[chunk].tensors.pop().expect("parameters are the last slot, and are not fetched yet");
        ways(&self.device).bring(stored)
    }

    /// Waits for the parameters of a chunk; returns them on the device. They are only read there.
    pub(super) fn receive_parameters(
        &mut self,
        chunk: usize,
        arriving: Arriving,
    ) -> Result<Tensor, DeviceError> {
        let (stored, here) = ways(&self.device).arrive(arriving)?;
        self.chunks[chunk].tensors.extend(stored);
        Ok(here)
    }

    /// Elements `range` of state `index` of a chunk, for checkpoints; the master weights come after the states.
    pub(super) fn read(
        &self,
        (chunk, index): (usize, usize),
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        self.device.read_stored(&self.chunks[chunk].tensors[index], range, out)
    }

    /// Overwrites elements `range` of state `index` of a chunk.
    pub(super) fn write<T: Element>(
        &mut self,
        (chunk, index): (usize, usize),
        range: Range<usize>,
        from: &[T],
    ) -> Result<(), DeviceError> {
        self.device.write_stored(from, &mut self.chunks[chunk].tensors[index], range)
    }

    /// Starts to bring the next visitor to the device, if there is one.
    fn fetch_next(&mut self) {
        let Some(chunk) = self.visitors.get(self.fetched) else { return };
        self.fetched += 1;
        let chunk = &mut self.chunks[*chunk];
        let has_master = chunk.position(Role::Master).is_some();
        let stored = std::mem::take(&mut chunk.tensors);
        let slots = chunk.slots.clone();
        let arriving = slots.iter().zip(stored).map(|(slot, stored)| {
            if slot.role == Role::Parameters && has_master {
                // The update overwrites them with the rounded master weights.
                let here = ways(&self.device).window(&stored);
                return Arriving::Ready { stored: Some(stored), here };
            }
            ways(&self.device).bring(stored)
        });
        let arriving = arriving.collect();
        self.arriving.push_back(arriving);
    }

    /// Waits until the chunk that returns first is in its place; those behind it start the second half of their way.
    fn receive(&mut self) -> Result<(), DeviceError> {
        let Some((chunk, returning)) = self.returning.pop_front() else { return Ok(()) };
        let ways = ways(&self.device);
        let go_on = |returning: Vec<Leaving>| -> Result<Vec<Leaving>, DeviceError> {
            returning.into_iter().map(|tensor| ways.continue_departure(tensor)).collect()
        };
        let returning = go_on(returning)?;
        if let Some((behind, next)) = self.returning.pop_front() {
            self.returning.push_front((behind, go_on(next)?));
        }
        let tensors = returning.into_iter().map(|tensor| ways.depart(tensor));
        self.chunks[chunk].tensors = tensors.collect::<Result<_, _>>()?;
        Ok(())
    }
}

/// The ways of chunks that visit the device.
fn ways(device: &Device) -> Ways<'_> {
    Ways { device, category: Category::Workspace, name: "visitor" }
}

impl Stored {
    fn slots(lies: ChunkResidence, states: usize, precision: Precision) -> Vec<Slot> {
        let f32_with = |role| Slot { role, dtype: DType::F32, memory: lies.optimizer };
        let mut slots = vec![f32_with(Role::State); states];
        if precision.has_master() {
            slots.push(f32_with(Role::Master));
        }
        if lies.parameters != Memory::Device {
            slots.push(Slot { role: Role::Parameters, dtype: precision.compute, memory: lies.parameters });
        }
        slots
    }

    /// Whether an update must bring something to the device.
    fn visits(&self) -> bool {
        self.slots.iter().any(|slot| slot.memory != Memory::Device)
    }

    fn position(&self, role: Role) -> Option<usize> {
        self.slots.iter().position(|slot| slot.role == role)
    }
}

impl Slot {
    fn store(self, device: &Device, elements: usize) -> Tensor {
        let (category, name) = match self.role {
            Role::State => (Category::Optimizer, "optimizer_state"),
            Role::Master => (Category::Optimizer, "master_weights"),
            Role::Parameters => (Category::Parameters, "parameter_chunk"),
        };
        match self.memory {
            Memory::Device => device.alloc(self.dtype, [elements], category, name),
            Memory::Host => device.alloc_host(self.dtype, [elements], category, name),
            Memory::Disk => device.alloc_disk(self.dtype, [elements], category, name),
        }
    }
}
