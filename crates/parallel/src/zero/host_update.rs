//! Updates that the host's processor computes where optimizer states lie (ZeRO-Offload, arXiv 2101.06840). For each
//! parameter in bf16 with a gradient in f32, 6 bytes cross to and from a device whose memory the host cannot address, instead
//! of the 24 of states and master weights.
//!
//! Each tile takes three steps. Its gradient comes to host memory, and what lies on disk is read, while tiles before it are
//! updated. The host updates states and master weights where they lie, and rounds the parameters in the same pass. Then the
//! parameters go to the device, and what lies on disk is written, while the next tile is updated.

use std::collections::VecDeque;
use std::ops::Range;

use phalanx_collectives::CollectiveError;
use phalanx_plan::ZeroStage;
use phalanx_tensor::{
    Category, DType, Device, DeviceError, Memory, PendingCopy, PendingHostWork, PendingTiles, Tensor, View,
};

use super::rules::{Rules, Tensors};
use super::states::Role;
use super::update::{Step, stepped, write_again};
use super::visits::{AHEAD, Tile, Window};
use super::{Map, Zero};

/// A part of a tile, in host memory during its update.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TilePart {
    /// A part that stays outside of device memory: the number of its slot.
    Slot(usize),
    /// The gradient, from device memory.
    Gradient,
    /// Parameters that stay in device memory.
    Parameters,
    /// Memory for the scaled gradient of a parameter that is updated as a whole.
    Scaled,
}

/// A part that comes to host memory.
enum Inbound {
    /// It lies there.
    Here(Tensor),
    FromDisk(PendingTiles),
    FromDevice(PendingCopy),
    /// The update only writes it; with its place on disk, if that is where it stays.
    Unread(DType, Option<Tensor>),
}

/// A part that leaves host memory.
enum Outbound {
    /// It is in its place.
    Here(Tensor),
    ToDisk(PendingTiles),
    ToDevice(PendingCopy),
}

/// A tile that the host updates: its tensors in host memory, and for each the part and its place on disk.
struct Working {
    tile: Tile,
    parts: Vec<(TilePart, Option<Tensor>)>,
    work: PendingHostWork,
}

/// The tiles of an update that the host computes, and how far they have come.
pub(super) struct HostUpdate {
    tiles: Vec<Tile>,
    fetched: usize,
    /// With updates within backward: of how many of them the gradients and parameters have begun to come.
    joined: Option<usize>,
    window: Window,
    coming: VecDeque<Vec<(TilePart, Inbound)>>,
    working: Option<Working>,
    leaving: VecDeque<(Tile, Vec<(TilePart, Outbound)>)>,
    /// The factor of gradients in host memory, `[1]`.
    factor: Tensor,
}

impl Zero {
    /// Prepares the updates that the host computes. None when there are none.
    pub(super) fn begin_on_host(&mut self, factor: View) -> Result<Option<HostUpdate>, DeviceError> {
        let is_wanted = |chunk: &usize| self.states.is_updated_on_host(*chunk);
        let tiles = self.states.tiles_in_order(&self.order, is_wanted);
        if tiles.is_empty() {
            return Ok(None);
        }
        let mut here = self.device.alloc(DType::F32, [1], Category::Workspace, "update.factor");
        self.device.copy(factor, here.view_mut());
        let there = self.device.alloc_host(DType::F32, [1], Category::Workspace, "update.factor");
        let (_, factor) = self.device.copy_to_host(here, there).wait()?;
        let (coming, leaving) = (VecDeque::new(), VecDeque::new());
        let window = self.order.window(tiles.len());
        let joined = self.options.update_in_backward.then_some(0);
        let (fetched, working) = (0, None);
        Ok(Some(HostUpdate { tiles, fetched, joined, window, coming, working, leaving, factor }))
    }

    /// The first tiles begin to come.
    pub(super) fn read_first_on_host(&mut self, update: &mut HostUpdate) {
        (0..update.window.ahead).for_each(|_| self.fetch_to_host(update));
    }

