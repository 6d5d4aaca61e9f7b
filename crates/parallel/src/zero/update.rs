//! The gradient norm of a stage, and the update of its parameters.

use std::ops::Range;

use phalanx_collectives::CollectiveError;
use phalanx_optim::Update;
use phalanx_plan::{Segment, Stage};
use phalanx_tensor::{NORM_BLOCK, Tensor, View};

use super::states::Updated;
use super::{Map, Zero};

/// The elements of a chunk that this rank updates: all of them under stage 0, otherwise its shard.
pub(super) fn stepped(map: &Map, stage: Stage, chunk: usize) -> Range<usize> {
    match stage {
        Stage::Zero => map.whole(chunk),
        _ => map.shard(chunk),
    }
}

impl Zero {
    /// Writes this stage's sums of squares into `sums` `[parameters * slots]` f64: the sum of parameter p of the
    /// model is element `p * slots + slot`. Each rank of the data axis squares its own blocks of 4,096 elements; the
    /// blocks of a parameter are summed along one tree, so that no layout changes a bit. Elements of parameters that
    /// another rank counts do not change.
    ///
    /// # Errors
    /// When the all_reduce of the block sums fails.
    pub fn squares(&mut self, sums: &mut Tensor, slots: usize, slot: usize) -> Result<(), CollectiveError> {
        let mut squares = self.squares.take().expect("taken only here, and put back below");
        self.device.fill(squares.view_mut(), 0.0);
        self.reduced(|c, segment, gradient| {
            let start = segment.in_chunk.start as usize;
            assert!(start.is_multiple_of(NORM_BLOCK), "shards and parameters start at whole blocks");
            let block = self.map.layout.first_block[c] as usize + start / NORM_BLOCK;
            let blocks = gradient.elements().div_ceil(NORM_BLOCK);
            self.device.block_squares(gradient, squares.view_mut().range(block..block + blocks));
        });
        let squares = self.group.all_reduce(squares).wait()?;
        if self.group.rank() == 0 {
            for (p, number) in self.map.numbers.iter().enumerate().filter(|(p, _)| self.map.answers[*p]) {
                let blocks = self.map.layout.blocks_of_parameter(p);
                let blocks = squares.view().range(blocks.start as usize..blocks.end as usize);
                self.device.record_counted(*number, self.map.layout.placed[p].elements);
                let place = number * slots + slot;
                self.device.tree_sum(blocks, sums.view_mut().range(place..place + 1));
            }
        }
        self.squares = Some(squares);
        Ok(())
    }

    /// Calls `see` with the summed gradients of this rank's shards: the parameter of the stage's network, the
    /// elements of this rank's part of it, and the gradient, which is still multiplied by the loss scale. Over the
    /// data axis each element comes once.
    pub fn reduced_gradients(&self, mut see: impl FnMut(usize, Range<u64>, View)) {
        self.reduced(|_, segment, gradient| see(segment.parameter, segment.in_parameter, gradient));
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

    /// Updates the parameters that this rank owns, chunk by chunk. Under stages 1 and 2 each chunk is sent to the
    /// other ranks while the next is computed. `number` counts updates from 1; gradients are multiplied by `factor`
    /// `[1]` first.
    ///
    /// # Errors
    /// When publishing fails, or a copy of optimizer states.
    pub fn update(&mut self, number: u64, lr: f32, factor: View) -> Result<(), CollectiveError> {
        let stage = self.options.stage;
        self.states.begin();
        for c in 0..self.map.chunk_count() {
            self.states.enter(c)?;
            if self.states.parameters(c).is_some() {
                self.parameters.assert_away(c);
            }
            let stepped = stepped(&self.map, stage, c);
            for segment in self.map.layout.segments(c, stepped.start as u64..stepped.end as u64) {
                let inside = segment.in_chunk.start as usize..segment.in_chunk.end as usize;
                let local = inside.start - stepped.start..inside.end - stepped.start;
                let gradient = self.gradients.summed(&self.map, c, inside.clone());
                let Updated { states, master, parameters } = self.states.updated(c, &local);
                let own = parameters.unwrap_or_else(|| {
                    let (here, resident) = self.parameters.resident_mut(&self.map, c);
                    here.range(inside.start - resident.start..inside.end - resident.start)
                });
                let (p, rounded) = match master {
                    Some(master) => (master, Some(own)),
                    None => (own, None),
                };
                let update = Update {
                    number,
                    lr,
                    decays: self.map.decays[segment.parameter],
                    parameters: p,
                    rounded,
                    gradient,
                    factor,
                    states,
                };
                self.options.optimizer.apply(&self.device, update);
            }
            self.states.leave()?;
            if matches!(stage, Stage::One | Stage::Two) {
                self.parameters.publish(&*self.group, c, self.options.overlap)?;
            }
        }
        Ok(self.states.finish()?)
    }
}
