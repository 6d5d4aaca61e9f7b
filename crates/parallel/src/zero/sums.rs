//! Sums of gradients over the tensor and pipeline axes, behind that over data, and sums of their squares.
//!
//! There are two kinds of the first. *Terms*: every tensor-parallel rank has the whole parameter, but its layer sees only some rows
//! (sequence parallelism) or columns, or several ranks have the same part of it (keys and values with fewer heads than ranks), so each
//! rank's gradient is one term. These parameters are small; all of them are packed into one buffer for one all_reduce, in which each
//! different part has a place. *Tied*: several pipeline stages use the parameter; each has a copy, alone in its chunk, and one term of the
//! gradient. Sums are elementwise and come after the sum over data, so the bits do not depend on the ZeRO stage. Cost: for vectors of S
//! bytes, 2 S (t - 1) / t bytes sent; for a tied table of T bytes under stage 1 and above, its shard of T / N.
//!
//! The norm of all gradients counts each parameter once: where several ranks have a copy, one of them counts it. Each rank of the data axis
//! squares its own blocks of 4,096 elements, the blocks of a parameter are added along one tree, and the ranks add the numbers of all
//! parameters along another. So neither stage, chunk size, schedule nor cut into stages changes a bit. Cost: 8 bytes for each parameter
//! tensor and tensor-parallel rank.

use std::ops::Range;
use std::sync::Arc;

use phalanx_collectives::Group;
use phalanx_layers::Share;
use phalanx_plan::program::{Buffer, BufferSpec, Extent, Role, SumGroup, TiedChunks};
use phalanx_plan::trace::{Axis, Placement, Placements};
use phalanx_tensor::{Clip, NORM_BLOCK, View};

use super::held::Term;
use super::{Chunks, executor::SeeSums};

impl Chunks {
    /// How the norm of the step clips gradients: before the pause behind the norm.
    pub fn set_clip(&mut self, clip: Clip) {
        self.clip = clip;
    }

    /// Sets the gradients that no layer has written to zero: their memory holds old values.
    pub(super) fn clear(&mut self, buffer: Buffer) {
        let (place, c) = self.place_of_chunk(self.spec(buffer).of);
        let mut written = std::mem::take(&mut self.held[place].written);
        self.change(buffer, |chunks, mut whole| {
            let map = &chunks.held[place].map;
            for p in map.layout.parameters(c) {
                if !std::mem::replace(&mut written[p], false) {
                    chunks.device.fill(whole.reborrow().range(map.range(p)), 0.0);
                }
            }
        });
        self.held[place].written = written;
    }

    /// The terms of which a buffer has some: of a chunk, or the piece of one.
    fn terms_in(&self, spec: &BufferSpec) -> Vec<Term> {
        let (held, c) = self.held(spec.of);
        let of_chunk = held.terms.iter().filter(|term| term.chunk == c).cloned();
        match (spec.extent, spec.role) {
            (Extent::Tile(piece), Role::Sum | Role::Summed) => {
                of_chunk.skip(piece as usize).take(1).collect()
            }
            _ => of_chunk.collect(),
        }
    }

    /// The elements of a buffer that are a term.
    fn of_term(&self, spec: &BufferSpec, range: &Range<usize>) -> Range<usize> {
        match (spec.extent, spec.role) {
            (Extent::Tile(_), Role::Sum | Role::Summed) => 0..range.len(),
            _ => self.inside(spec, range),
        }
    }

    /// This rank's part of the only parameter of a chunk that several stages have.
    fn tied_part(&self, of: usize) -> Range<usize> {
        let (held, c) = self.held(of);
        held.part_of(held.map.layout.parameters(c).start).expect("a part that is summed")
    }

