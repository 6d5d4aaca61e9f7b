//! The pass of updates: each rank updates its parts, in tiles where a part of them visits the device, and publishes them. It runs behind
//! the norm, or within backward, as soon as a chunk's gradient is reduced.

use std::collections::VecDeque;

use crate::trace::{Category, DType, Memory};

use super::action::{Buffer, Op, Token, Work};
use super::builder::{Builder, Row, factor};
use super::chunks::{GradientPlace, Policies, StageChunks};
use super::gradients::GradientPass;
use super::host_updates::HostUpdates;
use super::list::{BufferSpec, Extent, Role, Stop, WITHIN_BACKWARD};
use super::order::{AHEAD, UpdateOrder, Window, optimizer_roles};
use super::parameters::publish;
use super::visits::{Moving, arrive, bring, go_on, send};

/// A part of a tile that comes to the device.
#[derive(Clone, Copy)]
enum Coming {
    Moving(Moving),
    /// It is only written: its memory is taken when its tile is updated.
    Unread,
}

/// The updates of a stage in a step.
pub(super) struct Updates {
    order: UpdateOrder,
    /// Chunk and tile of each visit.
    tiles: Vec<(usize, usize)>,
    window: Window,
    /// Number of visits that have begun.
    fetched: usize,
    /// Within backward: number of visits whose parameters have begun to come. Backward of a chunk reads them until its update.
    joined: Option<usize>,
    /// For each visit that has begun: its parts, with where they stay.
    coming: VecDeque<Vec<(Buffer, Coming)>>,
    /// For each visit that returns: its parts.
    going: VecDeque<Vec<Moving>>,
    on_host: Option<HostUpdates>,
    /// Within backward: the factor of gradients.
    factor: Option<Buffer>,
    /// Within backward: true once the first tiles have begun to come.
    reads: bool,
    /// Within backward: chunks whose update waits for the counts of their elements that are not finite.
    counting: VecDeque<(usize, Token, [Buffer; 2])>,
}

/// The roles of a chunk's parts that kernels do not reach where they stay, in order.
fn away(policies: &Policies, stage: &StageChunks, c: usize) -> Vec<Role> {
    let spec = &stage.chunks[c];
    let mut roles = Vec::new();
    if !policies.reaches(spec.optimizer) {
        roles.extend(optimizer_roles(policies, stage, c));
    }
    if !policies.reaches(spec.parameters) {
        roles.push(Role::Parameters);
    }
    if !policies.reaches(spec.gradients) {
        roles.push(Role::Sum);
    }
    roles
}

impl Updates {
    /// Begins the updates of a step: before forward, if they run within backward.
    pub(super) fn begin(list: &mut Builder, gradients: &GradientPass) -> Updates {
        let (stage, policies) = (gradients.stage, gradients.policies);
        let order = UpdateOrder::new(stage, policies);
        let factor = policies.in_backward.then(|| {
            let here = list.take_as(BufferSpec {
                role: Role::Factor(WITHIN_BACKWARD),
                of: stage.index,
                ..factor(Memory::Device)
            });
            list.emit(Op::Factor(here));
            here
        });
        let on_host = HostUpdates::begin(list, gradients, (&order, factor));
        let visits =
            |c: &&usize| !away(policies, stage, **c).is_empty() && !stage.is_updated_on_host(policies, **c);
        let chunks = order.chunks.iter().filter(visits);
        let tiles: Vec<_> =
            chunks.flat_map(|c| (0..stage.chunks[*c].tiles.len()).map(|tile| (*c, tile))).collect();
        Updates {
            window: order.window(tiles.len()),
            order,
            tiles,
            fetched: 0,
            joined: policies.in_backward.then_some(0),
            coming: VecDeque::new(),
            going: VecDeque::new(),
            on_host,
            factor,
            reads: false,
            counting: VecDeque::new(),
        }
    }

    /// The first tiles begin to come, unless they have.
    pub(super) fn read_first(&mut self, list: &mut Builder, gradients: &GradientPass) {
        if std::mem::replace(&mut self.reads, true) {
            return;
        }
        if let Some(on_host) = &mut self.on_host {
            on_host.read_first(list, gradients);
        }
        (0..self.window.ahead).for_each(|_| self.fetch(list, gradients));
    }

    /// Within backward: updates the chunks whose gradients are reduced and known to be finite; `all`: waits until they are known.
    pub(super) fn reduced(&mut self, list: &mut Builder, gradients: &mut GradientPass, all: bool) {
        // All counts are on their way to the host before the first tile returns there.
        while let Some(c) = gradients.reduced.pop_front() {
            let counts = count_not_finite(list, gradients, c);
            self.counting.push_back(counts);
        }
        // Where calls run later, the counts of a chunk arrive while the next block is computed.
        let waiting_max = usize::from(!all && !gradients.policies.host_addressable);
        while self.counting.len() > waiting_max {
            let Some((c, token, [here, there])) = self.counting.pop_front() else { return };
            list.emit(Op::Wait(token));
            list.emit(Op::Free(here));
            list.emit(Op::Mask(there));
            list.emit(Op::Free(there));
            self.chunk(list, gradients, c);
            gradients.close(list, c);
        }
    }

