//! Optimizer states, master weights and, where they are not in device memory, parameter shards and gradients in chunks, in
//! the memory that the run gives them (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857).
//!
//! An update works in place on memory that it can reach: device memory, and host memory if that is the same. The rest is stored
//! in tiles of at most one buffer, which visit the device (`visits`). So an update needs memory for a few tiles, however large a
//! chunk is.

use std::collections::VecDeque;
use std::ops::Range;

use phalanx_plan::Precision;
use phalanx_tensor::{Category, DType, Device, DeviceError, Element, Memory, Tensor, View, ViewMut};

use super::Options;
use super::floats::Numbers;
use super::order::UpdateOrder;
use super::residence::{ChunkResidence, Residence};
use super::rules::Places;
use super::visits::{Tile, Visits};
use crate::tiles::{self, Arriving, Leaving};

/// Role of stored numbers in a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// A state of the optimizer, f32, by the number of its name.
    State(usize),
    /// Master weights, f32.
    Master,
    /// This rank's shard of the parameters, in the type of its chunk.
    Parameters,
    /// Gradients, in the type in which they accumulate; an update only reads them.
    Gradients,
}

/// One part of a chunk, in one memory.
pub(super) struct Slot {
    pub(super) role: Role,
    dtype: DType,
    pub(super) memory: Memory,
    /// Elements to which its numbers belong: a state may have another number of them.
    places: Places,
    /// The numbers in each tile.
    ranges: Vec<Range<usize>>,
    /// One tensor where updates reach it, tiles elsewhere. None while a tile is in flight.
    pub(super) tiles: Vec<Option<Tensor>>,
}

/// The stored parts of one chunk.
pub(super) struct Stored {
    /// Elements of the chunk that this rank updates.
    pub(super) elements: usize,
    /// The same in tiles of at most one buffer, or of one parameter that is not cut.
    pub(super) tiles: Vec<Range<usize>>,
    /// True if the host updates the chunk, in its own memory.
    is_updated_on_host: bool,
    /// States, then master weights, then parameters and gradients that are not in device memory.
    pub(super) slots: Vec<Slot>,
}

/// The tensors that the update of each chunk works on, beside gradients and parameters in device memory.
pub(super) struct States {
    pub(super) device: Device,
    pub(super) chunks: Vec<Stored>,
    pub(super) visits: Visits,
    /// Gradients on their way to where they stay, in order, with their chunks.
    pub(super) leaving: VecDeque<(usize, Leaving)>,
}

/// Tensors of a chunk on which an update works, beside parameters in device memory.
pub(super) struct Updated<'a> {
    /// With the numbers of their names.
    pub(super) states: Vec<(usize, ViewMut<'a>)>,
    pub(super) master: Option<ViewMut<'a>>,
    /// This rank's parameters, where they are not in device memory.
    pub(super) parameters: Option<ViewMut<'a>>,
    /// The gradient, where it is not in device memory.
    pub(super) gradient: Option<View<'a>>,
}

/// The elements of a chunk that a rank stores.
pub(super) struct Elements {
    /// Those that it updates.
    pub(super) updated: usize,
    /// The type of the parameters.
    pub(super) parameters: DType,
    /// Those of gradients outside of device memory.
    pub(super) gradients: usize,
    /// Parameters that no tile may cut.
    pub(super) uncut: Vec<Range<usize>>,
    /// The optimizer's states, by the numbers of their names.
    pub(super) states: Vec<(usize, Places)>,
    /// True if the chunk is updated; otherwise it has parameters alone.
    pub(super) is_updated: bool,
}

/// Returns whether kernels of the device compute in this memory.
pub(super) fn is_in_reach(device: &Device, memory: Memory) -> bool {
    memory == Memory::Device || (memory == Memory::Host && device.is_host_addressable())
}

