//! Updates that the host computes where optimizer states lie: gradients and what lies on disk come to host memory ahead, and parameters
//! and what lies on disk leave behind.

use std::collections::VecDeque;

use crate::trace::{Category, DType, Memory};

use super::action::{Buffer, Op, Token, Work};
use super::builder::{Builder, factor};
use super::gradients::GradientPass;
use super::list::{BufferSpec, Extent, Role, Stop};
use super::order::{AHEAD, UpdateOrder, Window, optimizer_roles};
use super::parameters::publish;

/// A part of a tile that comes to host memory.
#[derive(Clone, Copy)]
struct Part {
    role: Role,
    /// The place on disk to which it returns, or from which it comes.
    home: Option<Buffer>,
    arrival: Arrival,
}

#[derive(Clone, Copy)]
enum Arrival {
    /// It stays in host memory.
    Here(Buffer),
    FromDisk {
        token: Token,
        here: Buffer,
    },
    FromDevice {
        token: Token,
        window: Buffer,
        here: Buffer,
    },
    /// The update only writes it.
    Unread(BufferSpec),
}

/// A part of a tile that leaves host memory.
#[derive(Clone, Copy)]
enum Leaving {
    ToDisk { token: Token, from: Buffer },
    ToDevice { token: Token, from: Buffer, window: Buffer },
}

/// A tile that the host updates: its parts in host memory, each with its place on disk.
struct Working {
    tile: (usize, usize),
    token: Token,
    parts: Vec<(Role, Option<Buffer>, Buffer)>,
}

/// The tiles of an update that the host computes, and how far they have come.
pub(super) struct HostUpdates {
    tiles: Vec<(usize, usize)>,
    fetched: usize,
    /// With updates within backward: of how many of them gradients and parameters have begun to come.
    joined: Option<usize>,
    window: Window,
    coming: VecDeque<Vec<Part>>,
    working: Option<Working>,
    leaving: VecDeque<((usize, usize), Vec<Leaving>)>,
    factor: Buffer,
}

/// Brings the factor of gradients to host memory: that of the norm, or within backward the one on the device.
#[track_caller]
pub(super) fn bring_factor(
    list: &mut Builder,
    within: Option<Buffer>,
    there: impl FnOnce(&mut Builder) -> Buffer,
) -> Buffer {
    let into = list.take_as(factor(Memory::Device));
    list.emit(within.map_or(Op::Factor(into), |from| Op::CopyPart { from, into }));
    let there = there(list);
    let token = list.start(Work::ToTiles { tiles: 1, is_part: false, from: into, into: there });
    list.emit(Op::Wait(token));
    list.emit(Op::Free(into));
    there
}

impl HostUpdates {
    /// Prepares the updates that the host computes. None when there are none.
    pub(super) fn begin(
        list: &mut Builder,
        gradients: &GradientPass,
        (order, within): (&UpdateOrder, Option<Buffer>),
    ) -> Option<HostUpdates> {
        let (stage, policies) = (gradients.stage, gradients.policies);
        let chunks = order.chunks.iter().filter(|c| stage.is_updated_on_host(policies, **c));
        let tiles: Vec<_> =
            chunks.flat_map(|c| (0..stage.chunks[*c].tiles.len()).map(|tile| (*c, tile))).collect();
        if tiles.is_empty() {
            return None;
        }
        let factor = bring_factor(list, within, |list| {
            list.take_as(BufferSpec { of: stage.index, ..factor(Memory::Host) })
        });
        let window = order.window(tiles.len());
        let joined = policies.in_backward.then_some(0);
        let (coming, leaving) = (VecDeque::new(), VecDeque::new());
        Some(HostUpdates { tiles, fetched: 0, joined, window, coming, working: None, leaving, factor })
    }

    /// The first tiles begin to come.
    pub(super) fn read_first(&mut self, list: &mut Builder, gradients: &GradientPass) {
        (0..self.window.ahead).for_each(|_| self.fetch(list, gradients));
    }

    /// Starts the update of the next tile, and moves those around it on.
    pub(super) fn update(&mut self, list: &mut Builder, gradients: &GradientPass, tile: (usize, usize)) {
        self.fetch(list, gradients);
        self.join(list, gradients, tile.0);
        let coming = self.coming.pop_front().expect("each tile is fetched before it is updated");
        let arrive = |part: Part| {
            let here = match part.arrival {
                Arrival::Here(here) => here,
                Arrival::FromDisk { token, here } => {
                    list.emit(Op::Wait(token));
                    here
                }
                Arrival::FromDevice { token, window, here } => {
                    list.emit(Op::Wait(token));
                    list.emit(Op::Free(window));
                    here
                }
                Arrival::Unread(spec) => list.take_as(spec),
            };
            (part.role, part.home, here)
        };
        let mut parts: Vec<_> = coming.into_iter().map(arrive).collect();
        let elements = gradients.stage.scaled(gradients.policies, tile.0)[tile.1];
        if elements > 0 {
            let scaled = BufferSpec { elements, ..of_tile(gradients, tile, (Role::Scaled, DType::F32)) };
            parts.push((Role::Scaled, None, list.take_as(in_host_memory(scaled))));
        }
        let token = start(list, parts.iter().map(|(role, _, here)| (*role, *here)), self.factor);
        self.leave(list, gradients);
        self.working = Some(Working { tile, token, parts });
    }