    /// Within backward, which is over: waits for the reductions that still run, and updates their chunks.
    pub(super) fn rest(&mut self, list: &mut Builder, gradients: &mut GradientPass) {
        loop {
            let has_arrived = gradients.arrive_first(list);
            self.reduced(list, gradients, !has_arrived);
            if !has_arrived {
                return;
            }
        }
    }

    /// Updates the chunks that are left, and waits until everything is in its place.
    pub(super) fn finish(mut self, list: &mut Builder, gradients: &GradientPass) {
        let behind = self.order.chunks.split_off(self.order.within);
        behind.into_iter().for_each(|c| self.chunk(list, gradients, c));
        if let Some(on_host) = self.on_host.take() {
            on_host.finish(list, gradients);
        }
        while !self.going.is_empty() {
            self.receive(list);
        }
        self.factor.into_iter().for_each(|factor| list.emit(Op::Free(factor)));
    }

    /// Updates a chunk. What lies elsewhere may still return.
    fn chunk(&mut self, list: &mut Builder, gradients: &GradientPass, c: usize) {
        let (stage, policies) = (gradients.stage, gradients.policies);
        let tiles = stage.tiles(policies, c).map_or(1, <[u64]>::len);
        match &mut self.on_host {
            Some(on_host) if stage.is_updated_on_host(policies, c) => {
                (0..tiles).for_each(|tile| on_host.update(list, gradients, (c, tile)));
            }
            _ => {
                (0..tiles).for_each(|tile| self.tile(list, gradients, (c, tile)));
                publish(list, policies, stage, c);
            }
        }
    }

    /// Starts to bring the next tile, if there is one.
    fn fetch(&mut self, list: &mut Builder, gradients: &GradientPass) {
        let Some(tile) = self.tiles.get(self.fetched).copied() else { return };
        self.fetched += 1;
        let is_early = self.joined.is_some();
        let parts = bring_parts(list, gradients, tile, |role| !(is_early && role == Role::Parameters));
        self.coming.push_back(parts);
    }

    /// Within backward: brings the parameters of the tile that is updated next, and of those behind it in its chunk.
    fn join(&mut self, list: &mut Builder, gradients: &GradientPass, entered: usize) {
        let Some(mut joined) = self.joined else { return };
        let chunk = self.tiles[entered].0;
        let end = (entered + 1 + AHEAD).min(self.fetched);
        while joined < end && self.tiles[joined].0 == chunk {
            let parts = bring_parts(list, gradients, self.tiles[joined], |role| role == Role::Parameters);
            self.coming[joined - entered].extend(parts);
            joined += 1;
        }
        self.joined = Some(joined);
    }

    /// Updates a tile: a visitor, or what is reached where it stays.
    fn tile(&mut self, list: &mut Builder, gradients: &GradientPass, tile: (usize, usize)) {
        let entered = self.fetched - self.coming.len();
        if self.tiles.get(entered) != Some(&tile) {
            return update(list, (gradients, self.factor), tile, &[]);
        }
        self.fetch(list, gradients);
        self.join(list, gradients, entered);
        let parts = self.coming.pop_front().expect("each tile is brought before it is updated");
        let part = |(home, coming)| match coming {
            Coming::Moving(moving) => (home, arrive(list, moving)),
            Coming::Unread => (home, list.take_visitor(*list.spec(home), Stop::Device)),
        };
        let visitors: Vec<(Buffer, Buffer)> = parts.into_iter().map(part).collect();
        update(list, (gradients, self.factor), tile, &visitors);
        self.leave(list, gradients.policies, visitors);
    }

    /// The update of a visit has been issued: its parts return, and the next one goes on.
    fn leave(&mut self, list: &mut Builder, policies: &Policies, visitors: Vec<(Buffer, Buffer)>) {
        let mut going = Vec::new();
        for (home, here) in visitors {
            // An update only reads gradients.
            match list.spec(home).role {
                Role::Sum => list.emit(Op::Free(here)),
                _ => going.push(send(list, policies, here, Row::of(home), false)),
            }
        }
        self.going.push_back(going);
        // Within backward, the first tile of the next chunk may still be read when kernels of the next block could be issued.
        let left = self.fetched - self.coming.len();
        let is_of_chunk = self.tiles.get(left).is_some_and(|next| next.0 == self.tiles[left - 1].0);
        if let Some(next) = self.coming.front_mut().filter(|_| self.joined.is_none() || is_of_chunk) {
            for (_, coming) in next {
                if let Coming::Moving(moving) = coming {
                    *moving = go_on(list, *moving);
                }
            }
        }
        if self.going.len() > self.window.behind {
            self.receive(list);
        }
    }