impl States {
    /// Allocates states and, where parameters have 16 bits, master weights; `elements` has those of each chunk. Parameters and gradients are stored here when they do not lie in device
    /// memory.
    pub(super) fn new(
        device: &Device,
        (residence, options): (&Residence, &Options),
        precision: Precision,
        elements: impl Iterator<Item = Elements>,
        order: &UpdateOrder,
    ) -> States {
        let buffer = options.buffer;
        // Where the host addresses device memory, kernels of the device are the host's.
        let has_own_host = options.updates_on_host && !device.is_host_addressable();
        let is_updated_on_host = |lies: ChunkResidence| has_own_host && lies.optimizer != Memory::Device;
        let chunk = |(chunk, elements): (usize, Elements)| {
            let lies = residence.of(chunk);
            let Elements { updated, parameters, gradients, uncut, states, is_updated } = elements;
            let tiles = tiles_of(updated, buffer, &uncut);
            let state = |(number, places): (usize, Places)| {
                let ranges =
                    tiles.iter().map(|tile| places.before(tile.start)..places.before(tile.end)).collect();
                Slot::new(device, (Role::State(number), DType::F32, lies.optimizer), places, ranges)
            };
            let part = |(role, dtype, memory): (Role, DType, Memory)| {
                let ranges = match role {
                    Role::Gradients => tiles_of(gradients, buffer, &uncut),
                    _ => tiles.clone(),
                };
                Slot::new(device, (role, dtype, memory), Places::Like, ranges)
            };
            let mut parts = parts(lies, precision, parameters);
            parts.retain(|(role, ..)| is_updated || *role == Role::Parameters);
            let states: Vec<Slot> = states.into_iter().map(state).collect();
            let slots = states.into_iter().chain(parts.into_iter().map(part)).collect();
            Stored { elements: updated, is_updated_on_host: is_updated_on_host(lies), slots, tiles }
        };
        let chunks: Vec<Stored> = elements.enumerate().map(chunk).collect();
        let (visits, leaving) = (Visits::default(), VecDeque::new());
        let mut states = States { device: device.clone(), chunks, visits, leaving };
        let visits = |chunk: &usize| states.travels(*chunk) && !states.is_updated_on_host(*chunk);
        let tiles = states.tiles_in_order(order, visits);
        states.visits = Visits::new(tiles.clone(), order.window(tiles.len()), options.update_in_backward);
        states
    }

    /// The tiles of the chunks for which `is_wanted`, in the order of their updates.
    pub(super) fn tiles_in_order(
        &self,
        order: &UpdateOrder,
        is_wanted: impl Fn(&usize) -> bool,
    ) -> Vec<Tile> {
        let chunks = order.chunks.iter().copied().filter(is_wanted);
        chunks.flat_map(|chunk| (0..self.tiles(chunk).len()).map(move |tile| (chunk, tile))).collect()
    }

    /// Returns whether kernels of the device cannot work in place on some part of a chunk.
    fn travels(&self, chunk: usize) -> bool {
        self.chunks[chunk].slots.iter().any(|slot| !is_in_reach(&self.device, slot.memory))
    }

    /// Returns whether the host updates a chunk, in its own memory.
    pub(super) fn is_updated_on_host(&self, chunk: usize) -> bool {
        self.chunks[chunk].is_updated_on_host
    }

    /// Host memory for elements of `dtype` of this rank's part of a chunk, in the tiles of its update.
    pub(super) fn in_host_memory(&self, chunk: &Stored, dtype: DType) -> Slot {
        let role = (Role::Parameters, dtype, Memory::Host);
        Slot::new(&self.device, role, Places::Like, chunk.tiles.clone())
    }

    /// The elements of this rank's part of a chunk that an update works on at a time.
    pub(super) fn tiles(&self, chunk: usize) -> Vec<Range<usize>> {
        match self.travels(chunk) {
            true => self.chunks[chunk].tiles.clone(),
            false => std::iter::once(0..self.chunks[chunk].elements).collect(),
        }
    }

    /// The number of the slot that has the f32 parameters of a chunk, for checkpoints: master weights, or f32 parameters
    /// that are stored here.
    pub(super) fn exact_parameters(&self, chunk: usize) -> Option<usize> {
        let exact =
            |slot: &Slot| matches!(slot.role, Role::Master | Role::Parameters) && slot.dtype == DType::F32;
        self.chunks[chunk].slots.iter().position(exact)
    }

    /// The number of the slot of a chunk's parameters, when they are stored here.
    pub(super) fn parameters(&self, chunk: usize) -> Option<usize> {
        self.chunks[chunk].position(Role::Parameters)
    }