    /// Starts the update of the next tile, and moves those around it on.
    pub(super) fn update_on_host(
        &mut self,
        update: &mut HostUpdate,
        tile: Tile,
        range: Range<usize>,
        step: Step,
    ) -> Result<(), CollectiveError> {
        self.fetch_to_host(update);
        self.join_on_host(update, tile.0);
        let coming = update.coming.pop_front().expect("each tile is fetched before it is updated");
        let (mut parts, mut tensors) = (Vec::new(), Vec::new());
        for (part, inbound) in coming {
            let (tensor, stored) = self.arrive_on_host(inbound, range.len())?;
            parts.push((part, stored));
            tensors.push(tensor);
        }
        if let Some(scaled) =
            scaled_on_host(&self.device, (&self.map, &self.rules), self.options.stage, (tile.0, &range))
        {
            parts.push((TilePart::Scaled, None));
            tensors.push(scaled);
        }
        let factor = update.factor.view();
        let work = self.device.run_on_host("update", tensors, |host, tensors| {
            self.issue_on_host(host, (tile, &range), (&parts, tensors), (step, factor));
        });
        self.leave_host(update)?;
        update.working = Some(Working { tile, parts, work });
        Ok(())
    }

    /// Waits until all tiles are updated and in their places.
    pub(super) fn finish_on_host(&mut self, mut update: HostUpdate) -> Result<(), CollectiveError> {
        self.leave_host(&mut update)?;
        while !update.leaving.is_empty() {
            self.receive_from_host(&mut update)?;
        }
        Ok(())
    }

    /// Starts to bring the parts of the next tile to host memory, if there is one.
    fn fetch_to_host(&mut self, update: &mut HostUpdate) {
        let Some((chunk, tile)) = update.tiles.get(update.fetched).copied() else { return };
        update.fetched += 1;
        let is_early = update.joined.is_some();
        let mut parts = self.bring_slots((chunk, tile), |role| !(is_early && role == Role::Parameters));
        if !is_early {
            self.bring_from_device((chunk, tile), &mut parts);
        }
        update.coming.push_back(parts);
    }

    /// Within backward: brings gradients and parameters of the tile that is updated next, and of those behind it in its chunk.
    fn join_on_host(&mut self, update: &mut HostUpdate, chunk: usize) {
        let Some(mut joined) = update.joined else { return };
        let first = update.fetched - update.coming.len();
        while joined < (first + 1 + AHEAD).min(update.fetched) && update.tiles[joined].0 == chunk {
            let tile = update.tiles[joined];
            let mut parts = self.bring_slots(tile, |role| role == Role::Parameters);
            self.bring_from_device(tile, &mut parts);
            update.coming[joined - first].extend(parts);
            joined += 1;
        }
        update.joined = Some(joined);
    }

    /// Starts to bring the `wanted` stored parts of a tile to host memory.
    fn bring_slots(
        &mut self,
        (chunk, tile): Tile,
        wanted: impl Fn(Role) -> bool,
    ) -> Vec<(TilePart, Inbound)> {
        let range = self.states.tiles(chunk)[tile].clone();
        let stored = &mut self.states.chunks[chunk];
        let has_master = stored.position(Role::Master).is_some();
        let mut parts = Vec::new();
        for (number, slot) in stored.slots.iter_mut().enumerate().filter(|(_, slot)| wanted(slot.role)) {
            let tensor = slot.tiles[tile].take().expect("it is not in flight yet");
            let is_unread = slot.role == Role::Parameters && has_master;
            let inbound = match slot.memory {
                Memory::Disk if is_unread => Inbound::Unread(tensor.dtype(), Some(tensor)),
                Memory::Disk => {
                    let read = match slot.role {
                        Role::State(_) => tensor.shape().elements(),
                        _ => range.len(),
                    };
                    let here = in_host_memory(&self.device, tensor.dtype(), read);
                    Inbound::FromDisk(self.device.copy_from_tiles(vec![tensor], 0, here))
                }
                _ => Inbound::Here(tensor),
            };
            parts.push((TilePart::Slot(number), inbound));
        }
        parts
    }