    /// Waits until the tile that returns first is in its place; the one behind it starts the second half of its way.
    fn receive(&mut self, list: &mut Builder) {
        let first = self.going.pop_front().expect("a tile returns");
        let first: Vec<Moving> = first.into_iter().map(|moving| go_on(list, moving)).collect();
        if let Some(next) = self.going.front_mut() {
            next.iter_mut().for_each(|moving| *moving = go_on(list, *moving));
        }
        for moving in first {
            arrive(list, moving);
        }
    }
}

/// Starts to bring the `wanted` parts of a tile that kernels do not reach where they stay.
fn bring_parts(
    list: &mut Builder,
    gradients: &GradientPass,
    (c, tile): (usize, usize),
    wanted: impl Fn(Role) -> bool,
) -> Vec<(Buffer, Coming)> {
    let GradientPass { stage, policies, .. } = gradients;
    let part = |role| {
        let home = list.tile(role, stage.first_chunk + c, tile);
        let mut visitor = *list.spec(home);
        if role == Role::Sum {
            visitor.elements = stage.chunks[c].tiles[tile];
        }
        let is_unread = role == Role::Parameters && policies.precision.has_master();
        let coming = match is_unread {
            true => Coming::Unread,
            false => Coming::Moving(bring(list, policies, Row::of(home), visitor)),
        };
        (home, coming)
    };
    away(policies, stage, c).into_iter().filter(|role| wanted(*role)).map(part).collect()
}

/// Updates a tile on the device, with a factor of its own within backward; `visitors` are its parts that stay elsewhere, with their places.
fn update(
    list: &mut Builder,
    (gradients, factor): (&GradientPass, Option<Buffer>),
    (c, tile): (usize, usize),
    visitors: &[(Buffer, Buffer)],
) {
    let GradientPass { stage, policies, .. } = gradients;
    let (spec, of) = (&stage.chunks[c], stage.first_chunk + c);
    let here = |list: &Builder, role| {
        let visitor = visitors.iter().find(|(home, _)| list.spec(*home).role == role);
        visitor.map_or_else(|| list.buffer(role, of), |(_, here)| *here)
    };
    let gradient = match gradients.is_stored(c) {
        true => here(list, Role::Sum),
        false => gradients.sum(list, c),
    };
    let of_tile = |role, elements, dtype, name| BufferSpec {
        role,
        of,
        extent: Extent::Tile(tile as u32),
        stop: Stop::Device,
        start: 0,
        elements,
        memory: Memory::Device,
        dtype,
        category: Category::Workspace,
        name,
        is_resident: false,
    };
    // The update overwrites gradients that lie in the place of parameters.
    let window = (stage.place(policies, c) == GradientPlace::Parameters).then(|| {
        let accumulate = policies.precision.accumulate;
        let window = list.take_as(of_tile(Role::Gradient, spec.tiles[tile], accumulate, "gradient_window"));
        list.emit(Op::CopyPart { from: gradient, into: window });
        window
    });
    let elements = stage.scaled(policies, c)[tile];
    let scaled = (elements > 0)
        .then(|| list.take_as(of_tile(Role::Scaled, elements, DType::F32, "update.scaled_gradient")));
    let roles = optimizer_roles(policies, stage, c);
    let states = roles.map(|role| here(list, role)).collect();
    let parameters = here(list, Role::Parameters);
    let states = list.operands(factor.into_iter().chain(scaled).collect(), states);
    list.emit(Op::Update { gradient: window.unwrap_or(gradient), parameters, states });
    scaled.into_iter().chain(window).for_each(|buffer| list.emit(Op::Free(buffer)));
}

/// Counts a chunk for the norm, and starts to bring to the host how many elements of each gradient are not finite, of what the rank updates.
fn count_not_finite(
    list: &mut Builder,
    gradients: &mut GradientPass,
    c: usize,
) -> (usize, Token, [Buffer; 2]) {
    let (stage, from) = (gradients.stage, gradients.written(c));
    list.count(from, list.buffer(Role::Squares, stage.index));
    gradients.chunks[c].is_counted = true;
    let counts = |memory| BufferSpec {
        role: Role::NotFinite,
        of: stage.first_chunk + c,
        extent: Extent::Whole,
        stop: if memory == Memory::Device { Stop::Device } else { Stop::Home },
        start: 0,
        elements: stage.chunks[c].parameter_count,
        memory,
        dtype: DType::F32,
        category: Category::Workspace,
        name: "update.not_finite",
        is_resident: false,
    };
    let here = list.take_as(counts(Memory::Device));
    list.emit(Op::CountNotFinite { from, into: here });
    let there = list.take_as(counts(Memory::Host));
    let token = list.start(Work::ToTiles { tiles: 1, is_part: false, from: here, into: there });
    (c, token, [here, there])
}
