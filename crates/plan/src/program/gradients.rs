//! The pass of gradients: opens a chunk's buffers before its first writer, and reduces them behind the last one.
//!
//! Where gradients are communicated in another type, a rounded copy is reduced, and its sum is written or added in the type in which
//! gradients accumulate. This happens on one rank too, so that the result depends on the types and not on the number of ranks.

use crate::zero::ZeroStage;

use super::action::{Buffer, Op, SumGroup, Token, Work};
use super::builder::Builder;
use super::chunks::{GradientBuffering, Policies, StageChunks};
use super::demand::BlockRun;
use super::lane::Lane;
use super::list::Role;

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

/// The gradients of a stage in a step.
pub(super) struct GradientPass<'a> {
    stage: &'a StageChunks,
    policies: &'a Policies,
    buffering: GradientBuffering,
    writers: Vec<usize>,
    chunks: Vec<Chunk>,
    /// Reductions in flight.
    lane: Lane,
}

impl<'a> GradientPass<'a> {
    pub(super) fn new(stage: &'a StageChunks, policies: &'a Policies) -> GradientPass<'a> {
        let writers: Vec<usize> = stage.writers().iter().map(Vec::len).collect();
        let chunk = |awaited: &usize| Chunk { awaited: *awaited, ..Chunk::default() };
        GradientPass {
            stage,
            policies,
            buffering: policies.buffering(),
            chunks: writers.iter().map(chunk).collect(),
            writers,
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

    /// Before a block writes gradients.
    pub(super) fn before(&mut self, list: &mut Builder, run: BlockRun) {
        let stage = self.stage;
        for c in stage.written(run.block).filter(|_| run.pass.writes_gradients()) {
            self.arrive(list, c);
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
            let is_last = chunk.done == self.policies.micro_batches;
            if self.buffering == GradientBuffering::InPlace && !is_last {
                continue;
            }
            list.emit(Op::Clear(self.buffer(list, Role::Gradient, c)));
            self.start(list, c);
            for c in self.lane.leave(c) {
                self.arrive(list, c);
            }
        }
    }

    /// Starts the reduction of a chunk.
    fn start(&mut self, list: &mut Builder, c: usize) {
        let accumulates = self.buffering != GradientBuffering::InPlace && self.chunks[c].done > 1;
        let gradient = self.buffer(list, Role::Gradient, c);
        let is_rounded = self.policies.rounds();
        let from = if is_rounded { self.round(list, c) } else { gradient };
        let has_part = matches!(self.buffering, GradientBuffering::Pair | GradientBuffering::Transient);
        let work = match self.policies.stage {
            _ if has_part && !is_rounded => {
                Work::ReduceScatter { from, into: self.buffer(list, Role::Sum, c), accumulates }
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
    }

    /// The buffer to which the sum of a copy is written or added.
    fn arrived(&self, list: &Builder, c: usize) -> Buffer {
        let role = match self.buffering {
            GradientBuffering::InPlace => Role::Gradient,
            GradientBuffering::Pair | GradientBuffering::Transient => Role::Sum,
            GradientBuffering::OverParameters => Role::Parameters,
        };
        self.buffer(list, role, c)
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
