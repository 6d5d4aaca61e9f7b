//! The pass of gradients: opens a chunk's buffers before its first writer, and reduces them behind the last one.
//!
//! Where gradients are communicated in another type, a rounded copy is reduced, and its sum is written or added in the type in which
//! gradients accumulate. This happens on one rank too, so that the result depends on the types and not on the number of ranks.
//!
//! With sums by a tree ([`PartialSums`]), the buffer at hand of a chunk has the last micro-batch, and others wait for their neighbours.

use crate::partial_sums::PartialSums;
use crate::trace::{Category, Memory};
use crate::zero::ZeroStage;

use super::action::{Buffer, Op, SumGroup, Token, Work};
use super::builder::Builder;
use super::chunks::{GradientBuffering, Policies, StageChunks};
use super::demand::BlockRun;
use super::lane::Lane;
use super::list::{BufferSpec, Role, Stop};

/// A chunk of gradients in a step.
#[derive(Clone, Default)]
struct Chunk {
    /// Number of blocks that have not yet written to it in its micro-batch.
    awaited: usize,
    /// Number of micro-batches that all its blocks have written.
    done: usize,
    /// True while a transient buffer is there.
    is_open: bool,
    /// Its reduction, with whether the sum is added to that of earlier micro-batches.
    reducing: Option<(Token, bool)>,
}

/// The sums of a chunk that are added by a tree.
struct Tree {
    sums: PartialSums<Buffer>,
    /// The buffer at hand, once there was a micro-batch.
    at_hand: Option<Buffer>,
    /// Number of buffers beside the kept one, so far.
    taken: u16,
}

/// The gradients of a stage in a step.
pub(super) struct GradientPass<'a> {
    stage: &'a StageChunks,
    policies: &'a Policies,
    buffering: GradientBuffering,
    writers: Vec<usize>,
    chunks: Vec<Chunk>,
    /// With sums by a tree, for each chunk.
    trees: Vec<Tree>,
    /// Reductions in flight.
    lane: Lane,
}

