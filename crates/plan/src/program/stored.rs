//! Gradients that stay in host memory or on disk: how they leave while backward runs, and how they come back for the next micro-batch,
//! for norms and for sums over other axes.

use std::collections::VecDeque;

use crate::trace::{Category, Memory};

use super::action::{Buffer, Op};
use super::builder::{Builder, Row};
use super::chunks::{Policies, StageChunks};
use super::list::{BufferSpec, Extent, Role, Stop};
use super::visits::{Moving, arrive, bring, go_on, send};

/// Chunks of gradients that leave while backward goes on; each holds its buffer.
const LEAVING: usize = 2;

/// Tiles of gradients that arrive while an earlier one is read.
const AHEAD: usize = 2;

/// Gradients of a stage that leave for where they stay.
#[derive(Default)]
pub(super) struct Leaving(VecDeque<(usize, Moving)>);

impl Leaving {
    /// A buffer of chunk `c` leaves; of a whole chunk, this rank's part if `is_part`. Those before go on meanwhile.
    #[track_caller]
    pub(super) fn send(
        &mut self,
        (list, policies, stage): (&mut Builder, &Policies, &StageChunks),
        (c, from): (usize, Buffer),
        is_part: bool,
    ) {
        let home = list.row(Role::Sum, stage.first_chunk + c);
        let moving = send(list, policies, from, home, is_part);
        self.go_on(list);
        self.0.push_back((c, moving));
        while self.0.len() > LEAVING {
            self.receive(list);
        }
    }

    /// Waits until the gradients of a chunk are where they stay.
    pub(super) fn wait(&mut self, list: &mut Builder, c: usize) {
        while self.0.iter().any(|(leaving, _)| *leaving == c) {
            self.receive(list);
        }
    }

    /// Waits until all gradients are where they stay.
    pub(super) fn settle(&mut self, list: &mut Builder) {
        self.go_on(list);
        while !self.0.is_empty() {
            self.receive(list);
        }
    }

    fn go_on(&mut self, list: &mut Builder) {
        self.0.iter_mut().for_each(|(_, moving)| *moving = go_on(list, *moving));
    }

    fn receive(&mut self, list: &mut Builder) {
        let (_, moving) = self.0.pop_front().expect("gradients leave");
        arrive(list, moving);
    }
}

/// Starts to bring stored gradients to the device: as the buffer of a whole chunk, or as this rank's sum.
#[track_caller]
pub(super) fn fetch(
    list: &mut Builder,
    policies: &Policies,
    of: usize,
    (role, extent, elements): (Role, Extent, u64),
) -> Moving {
    let home = list.row(Role::Sum, of);
    let stored = *list.spec(home.first);
    bring(list, policies, home, BufferSpec { role, extent, elements, ..stored })
}

/// Brings a piece of a stored sum to the device.
#[track_caller]
pub(super) fn read(
    list: &mut Builder,
    policies: &Policies,
    (role, of): (Role, usize),
    (number, start, elements): (usize, u64, u64),
) -> Buffer {
    let home = list.row(Role::Sum, of);
    let extent = Extent::Tile(number as u32);
    let piece = BufferSpec { role, extent, start, elements, ..*list.spec(home.first) };
    let moving = bring(list, policies, home, piece);
    arrive(list, moving)
}

/// Overwrites a piece of a stored sum with what another sum has of it.
#[track_caller]
pub(super) fn write(
    list: &mut Builder,
    policies: &Policies,
    (from, of): (Buffer, usize),
    (number, start, elements): (usize, u64, u64),
) {
    let home = list.row(Role::Sum, of);
    let here = list.take_as(BufferSpec {
        role: Role::Summed,
        extent: Extent::Tile(number as u32),
        stop: Stop::Home,
        start,
        elements,
        memory: Memory::Device,
        category: Category::Communication,
        name: "summed_gradients",
        is_resident: false,
        ..*list.spec(home.first)
    });
    list.emit(Op::Unpack { from, into: here });
    let moving = send(list, policies, here, home, false);
    arrive(list, moving);
}

/// Shows what a rank counts of stored sums, on the device.
#[track_caller]
pub(super) fn show(
    list: &mut Builder,
    policies: &Policies,
    (stage, chunks): (&StageChunks, &[usize]),
    see: impl Fn(&mut Builder, usize, Buffer),
) {
    let mut coming: VecDeque<(usize, Moving)> = VecDeque::new();
    let show_first = |list: &mut Builder, coming: &mut VecDeque<(usize, Moving)>| {
        let (c, moving) = coming.pop_front().expect("it comes");
        let here = arrive(list, moving);
        if let Some((_, next)) = coming.front_mut() {
            *next = go_on(list, *next);
        }
        see(list, c, here);
        list.emit(Op::Free(here));
    };
    for c in chunks {
        let of = stage.first_chunk + c;
        if policies.reaches(stage.chunks[*c].gradients) {
            see(list, *c, list.buffer(Role::Sum, of));
            continue;
        }
        for (tile, start, elements) in stage.counted_pieces(*c) {
            let home = list.tile(Role::Sum, of, tile);
            let piece = BufferSpec { start, elements, ..*list.spec(home) };
            coming.push_back((*c, bring(list, policies, Row::of(home), piece)));
            if coming.len() > AHEAD {
                show_first(list, &mut coming);
            }
        }
    }
    while !coming.is_empty() {
        show_first(list, &mut coming);
    }
}