    /// Copies the terms in a summed gradient to the buffer in which they are summed over another axis.
    pub(super) fn pack(&mut self, from: Buffer, into: Buffer) {
        let source = self.spec(from);
        if self.spec(into).role == Role::Tied {
            let part = self.inside(&source, &self.tied_part(source.of));
            self.change(into, |chunks, to| chunks.device.copy(chunks.view(from).range(part), to));
            return;
        }
        let has_gaps = self.held(source.of).0.terms.iter().any(|term| term.share != Share::WHOLE);
        if has_gaps {
            // Others have the parts that this rank has not.
            self.zero_once(into);
        }
        for Term { range, packed, .. } in self.terms_in(&source) {
            let part = self.of_term(&source, &range);
            self.change(into, |chunks, to| {
                chunks.device.copy(chunks.view(from).range(part), to.range(packed));
            });
        }
    }

    /// Copies sums over another axis back.
    pub(super) fn unpack(&mut self, from: Buffer, into: Buffer) {
        let (sums, target) = (self.spec(from), self.spec(into));
        if sums.role == Role::Tied {
            let sum = self.view(from);
            if !self.described.ties[self.number_of_tie(sums.of)].is_shared {
                let placements = self.device.placements(sum);
                self.device.place(sum, placements.with(Axis::Pipeline, Placement::Replicated));
            }
            let part = match target.role {
                Role::Summed => 0..target.elements as usize,
                _ => self.inside(&target, &self.tied_part(target.of)),
            };
            self.change(into, |chunks, to| chunks.device.copy(chunks.view(from), to.range(part)));
            return;
        }
        for Term { range, packed, share, .. } in self.terms_in(&target) {
            let part = self.of_term(&target, &range);
            self.change(into, |chunks, to| {
                let (device, sum) = (&chunks.device, chunks.view(from).range(packed));
                let found = device.placements(sum);
                if share != Share::WHOLE && found.get(Axis::Tensor) == Placement::Replicated {
                    device.place(sum, found.with(Axis::Tensor, Placement::Shard(0)));
                }
                device.copy(sum, to.range(part));
            });
        }
    }

    fn number_of_tie(&self, chunk: usize) -> usize {
        let has = |tied: &TiedChunks| tied.copies.iter().any(|copy| copy.0 == chunk);
        self.described.ties.iter().position(has).expect("a tied chunk")
    }

    /// The ranks that have copies of a tied chunk.
    pub(super) fn tie_of(&self, chunk: usize) -> &Arc<dyn Group> {
        self.ties[self.number_of_tie(chunk)].as_ref().expect("a tie that ranks share")
    }

    /// Before an all_reduce: sums of squares that nothing was added to are zero, and a dry run learns over which axis there are terms.
    pub(super) fn prepare_sum(&mut self, group: SumGroup, buffer: Buffer) {
        let spec = self.spec(buffer);
        if matches!(spec.role, Role::Squares | Role::Norms) {
            self.zero_once(buffer);
        }
        if !self.device.follows_placements() {
            return;
        }
        let mark = |view: View, axis| {
            self.device.place(view, self.device.placements(view).with(axis, Placement::Partial));
        };
        match group {
            SumGroup::Data => {}
            SumGroup::Tie => mark(self.view(buffer), Axis::Pipeline),
            SumGroup::Tensor => {
                // Rules of operations know that gradients of parameters which are whole on every rank are terms.
                let held = &self.held[self.place_of(spec.of)];
                let marked = held.terms.iter().filter(|term| held.map.are_marked[term.parameter]);
                marked.for_each(|term| mark(self.view(buffer).range(term.packed.clone()), Axis::Tensor));
            }
            SumGroup::World if self.groups.world.world_size() > 1 => {
                // Every rank has some of the sums, and zeros for the others.
                let axes = self.groups.world.axes().iter();
                let placements =
                    axes.fold(Placements::REPLICATED, |p, axis| p.with(*axis, Placement::Partial));
                self.device.place(self.view(buffer), placements);
            }
            SumGroup::World => {}
        }
    }

    /// Sets a buffer to zero, unless it was in this phase.
    fn zero_once(&mut self, buffer: Buffer) {
        if self.running.zeroed.insert(buffer) {
            self.change(buffer, |chunks, sums| chunks.device.fill(sums, 0.0));
        }
    }