    /// The elements `local` of this rank's part of a chunk, of which they are in tile `tile`, which was entered.
    pub(super) fn updated(&mut self, (chunk, tile): (usize, usize), local: &Range<usize>) -> Updated<'_> {
        let visitor = self.visits.visitor_mut((chunk, tile));
        let mut here: Vec<Option<&mut Tensor>> = Vec::new();
        here.resize_with(self.chunks[chunk].slots.len(), || None);
        for (slot, tensor) in visitor.into_iter().flatten() {
            here[slot] = Some(tensor);
        }
        let mut updated = Updated { states: Vec::new(), master: None, parameters: None, gradient: None };
        for (slot, visiting) in self.chunks[chunk].slots.iter_mut().zip(here) {
            let tile = if visiting.is_some() { tile } else { 0 };
            let Some(range) = slot.within_tile(tile, local) else { continue };
            let tensor =
                visiting.or(slot.tiles[0].as_mut()).expect("what is in reach never travels in an update");
            match slot.role {
                Role::State(number) => updated.states.push((number, tensor.view_mut().range(range))),
                Role::Master => updated.master = Some(tensor.view_mut().range(range)),
                Role::Parameters => updated.parameters = Some(tensor.view_mut().range(range)),
                Role::Gradients => updated.gradient = Some(tensor.view().range(range)),
            }
        }
        updated
    }

    /// Starts to bring this rank's parameters of a chunk to the device, for forward or backward.
    pub(super) fn fetch_parameters(&mut self, chunk: usize) -> Arriving {
        let elements = self.chunks[chunk].elements;
        let tiles = self.chunks[chunk].slot_mut(Role::Parameters).take();
        tiles::bring(&self.device, tiles, 0..elements)
    }

    /// Waits for the parameters of a chunk; returns them on the device. They are only read there.
    pub(super) fn receive_parameters(
        &mut self,
        chunk: usize,
        arriving: Arriving,
    ) -> Result<Tensor, DeviceError> {
        let (tiles, here) = tiles::arrive(&self.device, arriving)?;
        self.chunks[chunk].slot_mut(Role::Parameters).put(tiles);
        Ok(here)
    }

    /// The numbers of a state that belong to elements `local` of this rank's part of a chunk, a part of one parameter. None when the
    /// parameter has no such state.
    pub(super) fn numbers(
        &self,
        (chunk, state): (usize, usize),
        local: &Range<usize>,
    ) -> Option<Range<usize>> {
        let slot = self.chunks[chunk].position(Role::State(state))?;
        self.chunks[chunk].slots[slot].places.numbers(local)
    }

    /// For each optimizer state of a chunk: its numbers in each tile, or all of them where it is not stored in tiles.
    pub(super) fn state_numbers(&self, chunk: usize) -> Vec<Vec<u64>> {
        let states = self.chunks[chunk].slots.iter().filter(|slot| matches!(slot.role, Role::State(_)));
        states.map(|slot| slot.ranges.iter().map(|range| range.len() as u64).collect()).collect()
    }

    /// Elements of each tile of a chunk's gradients, if they are stored here.
    pub(super) fn gradient_tiles(&self, chunk: usize) -> Vec<u64> {
        let gradients = self.chunks[chunk].slots.iter().filter(|slot| slot.role == Role::Gradients);
        gradients.flat_map(|slot| slot.ranges.iter().map(|range| range.len() as u64)).collect()
    }

    /// Bytes of a chunk's states and master weights.
    pub(super) fn optimizer_bytes(&self, chunk: usize) -> u64 {
        let is_optimizer = |slot: &&Slot| matches!(slot.role, Role::State(_) | Role::Master);
        let slots = self.chunks[chunk].slots.iter().filter(is_optimizer);
        slots.map(|slot| slot.dtype.bytes_of(slot.elements()) as u64).sum()
    }

    /// Numbers `range` of slot `index` of a chunk, for checkpoints.
    pub(super) fn read(
        &self,
        (chunk, index): (usize, usize),
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let slot = &self.chunks[chunk].slots[index];
        for (tile, inside, within) in slot.split(&range) {
            let tile = slot.tiles[tile].as_ref().expect("no tile is in flight between phases");
            match slot.dtype {
                DType::F32 => self.device.read_stored(tile, inside, &mut out[within])?,
                _ => out[within].copy_from_slice(&Numbers::Stored(tile, inside).read(&self.device)?),
            }
        }
        Ok(())
    }

    /// Overwrites numbers `range` of slot `index` of a chunk; those in blocks with their words.
    pub(super) fn write<T: Element>(
        &mut self,
        (chunk, index): (usize, usize),
        range: Range<usize>,
        from: &[T],
    ) -> Result<(), DeviceError> {
        let slot = &mut self.chunks[chunk].slots[index];
        let dtype = slot.dtype;
        let place = |at: usize| dtype.bytes_of(at) / T::DTYPE.bytes();
        for (tile, inside, within) in slot.split(&range) {
            let tile = slot.tiles[tile].as_mut().expect("no tile is in flight between phases");
            self.device.write_stored(&from[place(within.start)..place(within.end)], tile, inside)?;
        }
        Ok(())
    }
}

/// The parts of a chunk that are stored beside states, with their element types and memories.
fn parts(lies: ChunkResidence, precision: Precision, parameters: DType) -> Vec<(Role, DType, Memory)> {
    let mut parts = Vec::new();
    if precision.has_master() {
        parts.push((Role::Master, DType::F32, lies.optimizer));
    }
    if lies.parameters != Memory::Device {
        parts.push((Role::Parameters, parameters, lies.parameters));
    }
    if lies.gradients != Memory::Device {
        parts.push((Role::Gradients, precision.accumulate, lies.gradients));
    }
    parts
}