    /// Starts to bring the parts of a tile that lie in device memory to host memory.
    fn bring_from_device(&self, (chunk, tile): Tile, parts: &mut Vec<(TilePart, Inbound)>) {
        let range = self.states.tiles(chunk)[tile].clone();
        let has_master = self.states.chunks[chunk].position(Role::Master).is_some();
        let in_chunk = in_chunk(&self.map, self.options.stage, chunk, &range);
        if !self.states.has_gradients(chunk) {
            let gradient = self.gradients.summed(&self.parameters, &self.map, chunk, in_chunk.clone());
            parts.push((TilePart::Gradient, Inbound::FromDevice(self.copy_to_host(gradient))));
        }
        if self.states.parameters(chunk).is_none() {
            let inbound = match has_master {
                true => Inbound::Unread(self.precision.compute, None),
                false => {
                    let (here, first) = self.parameters.resident(&self.map, chunk);
                    let here = here.range(in_chunk.start - first.start..in_chunk.end - first.start);
                    Inbound::FromDevice(self.copy_to_host(here))
                }
            };
            parts.push((TilePart::Parameters, inbound));
        }
    }

    /// Starts to copy a part of a tensor on the device to host memory.
    fn copy_to_host(&self, from: View) -> PendingCopy {
        let (dtype, elements) = (from.dtype(), from.elements());
        let mut window = self.device.alloc(dtype, [elements], Category::Workspace, "update.window");
        self.device.copy(from, window.view_mut());
        self.device.copy_to_host(window, in_host_memory(&self.device, dtype, elements))
    }

    /// Waits for a part; returns it in host memory, and its place on disk.
    fn arrive_on_host(
        &self,
        inbound: Inbound,
        elements: usize,
    ) -> Result<(Tensor, Option<Tensor>), DeviceError> {
        Ok(match inbound {
            Inbound::Here(tensor) => (tensor, None),
            Inbound::FromDisk(pending) => {
                let (here, mut stored) = pending.wait()?;
                (here, stored.pop())
            }
            Inbound::FromDevice(pending) => (pending.wait()?.1, None),
            Inbound::Unread(dtype, stored) => (in_host_memory(&self.device, dtype, elements), stored),
        })
    }

    /// Issues the update of a tile: elements `range` of this rank's part of a chunk.
    pub(super) fn issue_on_host(
        &self,
        host: &Device,
        ((chunk, tile), range): (Tile, &Range<usize>),
        (parts, tensors): (&[(TilePart, Option<Tensor>)], &mut [Tensor]),
        (step, factor): (Step, View),
    ) {
        let in_chunk = in_chunk(&self.map, self.options.stage, chunk, range);
        let slots = &self.states.chunks[chunk].slots;
        for piece in self.rules.pieces(&self.map, chunk, &in_chunk) {
            let local = piece.in_chunk.start - in_chunk.start..piece.in_chunk.end - in_chunk.start;
            let in_part = range.start + local.start..range.start + local.end;
            let (mut states, mut master, mut own, mut gradient) = (Vec::new(), None, None, None);
            let mut scaled = None;
            for ((part, _), tensor) in parts.iter().zip(tensors.iter_mut()) {
                let (role, within) = match part {
                    TilePart::Scaled => {
                        let elements = self.rules.scaled_elements(&piece);
                        scaled = elements.map(|elements| tensor.view_mut().range(0..elements));
                        continue;
                    }
                    TilePart::Slot(slot) => (slots[*slot].role, slots[*slot].within_tile(tile, &in_part)),
                    TilePart::Gradient => (Role::Gradients, Some(local.clone())),
                    TilePart::Parameters => (Role::Parameters, Some(local.clone())),
                };
                let Some(within) = within else { continue };
                match role {
                    Role::State(number) => states.push((number, tensor.view_mut().range(within))),
                    Role::Master => master = Some(tensor.view_mut().range(within)),
                    Role::Parameters => own = Some(tensor.view_mut().range(within)),
                    Role::Gradients => gradient = Some(tensor.view().range(within)),
                }
            }
            let own = own.expect("the tile has parameters");
            let (parameters, rounded) = match master {
                Some(master) => (master, Some(own)),
                None => (own, None),
            };
            if !step.applies {
                write_again(host, parameters, rounded);
                continue;
            }
            let gradient = gradient.expect("the tile has a gradient");
            let tensors = Tensors { parameters, rounded, gradient, factor, scaled, states };
            self.optimizer.apply(host, self.rules.update(piece.rule, (step.number, step.lr), tensors));
        }
    }

