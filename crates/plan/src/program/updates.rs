//! The pass of updates: each rank updates its parts, in tiles where a part of them visits the device, and publishes them.

use std::collections::VecDeque;

use crate::trace::{Category, Memory};

use super::action::{Buffer, Op};
use super::builder::{Builder, Row};
use super::chunks::{GradientPlace, Policies, StageChunks};
use super::gradients::GradientPass;
use super::lane::Lane;
use super::list::{BufferSpec, Extent, Role, Stop};
use super::parameters::publish;
use super::visits::{Moving, arrive, bring, go_on, send};

/// Tiles that arrive while the update works on an earlier one, and that return while it works on a later one.
const AHEAD: usize = 2;
const BEHIND: usize = 2;

/// A part of a tile that comes to the device.
#[derive(Clone, Copy)]
enum Coming {
    Moving(Moving),
    /// It is only written: its memory is taken when its tile is updated.
    Unread,
}

/// The updates of a stage.
struct Updates<'a> {
    policies: &'a Policies,
    stage: &'a StageChunks,
    gradients: &'a GradientPass<'a>,
    /// Chunk and tile of each visit.
    tiles: Vec<(usize, usize)>,
    lane: Lane,
    begun: usize,
    /// For each visit that has begun: its parts, with where they stay.
    coming: VecDeque<Vec<(Buffer, Coming)>>,
    /// For each visit that returns: its parts.
    going: VecDeque<Vec<Moving>>,
}

/// Updates the chunks of a stage.
pub(super) fn update(list: &mut Builder, policies: &Policies, stage: &StageChunks, gradients: &GradientPass) {
    let visits = |c: &usize| !away(policies, stage, *c).is_empty();
    let chunks = (0..stage.trained).filter(visits);
    let tiles: Vec<_> =
        chunks.flat_map(|c| (0..stage.chunks[c].tiles.len()).map(move |tile| (c, tile))).collect();
    let lane = Lane::new((0..tiles.len() as u32).collect(), AHEAD, BEHIND);
    let (coming, going) = (VecDeque::new(), VecDeque::new());
    let mut updates = Updates { policies, stage, gradients, tiles, lane, begun: 0, coming, going };
    updates.begin(list);
    for c in 0..stage.trained {
        let tiles = stage.tiles(policies, c).map_or(1, <[u64]>::len);
        (0..tiles).for_each(|tile| updates.tile(list, c, tile));
        publish(list, policies, stage, c);
    }
    while !updates.going.is_empty() {
        updates.receive(list);
    }
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

/// The optimizer states of a chunk, then its master weights.
fn optimizer_roles(policies: &Policies, stage: &StageChunks, c: usize) -> impl Iterator<Item = Role> {
    let states = (0..stage.chunks[c].states.len() as u16).map(Role::State);
    states.chain(policies.precision.has_master().then_some(Role::Master))
}

impl Updates<'_> {
    /// Starts to bring the tiles that the lane wants.
    fn begin(&mut self, list: &mut Builder) {
        let wanted = self.lane.ahead().last().map_or(0, |last| last + 1);
        while self.begun < wanted {
            let (c, tile) = self.tiles[self.begun];
            let roles = away(self.policies, self.stage, c);
            let part = |role| {
                let home = list.tile(role, self.stage.first_chunk + c, tile);
                let is_unread = role == Role::Parameters && self.policies.precision.has_master();
                let mut visitor = *list.spec(home);
                if role == Role::Sum {
                    visitor.elements = self.stage.chunks[c].tiles[tile];
                }
                let coming = match is_unread {
                    true => Coming::Unread,
                    false => Coming::Moving(bring(list, self.policies, Row::of(home), visitor)),
                };
                (home, coming)
            };
            self.coming.push_back(roles.into_iter().map(part).collect());
            self.begun += 1;
        }
    }

    /// Updates a tile: a visitor, or what is reached where it stays.
    fn tile(&mut self, list: &mut Builder, c: usize, tile: usize) {
        let number = self.begun - self.coming.len();
        let is_visit = self.tiles.get(number) == Some(&(c, tile));
        let visitors = if is_visit { self.enter(list) } else { Vec::new() };
        self.update(list, (c, tile), &visitors);
        if is_visit {
            self.leave(list, number, visitors);
        }
    }

    /// The next visit begins: waits for its parts. Returns where they stay, and where they are.
    fn enter(&mut self, list: &mut Builder) -> Vec<(Buffer, Buffer)> {
        self.lane.advance();
        self.begin(list);
        let parts = self.coming.pop_front().expect("each tile is brought before it is updated");
        let part = |(home, coming)| match coming {
            Coming::Moving(moving) => (home, arrive(list, moving)),
            Coming::Unread => (home, list.take_visitor(*list.spec(home), Stop::Device)),
        };
        parts.into_iter().map(part).collect()
    }

    fn update(&mut self, list: &mut Builder, (c, tile): (usize, usize), visitors: &[(Buffer, Buffer)]) {
        let of = self.stage.first_chunk + c;
        let is_in_place = self.gradients.chunks[c].place == GradientPlace::Parameters;
        let here = |list: &Builder, role| {
            let visitor = visitors.iter().find(|(home, _)| list.spec(*home).role == role);
            visitor.map_or_else(|| list.buffer(role, of), |(_, here)| *here)
        };
        let gradient = match self.gradients.is_stored(c) {
            true => here(list, Role::Sum),
            false => self.gradients.sum(list, c),
        };
        let window = is_in_place.then(|| self.window(list, (c, tile), gradient));
        let roles: Vec<Role> = optimizer_roles(self.policies, self.stage, c).collect();
        let states = roles.into_iter().map(|role| here(list, role)).collect();
        let parameters = here(list, Role::Parameters);
        let states = list.operands(Vec::new(), states);
        list.emit(Op::Update { gradient: window.unwrap_or(gradient), parameters, states });
        window.into_iter().for_each(|window| list.emit(Op::Free(window)));
    }

    /// A copy of a tile's gradients that lie in the place of parameters, which the update overwrites.
    fn window(&self, list: &mut Builder, (c, tile): (usize, usize), from: Buffer) -> Buffer {
        let (memory, category) = (Memory::Device, Category::Workspace);
        let window = list.take_as(BufferSpec {
            role: Role::Gradient,
            of: self.stage.first_chunk + c,
            extent: Extent::Tile(tile as u32),
            stop: Stop::Device,
            start: 0,
            elements: self.stage.chunks[c].tiles[tile],
            memory,
            dtype: self.policies.precision.accumulate,
            category,
            name: "gradient_window",
            is_resident: false,
        });
        list.emit(Op::CopyPart { from, into: window });
        window
    }

    /// The update of the visit has been issued: its parts return, and the next one goes on.
    fn leave(&mut self, list: &mut Builder, number: usize, visitors: Vec<(Buffer, Buffer)>) {
        let mut going = Vec::new();
        for (home, here) in visitors {
            // An update only reads gradients.
            match list.spec(home).role {
                Role::Sum => list.emit(Op::Free(here)),
                _ => going.push(send(list, self.policies, here, Row::of(home), false)),
            }
        }
        self.going.push_back(going);
        if let Some(next) = self.coming.front_mut() {
            for (_, coming) in next {
                if let Coming::Moving(moving) = coming {
                    *moving = go_on(list, *moving);
                }
            }
        }
        for returned in self.lane.leave(number) {
            self.receive(list);
            self.lane.end(returned);
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