    /// Waits until all tiles are updated and in their places.
    pub(super) fn finish(mut self, list: &mut Builder, gradients: &GradientPass) {
        self.leave(list, gradients);
        while !self.leaving.is_empty() {
            self.receive(list, gradients);
        }
        list.emit(Op::Free(self.factor));
    }

    /// Starts to bring the parts of the next tile to host memory, if there is one.
    fn fetch(&mut self, list: &mut Builder, gradients: &GradientPass) {
        let Some(tile) = self.tiles.get(self.fetched).copied() else { return };
        self.fetched += 1;
        let is_early = self.joined.is_some();
        let mut parts = stored(list, gradients, tile, |role| !(is_early && role == Role::Parameters));
        if !is_early {
            parts.extend(from_device(list, gradients, tile));
        }
        self.coming.push_back(parts);
    }

    /// Within backward: brings gradients and parameters of the tile that is updated next, and of those behind it in its chunk.
    fn join(&mut self, list: &mut Builder, gradients: &GradientPass, chunk: usize) {
        let Some(mut joined) = self.joined else { return };
        let first = self.fetched - self.coming.len();
        while joined < (first + 1 + AHEAD).min(self.fetched) && self.tiles[joined].0 == chunk {
            let tile = self.tiles[joined];
            let mut parts = stored(list, gradients, tile, |role| role == Role::Parameters);
            parts.extend(from_device(list, gradients, tile));
            self.coming[joined - first].extend(parts);
            joined += 1;
        }
        self.joined = Some(joined);
    }

    /// Waits for the tile that the host updates; its parts start to leave.
    fn leave(&mut self, list: &mut Builder, gradients: &GradientPass) {
        let Some(Working { tile, token, parts }) = self.working.take() else { return };
        list.emit(Op::Wait(token));
        let mut leaving = Vec::new();
        for (role, home, from) in parts {
            let is_window = !list.spec(from).is_resident;
            match (role, home) {
                // It was only read.
                (Role::Sum | Role::Scaled, _) if is_window => list.emit(Op::Free(from)),
                (_, Some(home)) => {
                    let work = Work::ToTiles { tiles: 1, is_part: false, from, into: home };
                    leaving.push(Leaving::ToDisk { token: list.start(work), from });
                }
                (Role::Parameters, None) if is_window => {
                    let window = list.take_as(on_device(*list.spec(from)));
                    let token = list.start(Work::FromTiles { tiles: 1, from, into: window });
                    leaving.push(Leaving::ToDevice { token, from, window });
                }
                _ => {}
            }
        }
        self.leaving.push_back((tile, leaving));
        if self.leaving.len() > self.window.behind {
            self.receive(list, gradients);
        }
    }

    /// Waits until the tile that leaves first is in its places. After the last one of a chunk, the other ranks get theirs.
    fn receive(&mut self, list: &mut Builder, gradients: &GradientPass) {
        let Some(((c, tile), parts)) = self.leaving.pop_front() else { return };
        let (stage, policies) = (gradients.stage, gradients.policies);
        for part in parts {
            let (Leaving::ToDisk { token, from } | Leaving::ToDevice { token, from, .. }) = part;
            list.emit(Op::Wait(token));
            list.emit(Op::Free(from));
            if let Leaving::ToDevice { window, .. } = part {
                let into = list.buffer(Role::Parameters, stage.first_chunk + c);
                list.emit(Op::CopyPart { from: window, into });
                list.emit(Op::Free(window));
            }
        }
        if tile + 1 == stage.chunks[c].tiles.len() {
            publish(list, policies, stage, c);
        }
    }
}

/// Starts the host's update of a tile.
#[track_caller]
pub(super) fn start(
    list: &mut Builder,
    parts: impl Iterator<Item = (Role, Buffer)>,
    factor: Buffer,
) -> Token {
    let operands = host_operands(list, parts, factor);
    list.start(Work::HostUpdate { operands })
}

