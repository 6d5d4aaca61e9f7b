//! From summed gradients to updated, published parameters.

use std::ops::Range;

use phalanx_collectives::CollectiveError;
use phalanx_optim::rule::Step;
use phalanx_plan::{Segment, Stage};
use phalanx_tensor::{Clip, NORM_BLOCK, View};

use super::{Map, Zero};

/// The elements of a chunk that this rank updates: all of them under stage 0, else its shard.
pub(super) fn stepped(map: &Map, stage: Stage, chunk: usize) -> Range<usize> {
    match stage {
        Stage::Zero => map.whole(chunk),
        _ => map.shard(chunk),
    }
}

impl Zero {
    /// Global gradient norm, and the factor that clips it and takes the loss scale back. Each rank adds the
    /// squares of its own blocks; blocks are summed along one tree, so that no layout changes a bit. Both
    /// numbers stay on the device: see [`Zero::norm`]. Every rank has the same ones.
    ///
    /// # Errors
    /// When the exchange of the block sums fails.
    pub fn clip(&mut self, clip: Clip) -> Result<(), CollectiveError> {
        let mut squares = self.squares.take().expect("only here and back below");
        self.device.fill(squares.view_mut(), 0.0);
        self.reduced(|c, segment, gradient| {
            let start = segment.in_chunk.start as usize;
            assert!(start.is_multiple_of(NORM_BLOCK), "shards and parameters start at whole blocks");
            let block = self.map.layout.first_block[c] as usize + start / NORM_BLOCK;
            let blocks = gradient.elements().div_ceil(NORM_BLOCK);
            self.device.block_squares(gradient, squares.view_mut().range(block..block + blocks));
        });
        let squares = self.group.all_reduce(squares).wait()?;
        let (norm, factor) = (self.norm.view_mut(), self.clip_factor.view_mut());
        self.device.norm(squares.view(), clip, norm, factor);
        self.squares = Some(squares);
        Ok(())
    }

    /// The norm that [`Zero::clip`] computed, before clipping and without the loss scale, `[1]`.
    pub fn norm(&self) -> View<'_> {
        self.norm.view()
    }

    /// Shows the summed gradients of this rank's shards, each with its parameter: over all ranks, each
    /// element once. They are multiplied by the loss scale.
    pub fn reduced_gradients(&self, mut see: impl FnMut(usize, View)) {
        self.reduced(|_, segment, gradient| see(segment.parameter, gradient));
    }

    fn reduced(&self, mut see: impl FnMut(usize, Segment, View)) {
        for c in 0..self.map.chunk_count() {
            let shard = self.map.shard(c);
            for segment in self.map.layout.segments(c, shard.start as u64..shard.end as u64) {
                let inside = segment.in_chunk.start as usize..segment.in_chunk.end as usize;
                see(c, segment, self.gradients.summed(&self.map, c, inside));
            }
        }
    }

    /// One step of the rule on what this rank owns, chunk by chunk; under stages 1 and 2 each chunk is on
    /// its way to the others while the next is computed. `number` counts updates from 1.
    ///
    /// # Errors
    /// When publishing fails.
    pub fn update(&mut self, number: u64, lr: f32) -> Result<(), CollectiveError> {
        let stage = self.options.stage;
        for c in 0..self.map.chunk_count() {
            let stepped = stepped(&self.map, stage, c);
            for segment in self.map.layout.segments(c, stepped.start as u64..stepped.end as u64) {
                let inside = segment.in_chunk.start as usize..segment.in_chunk.end as usize;
                let local = inside.start - stepped.start..inside.end - stepped.start;
                let gradient = self.gradients.summed(&self.map, c, inside.clone());
                let (parameters, resident) = self.parameters.resident_mut(&self.map, c);
                let own = parameters.range(inside.start - resident.start..inside.end - resident.start);
                let (p, rounded) = match &mut self.masters {
                    Some(masters) => (masters[c].view_mut().range(local.clone()), Some(own)),
                    None => (own, None),
                };
                let states = self.states[c].iter_mut().map(|s| s.view_mut().range(local.clone())).collect();
                let step = Step { number, lr, decays: self.map.decays[segment.parameter] };
                let factor = self.clip_factor.view();
                self.options.rule.apply(&self.device, step, p, rounded, gradient, states, factor);
            }
            if matches!(stage, Stage::One | Stage::Two) {
                self.parameters.publish(&*self.group, c, self.options.overlap)?;
            }
        }
        Ok(())
    }
}