    /// The elements of its chunk that a buffer of a summed gradient has and this rank counts.
    fn counted(&self, spec: &BufferSpec) -> Range<usize> {
        let (place, c) = self.place_of_chunk(spec.of);
        let (map, described) = (&self.held[place].map, &self.described.stages[place].chunks[c]);
        match (spec.extent, spec.role) {
            // A piece of a tile in which gradients are stored.
            (Extent::Tile(tile), Role::Sum) => {
                let before: u64 = described.gradient_tiles[..tile as usize].iter().sum();
                let first = map.updated(c).start + (before + spec.start) as usize;
                first..first + spec.elements as usize
            }
            _ => map.shard(c),
        }
    }

    /// The elements of a buffer that are some of its chunk which this rank counts.
    fn of_counted(&self, spec: &BufferSpec, range: &Range<usize>) -> Range<usize> {
        match (spec.extent, spec.role) {
            (Extent::Tile(_), Role::Sum) => {
                let first = self.counted(spec).start;
                range.start - first..range.end - first
            }
            _ => self.inside(spec, range),
        }
    }

    /// Counts the squares of what this rank counts of a chunk: whole blocks, except at the end of a parameter.
    pub(super) fn count(&mut self, from: Buffer, into: Buffer) {
        self.zero_once(into);
        let source = self.spec(from);
        let range = self.counted(&source);
        self.change(into, |chunks, mut squares| {
            let (held, c) = chunks.held(source.of);
            let layout = &held.map.layout;
            for (_, part) in held.map.parameters_in(c, &range) {
                assert!(
                    part.start.is_multiple_of(NORM_BLOCK),
                    "shards, tiles and parameters start at whole blocks"
                );
                let block = layout.first_block[c] as usize + part.start / NORM_BLOCK;
                let blocks = part.len().div_ceil(NORM_BLOCK);
                let gradient = chunks.view(from).range(chunks.of_counted(&source, &part));
                chunks.device.block_squares(gradient, squares.reborrow().range(block..block + blocks));
            }
        });
    }

    /// Adds the squares of each parameter of a stage that this rank counts. Elements of others stay zero.
    pub(super) fn total(&mut self, from: Buffer, into: Buffer) {
        self.zero_once(into);
        if self.groups.data.rank() != 0 {
            return;
        }
        let place = self.place_of(self.spec(from).of);
        self.change(into, |chunks, mut sums| {
            let (map, [slots, slot]) = (&chunks.held[place].map, chunks.slots);
            let answers = |p: usize| map.answers[p] && map.is_trained(p);
            for (p, number) in map.numbers.iter().enumerate().filter(|(p, _)| answers(*p)) {
                let blocks = map.layout.blocks_of_parameter(p);
                let blocks = chunks.view(from).range(blocks.start as usize..blocks.end as usize);
                chunks.device.record_counted(*number, map.layout.placed[p].elements);
                let at = number * slots + slot;
                chunks.device.tree_sum(blocks, sums.reborrow().range(at..at + 1));
            }
        });
    }

    /// Computes norm and factor, which are the same on all ranks, from the squares of all parameters.
    pub(super) fn take_norm(&mut self, sums: Buffer) {
        let tensor = self.take(sums);
        self.device.norm(tensor.view(), self.clip, self.norm.view_mut(), self.factor.view_mut());
        self.put(sums, tensor);
    }

    /// Shows what this rank counts of a summed gradient, parameter by parameter.
    pub(super) fn look(&self, buffer: Buffer, see: SeeSums) {
        let source = self.spec(buffer);
        let (place, c) = self.place_of_chunk(source.of);
        for (parameter, part) in self.held[place].map.parameters_in(c, &self.counted(&source)) {
            see(place, parameter, self.view(buffer).range(self.of_counted(&source, &part)));
        }
    }
}
