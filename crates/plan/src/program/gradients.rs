//! The pass of gradients: opens a chunk's buffers before its first writer, and reduces them behind the last one (`reductions`).
//!
//! A chunk whose gradients stay elsewhere ([`GradientPlace`]) has buffers on the device from its first writer in a micro-batch to its
//! end, or to its reduction: the whole buffer then leaves and comes back for the next micro-batch, or the sum does.
//!
//! With sums by a tree ([`PartialSums`]), the buffer at hand of a chunk has the last micro-batch, and others wait for their neighbours.

use std::collections::VecDeque;

use crate::partial_sums::PartialSums;
use crate::trace::{Category, Memory};
use crate::zero::ZeroStage;

use super::action::{Buffer, Op, Token, Work};
use super::builder::Builder;
use super::chunks::{GradientBuffering, GradientPlace, Policies, StageChunks};
use super::demand::BlockRun;
use super::lane::Lane;
use super::list::{BufferSpec, Extent, Role, Stop};
use super::stored::{Leaving, fetch};
use super::visits::{Moving, arrive};

/// A buffer on the device.
#[derive(Clone, Copy)]
pub(super) enum Held {
    /// There is none.
    Nothing,
    /// It is there.
    Here(Buffer),
    /// It comes from another memory.
    Coming(Moving),
}

/// The reduction of a chunk in flight.
pub(super) struct Reduction {
    pub(super) token: Token,
    /// A rounded copy that is reduced.
    pub(super) copy: Option<Buffer>,
    /// True if the sum of the copy is added to that of earlier micro-batches.
    pub(super) accumulates: bool,
}

/// The sums of a chunk that are added by a tree.
pub(super) struct Tree {
    pub(super) sums: PartialSums<Buffer>,
    /// Number of buffers beside the first one, so far.
    pub(super) taken: u16,
}

/// A chunk of gradients in a step.
pub(super) struct Chunk {
    pub(super) place: GradientPlace,
    /// Number of blocks that have not yet written to it in its micro-batch.
    awaited: usize,
    /// Number of micro-batches that all its blocks have written.
    pub(super) done: usize,
    /// The buffer that layers write.
    pub(super) whole: Held,
    /// The buffer with this rank's part of the sum.
    pub(super) sum: Held,
    pub(super) reducing: Option<Reduction>,
    pub(super) tree: Option<Tree>,
    /// True once the norm has it.
    pub(super) is_counted: bool,
}

/// The gradients of a stage in a step.
pub(super) struct GradientPass<'a> {
    pub(super) stage: &'a StageChunks,
    pub(super) policies: &'a Policies,
    pub(super) buffering: GradientBuffering,
    writers: Vec<usize>,
    pub(super) chunks: Vec<Chunk>,
    /// Reductions in flight.
    pub(super) lane: Lane,
    pub(super) leaving: Leaving,
    /// Chunks that are reduced and whose update, within backward, has not begun; oldest first.
    pub(super) reduced: VecDeque<usize>,
}