impl<'a> GradientPass<'a> {
    pub(super) fn new(stage: &'a StageChunks, policies: &'a Policies) -> GradientPass<'a> {
        let writers: Vec<usize> = stage.writers().iter().map(Vec::len).collect();
        let chunk = |awaited: &usize| Chunk { awaited: *awaited, ..Chunk::default() };
        let tree = |_| Tree { sums: PartialSums::new(policies.micro_batches), at_hand: None, taken: 0 };
        let trees = if policies.has_tree() { (0..stage.trained).map(tree).collect() } else { Vec::new() };
        GradientPass {
            stage,
            policies,
            buffering: policies.buffering(),
            chunks: writers.iter().map(chunk).collect(),
            writers,
            trees,
            lane: Lane::new(Vec::new(), 0, policies.reductions_behind()),
        }
    }

    fn buffer(&self, list: &Builder, role: Role, c: usize) -> Buffer {
        list.buffer(role, self.stage.first_chunk + c)
    }

    fn is_transient(&self) -> bool {
        matches!(self.buffering, GradientBuffering::Transient | GradientBuffering::OverParameters)
    }

    /// The buffer that has the sum of a chunk, for the norm and the update.
    pub(super) fn sum(&self, list: &Builder, c: usize) -> Buffer {
        let role = match self.buffering {
            GradientBuffering::InPlace => Role::Gradient,
            GradientBuffering::Pair if self.policies.stage == ZeroStage::Zero => Role::Gradient,
            GradientBuffering::Pair | GradientBuffering::Transient => Role::Sum,
            GradientBuffering::OverParameters => Role::Parameters,
        };
        self.buffer(list, role, c)
    }

    /// The buffer into which layers write.
    pub(super) fn written(&self, list: &Builder, c: usize) -> Buffer {
        match self.buffering {
            GradientBuffering::InPlace => self.at_hand(list, c, Role::Gradient),
            _ => self.buffer(list, Role::Gradient, c),
        }
    }

    /// The buffer at hand: the kept one with this role, or another one of a tree.
    fn at_hand(&self, list: &Builder, c: usize, kept: Role) -> Buffer {
        let other = self.trees.get(c).and_then(|tree| tree.at_hand);
        other.unwrap_or_else(|| self.buffer(list, kept, c))
    }

    /// Lets the tree of a chunk choose the buffer at hand, perhaps a new one like the kept one.
    fn choose<T>(
        &mut self,
        list: &mut Builder,
        (c, kept): (usize, Role),
        choose: impl FnOnce(&mut PartialSums<Buffer>, Buffer, &mut dyn FnMut() -> Buffer) -> (Buffer, T),
    ) -> T {
        let (at_hand, like) = (self.at_hand(list, c, kept), *list.spec(self.buffer(list, kept, c)));
        let Tree { sums, at_hand: chosen, taken } = &mut self.trees[c];
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
        let (buffer, result) = choose(sums, at_hand, &mut new);
        *chosen = Some(buffer);
        result
    }

    /// Adds what the buffer at hand has to its neighbours.
    fn settle(&mut self, list: &mut Builder, c: usize) {
        let Some(Tree { sums, at_hand: Some(at_hand), .. }) = self.trees.get_mut(c) else { return };
        *at_hand = sums.settle(*at_hand, |from, into| {
            list.emit(Op::Add { from, into: *into });
            list.emit(Op::Free(from));
        });
    }

    /// Before a block writes gradients.
    pub(super) fn before(&mut self, list: &mut Builder, run: BlockRun) {
        let stage = self.stage;
        for c in stage.written(run.block).filter(|_| run.pass.writes_gradients()) {
            self.arrive(list, c);
            if self.buffering == GradientBuffering::InPlace && !self.trees.is_empty() {
                self.choose(list, (c, Role::Gradient), |sums, at_hand, new| (sums.unused(at_hand, new), ()));
            }
            if self.is_transient() && !std::mem::replace(&mut self.chunks[c].is_open, true) {
                let named = (self.policies.precision.accumulate, "gradient_bucket");
                list.take(Role::Gradient, stage.first_chunk + c, stage.chunks[c].elements, named);
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
            let waits = is_whole && chunk.done < self.policies.micro_batches;
            if !waits || !self.trees.is_empty() {
                list.emit(Op::Clear(self.written(list, c)));
            }
            if let Some(tree) = self.trees.get_mut(c).filter(|_| is_whole) {
                tree.sums.written(run.micro_batch);
                self.settle(list, c);
            }
            if waits {
                continue;
            }
            self.start(list, c, run.micro_batch);
            for c in self.lane.leave(c) {
                self.arrive(list, c);
            }
        }
    }

    /// Starts the reduction of a chunk in a micro-batch.
    fn start(&mut self, list: &mut Builder, c: usize, micro_batch: usize) {
        let has_part = matches!(self.buffering, GradientBuffering::Pair | GradientBuffering::Transient);
        let accumulates = match has_part && !self.trees.is_empty() {
            true => {
                self.choose(list, (c, Role::Sum), |sums, at_hand, new| sums.target(micro_batch, at_hand, new))
            }
            false => self.buffering != GradientBuffering::InPlace && self.chunks[c].done > 1,
        };
        let gradient = self.buffer(list, Role::Gradient, c);
        let is_rounded = self.policies.rounds();
        let from = if is_rounded { self.round(list, c) } else { gradient };
        let work = match self.policies.stage {
            _ if has_part && !is_rounded => {
                Work::ReduceScatter { from, into: self.at_hand(list, c, Role::Sum), accumulates }
            }
            ZeroStage::Zero if !has_part => Work::AllReduce { group: SumGroup::Data, buffer: from },
            _ => Work::ReduceScatter { from, into: from, accumulates: false },
        };
        self.chunks[c].reducing = Some((list.start(work), accumulates));
        if is_rounded && self.is_transient() {
            self.free(list, Role::Gradient, c);
        }
    }

    /// Takes a copy in the type in which gradients are communicated.
    fn round(&self, list: &mut Builder, c: usize) -> Buffer {
        let (of, elements) = (self.stage.first_chunk + c, self.stage.chunks[c].elements);
        let named = (self.policies.precision.communicate, "gradient_copy");
        let copy = list.take(Role::Rounded, of, elements, named);
        list.emit(Op::Convert { from: self.buffer(list, Role::Gradient, c), into: copy });
        copy
    }

    /// Waits for the reduction of a chunk, if it runs.
    fn arrive(&mut self, list: &mut Builder, c: usize) {
        let Some((token, accumulates)) = self.chunks[c].reducing.take() else { return };
        list.emit(Op::Wait(token));
        self.lane.end(c);
        if self.policies.rounds() {
            let (from, into) = (self.buffer(list, Role::Rounded, c), self.arrived(list, c));
            list.emit(if accumulates { Op::Add { from, into } } else { Op::Convert { from, into } });
            self.free(list, Role::Rounded, c);
        } else if self.is_transient() {
            if self.buffering == GradientBuffering::OverParameters {
                let (from, into) = (self.buffer(list, Role::Gradient, c), self.arrived(list, c));
                list.emit(Op::CopyPart { from, into });
            }
            self.free(list, Role::Gradient, c);
        }
        if self.buffering != GradientBuffering::InPlace {
            self.settle(list, c);
        }
    }

    /// The buffer to which the sum of a copy is written or added.
    fn arrived(&self, list: &Builder, c: usize) -> Buffer {
        match self.buffering {
            GradientBuffering::InPlace => self.buffer(list, Role::Gradient, c),
            GradientBuffering::Pair | GradientBuffering::Transient => self.at_hand(list, c, Role::Sum),
            GradientBuffering::OverParameters => self.buffer(list, Role::Parameters, c),
        }
    }

    fn free(&mut self, list: &mut Builder, role: Role, c: usize) {
        list.emit(Op::Free(self.buffer(list, role, c)));
        self.chunks[c].is_open &= role != Role::Gradient;
    }

    /// Backward is over: waits for all reductions. Under stage 0 every rank then has the whole sum.
    pub(super) fn finish(&mut self, list: &mut Builder) {
        for c in 0..self.stage.trained {
            self.arrive(list, c);
            if self.buffering == GradientBuffering::Pair && self.policies.stage == ZeroStage::Zero {
                let (part, whole) = (self.buffer(list, Role::Sum, c), self.buffer(list, Role::Gradient, c));
                list.emit(Op::CopyPart { from: part, into: whole });
                let token = list.start(Work::AllGather { from: whole, into: whole });
                list.emit(Op::Wait(token));
            }
        }
    }
}