/// Operands of a host's update.
pub(super) fn host_operands(
    list: &mut Builder,
    parts: impl Iterator<Item = (Role, Buffer)>,
    factor: Buffer,
) -> super::action::Span {
    let is_read = |role| matches!(role, Role::Sum | Role::Twin);
    let (read, written): (Vec<_>, Vec<_>) = parts.partition(|(role, _)| is_read(*role));
    let reads = read.into_iter().map(|(_, here)| here).chain([factor]).collect();
    list.operands(reads, written.into_iter().map(|(_, here)| here).collect())
}

/// The description of a tile's part.
fn of_tile(gradients: &GradientPass, (c, tile): (usize, usize), (role, dtype): (Role, DType)) -> BufferSpec {
    BufferSpec {
        role,
        of: gradients.stage.first_chunk + c,
        extent: Extent::Tile(tile as u32),
        stop: Stop::Passage,
        start: 0,
        elements: gradients.stage.chunks[c].tiles[tile],
        memory: Memory::Host,
        dtype,
        category: Category::Workspace,
        name: "update.host_window",
        is_resident: false,
    }
}

/// Host memory for a part of a tile.
fn in_host_memory(of: BufferSpec) -> BufferSpec {
    let (stop, memory, category, name) =
        (Stop::Passage, Memory::Host, Category::Workspace, "update.host_window");
    BufferSpec { stop, memory, category, name, start: 0, is_resident: false, ..of }
}

/// Device memory for a part of a tile.
pub(super) fn on_device(of: BufferSpec) -> BufferSpec {
    let (stop, memory, category, name) = (Stop::Device, Memory::Device, Category::Workspace, "update.window");
    BufferSpec { stop, memory, category, name, start: 0, is_resident: false, ..of }
}

/// Starts to bring the `wanted` stored parts of a tile to host memory.
fn stored(
    list: &mut Builder,
    gradients: &GradientPass,
    (c, tile): (usize, usize),
    wanted: impl Fn(Role) -> bool,
) -> Vec<Part> {
    let GradientPass { stage, policies, .. } = gradients;
    let (spec, of) = (&stage.chunks[c], stage.first_chunk + c);
    let mut roles: Vec<Role> = optimizer_roles(policies, stage, c).collect();
    roles.extend((spec.parameters != Memory::Device).then_some(Role::Parameters));
    roles.extend(gradients.is_stored(c).then_some(Role::Sum));
    let mut parts = Vec::new();
    for role in roles.into_iter().filter(|role| wanted(*role)) {
        let home = list.tile(role, of, tile);
        let stored = *list.spec(home);
        let elements = if matches!(role, Role::State(_)) { stored.elements } else { spec.tiles[tile] };
        let window = in_host_memory(BufferSpec { elements, ..stored });
        let is_unread = role == Role::Parameters && policies.precision.has_master();
        let arrival = match stored.memory {
            Memory::Disk if is_unread => Arrival::Unread(window),
            Memory::Disk => {
                let here = list.take_as(window);
                Arrival::FromDisk {
                    token: list.start(Work::FromTiles { tiles: 1, from: home, into: here }),
                    here,
                }
            }
            _ => Arrival::Here(home),
        };
        let home = (stored.memory == Memory::Disk).then_some(home);
        parts.push(Part { role, home, arrival });
    }
    parts
}

/// Starts to bring the parts of a tile that lie in device memory to host memory.
fn from_device(list: &mut Builder, gradients: &GradientPass, (c, tile): (usize, usize)) -> Vec<Part> {
    let GradientPass { stage, policies, .. } = gradients;
    let mut parts = Vec::new();
    if !gradients.is_stored(c) {
        let spec = of_tile(gradients, (c, tile), (Role::Sum, policies.precision.accumulate));
        let arrival = to_host(list, gradients.sum(list, c), spec);
        parts.push(Part { role: Role::Sum, home: None, arrival });
    }
    if stage.chunks[c].parameters == Memory::Device {
        let spec = of_tile(gradients, (c, tile), (Role::Parameters, policies.precision.compute));
        let arrival = match policies.precision.has_master() {
            true => Arrival::Unread(spec),
            false => {
                let from = list.buffer(Role::Parameters, stage.first_chunk + c);
                to_host(list, from, spec)
            }
        };
        parts.push(Part { role: Role::Parameters, home: None, arrival });
    }
    parts
}

/// Starts to copy a tile of a buffer on the device to host memory.
fn to_host(list: &mut Builder, from: Buffer, tile: BufferSpec) -> Arrival {
    let window = list.take_as(on_device(tile));
    list.emit(Op::CopyPart { from, into: window });
    let here = list.take_as(tile);
    let token = list.start(Work::ToTiles { tiles: 1, is_part: false, from: window, into: here });
    Arrival::FromDevice { token, window, here }
}