impl<'a> GradientPass<'a> {
    pub(super) fn new(list: &Builder, stage: &'a StageChunks, policies: &'a Policies) -> GradientPass<'a> {
        let (writers, buffering) = (stage.writers(), policies.buffering());
        let chunk = |c: usize| {
            let place = stage.place(policies, c);
            let own = |is_kept: bool, role| match is_kept && place == GradientPlace::Buffer {
                true => Held::Here(list.buffer(role, stage.first_chunk + c)),
                false => Held::Nothing,
            };
            Chunk {
                place,
                awaited: writers[c].len(),
                done: 0,
                whole: own(buffering != GradientBuffering::Transient, Role::Gradient),
                sum: own(buffering != GradientBuffering::InPlace, Role::Sum),
                reducing: None,
                tree: policies
                    .has_tree()
                    .then(|| Tree { sums: PartialSums::new(policies.micro_batches), taken: 0 }),
                is_counted: false,
            }
        };
        GradientPass {
            stage,
            policies,
            buffering,
            chunks: (0..stage.trained).map(chunk).collect(),
            writers: writers.iter().map(Vec::len).collect(),
            lane: Lane::new(Vec::new(), 0, policies.reductions_behind()),
            leaving: Leaving::default(),
            reduced: VecDeque::new(),
        }
    }

    /// Returns whether the whole buffer of a chunk exists only until it is reduced.
    pub(super) fn is_transient(&self, c: usize) -> bool {
        self.buffering == GradientBuffering::Transient || self.chunks[c].place != GradientPlace::Buffer
    }

    /// The buffer that has the sum of a chunk, for the norm and the update; of a row of tiles, the first.
    pub(super) fn sum(&self, list: &Builder, c: usize) -> Buffer {
        let role = self.stage.sum(self.policies, c);
        list.buffer(role, self.stage.first_chunk + c)
    }

    /// Returns whether the sum of a chunk stays outside of device memory.
    pub(super) fn is_stored(&self, c: usize) -> bool {
        self.chunks[c].place == GradientPlace::Elsewhere
    }

    /// The buffer into which layers write.
    pub(super) fn written(&self, c: usize) -> Buffer {
        let Held::Here(whole) = self.chunks[c].whole else { panic!("gradients of chunk {c} are not open") };
        whole
    }

    /// Before a block writes gradients.
    pub(super) fn before(&mut self, list: &mut Builder, run: BlockRun) {
        if !run.pass.writes_gradients() {
            return;
        }
        for c in self.stage.written(run.block) {
            self.arrive(list, c);
            self.open(list, c);
        }
        if self.policies.overlap && self.buffering == GradientBuffering::InPlace {
            self.fetch_for_next(list, run.block);
        }
    }

    fn open(&mut self, list: &mut Builder, c: usize) {
        let is_in_place = self.buffering == GradientBuffering::InPlace;
        let comes_back = self.is_stored(c) && self.chunks[c].done > 0;
        let whole = match self.chunks[c].whole {
            Held::Here(whole) if is_in_place => {
                let unused = |sums: &mut PartialSums<Buffer>, whole, new: &mut dyn FnMut() -> Buffer| {
                    (sums.unused(whole, new), ())
                };
                self.chunks[c].of_tree(list, whole, unused).0
            }
            Held::Here(whole) => whole,
            Held::Coming(moving) => arrive(list, moving),
            Held::Nothing if is_in_place && comes_back => {
                let moving = self.fetch(list, c);
                arrive(list, moving)
            }
            Held::Nothing => {
                let whole = self.bucket(list, c);
                if comes_back && matches!(self.chunks[c].sum, Held::Nothing) {
                    self.chunks[c].sum = Held::Coming(self.fetch(list, c));
                }
                whole
            }
        };
        self.chunks[c].whole = Held::Here(whole);
    }

    /// Memory of a whole chunk that exists until it is reduced.
    pub(super) fn bucket(&self, list: &mut Builder, c: usize) -> Buffer {
        let named = (self.policies.precision.accumulate, "gradient_bucket");
        list.take(Role::Gradient, self.stage.first_chunk + c, self.stage.chunks[c].elements, named)
    }

    /// Starts to bring a stored chunk back to which the next micro-batch is added.
    fn fetch(&mut self, list: &mut Builder, c: usize) -> Moving {
        self.leaving.wait(list, c);
        let (of, elements) = (self.stage.first_chunk + c, self.stage.chunks[c].elements);
        let wanted = match self.buffering {
            GradientBuffering::InPlace => (Role::Gradient, Extent::Whole, elements),
            _ => (Role::Sum, Extent::Part, elements / self.policies.data_ranks),
        };
        fetch(list, self.policies, of, wanted)
    }

    /// Starts to bring the whole buffers back into which the micro-batch accumulates next: those of the nearest earlier block that has
    /// any, since backward runs from the last block to the first.
    fn fetch_for_next(&mut self, list: &mut Builder, block: usize) {
        for earlier in (0..block).rev() {
            let chunks: Vec<usize> = self.stage.written(earlier).collect();
            if chunks.iter().any(|c| matches!(self.chunks[*c].whole, Held::Coming(_))) {
                return;
            }
            let comes_back = |c: &usize| {
                let Chunk { whole, done, .. } = &self.chunks[*c];
                self.is_stored(*c)
                    && matches!(whole, Held::Nothing)
                    && (1..self.policies.micro_batches).contains(done)
            };
            let awaited: Vec<usize> = chunks.into_iter().filter(comes_back).collect();
            for c in &awaited {
                self.chunks[*c].whole = Held::Coming(self.fetch(list, *c));
            }
            if !awaited.is_empty() {
                return;
            }
        }
    }

    /// Behind a block that has written gradients: complete chunks are reduced.
    pub(super) fn behind(&mut self, list: &mut Builder, run: BlockRun) {
        let stage = self.stage;
        for c in stage.written(run.block).filter(|_| run.pass.writes_gradients()) {
            let chunk = &mut self.chunks[c];
            chunk.awaited -= 1;
            if chunk.awaited > 0 {
                continue;
            }
            (chunk.awaited, chunk.done) = (self.writers[c], chunk.done + 1);
            let is_whole = self.buffering == GradientBuffering::InPlace;
            let (waits, has_tree) =
                (is_whole && chunk.done < self.policies.micro_batches, chunk.tree.is_some());
            if !waits || has_tree {
                list.emit(Op::Clear(self.written(c)));
            }
            if let Chunk { tree: Some(tree), whole: Held::Here(whole), .. } = &mut self.chunks[c]
                && is_whole
            {
                tree.sums.written(run.micro_batch);
                *whole = tree.settle(list, *whole);
            }
            if !waits {
                self.start(list, c, run.micro_batch);
                for c in self.lane.leave(c) {
                    self.arrive(list, c);
                }
            } else if self.is_stored(c) && !has_tree {
                let whole = self.written(c);
                self.chunks[c].whole = Held::Nothing;
                self.leaving.send((list, self.policies, stage), (c, whole), false);
            }
        }
    }

    /// Waits for the reduction that was started first; returns whether there was one.
    pub(super) fn arrive_first(&mut self, list: &mut Builder) -> bool {
        let Some(first) = self.lane.first_leaving() else { return false };
        self.arrive(list, first);
        true
    }

    /// Backward is over: waits for all reductions. Under stage 0 every rank then has the whole sum.
    pub(super) fn finish(&mut self, list: &mut Builder) {
        for c in 0..self.stage.trained {
            self.arrive(list, c);
            if let Chunk { whole: Held::Here(whole), sum: Held::Here(part), .. } = self.chunks[c]
                && self.policies.stage == ZeroStage::Zero
            {
                self.gather(list, part, whole);
            }
        }
        self.leaving.settle(list);
    }

    /// Gathers the parts of a sum from all ranks.
    #[track_caller]
    pub(super) fn gather(&self, list: &mut Builder, part: Buffer, whole: Buffer) {
        list.emit(Op::CopyPart { from: part, into: whole });
        let token = list.start(Work::AllGather { from: whole, into: whole });
        list.emit(Op::Wait(token));
    }
}

impl Chunk {
    /// Lets the tree, if there is one, choose the buffer at hand, perhaps a new one like it.
    pub(super) fn of_tree<T: Default>(
        &mut self,
        list: &mut Builder,
        at_hand: Buffer,
        choose: impl FnOnce(&mut PartialSums<Buffer>, Buffer, &mut dyn FnMut() -> Buffer) -> (Buffer, T),
    ) -> (Buffer, T) {
        let Some(Tree { sums, taken }) = &mut self.tree else { return (at_hand, T::default()) };
        let like = *list.spec(at_hand);
        let mut new = || {
            *taken += 1;
            list.take_as(BufferSpec {
                role: Role::Partial(*taken),
                stop: Stop::Home,
                memory: Memory::Device,
                category: Category::Gradients,
                name: "partial_sum",
                is_resident: false,
                ..like
            })
        };
        choose(sums, at_hand, &mut new)
    }
}

impl Tree {
    /// Adds what the buffer at hand has to its neighbours.
    pub(super) fn settle(&mut self, list: &mut Builder, at_hand: Buffer) -> Buffer {
        self.sums.settle(at_hand, |from, into| {
            list.emit(Op::Add { from, into: *into });
            list.emit(Op::Free(from));
        })
    }
}