    /// Waits for the tile that the host updates; its parts start to leave.
    fn leave_host(&mut self, update: &mut HostUpdate) -> Result<(), CollectiveError> {
        let Some(Working { tile, parts, work }) = update.working.take() else { return Ok(()) };
        let mut leaving = Vec::new();
        for ((part, stored), tensor) in parts.into_iter().zip(work.wait()?) {
            let is_gradient = match part {
                TilePart::Slot(slot) => self.states.chunks[tile.0].slots[slot].role == Role::Gradients,
                part => part == TilePart::Gradient,
            };
            let outbound = match (part, stored) {
                // It was only read.
                (TilePart::Slot(_), Some(stored)) if is_gradient => Outbound::Here(stored),
                (TilePart::Gradient | TilePart::Scaled, _) => continue,
                (_, Some(stored)) => {
                    let all = 0..tensor.shape().elements();
                    Outbound::ToDisk(self.device.copy_to_tiles(tensor, all, vec![stored], 0))
                }
                (TilePart::Parameters, None) => {
                    let (dtype, shape) = (tensor.dtype(), tensor.shape());
                    let window = self.device.alloc(dtype, shape, Category::Workspace, "update.window");
                    Outbound::ToDevice(self.device.copy_to_device(tensor, window))
                }
                (TilePart::Slot(_), None) => Outbound::Here(tensor),
            };
            leaving.push((part, outbound));
        }
        update.leaving.push_back((tile, leaving));
        if update.leaving.len() > update.window.behind { self.receive_from_host(update) } else { Ok(()) }
    }

    /// Waits until the tile that leaves first is in its places. After the last one of a chunk, the other ranks get theirs.
    fn receive_from_host(&mut self, update: &mut HostUpdate) -> Result<(), CollectiveError> {
        let Some(((chunk, tile), leaving)) = update.leaving.pop_front() else { return Ok(()) };
        let tiles = self.states.tiles(chunk);
        for (part, outbound) in leaving {
            let tensor = match outbound {
                Outbound::Here(tensor) => Some(tensor),
                Outbound::ToDisk(pending) => pending.wait()?.1.pop(),
                Outbound::ToDevice(pending) => Some(pending.wait()?.1),
            };
            match part {
                TilePart::Slot(slot) => self.states.chunks[chunk].slots[slot].tiles[tile] = tensor,
                TilePart::Gradient | TilePart::Scaled | TilePart::Parameters => {
                    let window = tensor.expect("a copy gives back its target");
                    self.overwrite_parameters(chunk, &tiles[tile], &window);
                }
            }
        }
        if tile + 1 == tiles.len() {
            self.publish_updated(chunk)?;
        }
        Ok(())
    }

    /// Copies updated parameters, on the device, over elements `range` of this rank's part of a chunk.
    pub(super) fn overwrite_parameters(&mut self, chunk: usize, range: &Range<usize>, updated: &Tensor) {
        let in_chunk = in_chunk(&self.map, self.options.stage, chunk, range);
        let (here, first) = self.parameters.resident_mut(&self.map, chunk);
        let here = here.range(in_chunk.start - first.start..in_chunk.end - first.start);
        self.device.copy(updated.view(), here);
    }
}

/// Elements of this rank's part of a chunk, as elements of the chunk.
fn in_chunk(map: &Map, stage: ZeroStage, chunk: usize, range: &Range<usize>) -> Range<usize> {
    let first = stepped(map, stage, chunk).start;
    first + range.start..first + range.end
}

/// Host memory for scaled gradients of elements `range` of this rank's part of a chunk, where their update needs any.
pub(super) fn scaled_on_host(
    device: &Device,
    (map, rules): (&Map, &Rules),
    stage: ZeroStage,
    (chunk, range): (usize, &Range<usize>),
) -> Option<Tensor> {
    let elements = rules.scaled_elements_max(map, chunk, &in_chunk(map, stage, chunk, range))?;
    Some(in_host_memory(device, DType::F32, elements))
}

/// Host memory for a part of a tile.
fn in_host_memory(device: &Device, dtype: DType, elements: usize) -> Tensor {
    device.alloc_host(dtype, [elements], Category::Workspace, "update.host_window")
}