/// Elements cut into pieces of at most `buffer`, but not within the ranges that are not cut: one that is larger is a piece.
fn tiles_of(elements: usize, buffer: usize, uncut: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut start = 0usize;
    let next = || {
        let fits = start..start.saturating_add(buffer).min(elements);
        let cut = uncut.iter().find(|uncut| uncut.start < fits.end && fits.end < uncut.end);
        let end = match cut {
            Some(uncut) if uncut.start > start => uncut.start,
            Some(uncut) => uncut.end.min(elements),
            None => fits.end,
        };
        let tile = std::mem::replace(&mut start, end)..end;
        (!tile.is_empty()).then_some(tile)
    };
    std::iter::from_fn(next).collect()
}

impl Stored {
    pub(super) fn position(&self, role: Role) -> Option<usize> {
        self.slots.iter().position(|slot| slot.role == role)
    }

    pub(super) fn slot_mut(&mut self, role: Role) -> &mut Slot {
        let position = self.position(role).expect("the chunk has such a part outside of device memory");
        &mut self.slots[position]
    }
}

impl Slot {
    /// Memory for numbers in tiles, or all of them together where updates reach them.
    fn new(
        device: &Device,
        (role, dtype, memory): (Role, DType, Memory),
        places: Places,
        mut ranges: Vec<Range<usize>>,
    ) -> Slot {
        let (category, name) = match role {
            Role::State(_) => (Category::Optimizer, "optimizer_state"),
            Role::Master => (Category::Optimizer, "master_weights"),
            Role::Parameters => (Category::Parameters, "parameter_chunk"),
            Role::Gradients => (Category::Gradients, "gradient_chunk"),
        };
        if is_in_reach(device, memory) {
            ranges = std::iter::once(0..ranges.last().map_or(0, |last| last.end)).collect();
        }
        let tile = |range: &Range<usize>| {
            // A tile in which no parameter has the state is in its place nevertheless.
            let elements = range.len().max(1);
            Some(match memory {
                Memory::Device => device.alloc(dtype, [elements], category, name),
                Memory::Host => device.alloc_host(dtype, [elements], category, name),
                Memory::Disk => device.alloc_disk(dtype, [elements], category, name),
            })
        };
        let tiles = ranges.iter().map(tile).collect();
        Slot { role, dtype, memory, places, ranges, tiles }
    }

    fn elements(&self) -> usize {
        self.ranges.last().map_or(0, |last| last.end)
    }

    /// Memory for the same elements: of a part that is not a state.
    pub(super) fn twin(&self, device: &Device) -> Slot {
        Slot::new(device, (self.role, self.dtype, self.memory), Places::Like, self.ranges.clone())
    }

    /// The numbers in a tile that belong to some elements of a parameter; None when it has no such state.
    pub(super) fn within_tile(&self, tile: usize, local: &Range<usize>) -> Option<Range<usize>> {
        let numbers = self.places.numbers(local)?;
        let first = self.ranges[tile].start;
        Some(numbers.start - first..numbers.end - first)
    }

    pub(super) fn take(&mut self) -> Vec<Tensor> {
        let tiles = self.tiles.iter_mut().map(|tile| tile.take().expect("it is not in flight yet"));
        tiles.collect()
    }

    pub(super) fn put(&mut self, tiles: Vec<Tensor>) {
        self.tiles = tiles.into_iter().map(Some).collect();
    }

    /// Each tile that has numbers of `range`: its place, which of its numbers these are, and their place in the range.
    pub(super) fn split(&self, range: &Range<usize>) -> Vec<(usize, Range<usize>, Range<usize>)> {
        let mut parts = Vec::new();
        for (number, tile) in self.ranges.iter().enumerate() {
            let inside = range.start.max(tile.start)..range.end.min(tile.end);
            if !inside.is_empty() {
                let within = inside.start - range.start..inside.end - range.start;
                parts.push((number, inside.start - tile.start..inside.end - tile.start, within));
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_their_elements_once() {
        assert_eq!(tiles_of(10, 4, &[]), [0..4, 4..8, 8..10]);
        assert_eq!(tiles_of(8, 4, &[]), [0..4, 4..8]);
        assert!(tiles_of(0, 8, &[]).is_empty());
        assert_eq!(tiles_of(20, 4, &[6..12, 12..14, 15..16]), [0..4, 4..6, 6..12, 12..16, 16..20]);
    }
}
