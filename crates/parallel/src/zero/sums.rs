//! Sums of gradients over the tensor and pipeline axes, after they are summed over the data axis.
//!
//! There are two kinds. *Partial*: every tensor-parallel rank has the whole parameter, but its layer sees only some
//! rows (sequence parallelism), so each rank's gradient is one term. These parameters are small vectors; all of them
//! are packed into one buffer for one all_reduce. *Tied*: several pipeline stages use the parameter; each has a copy,
//! alone in its chunk, and one term of the gradient.
//!
//! Sums are elementwise and come after the sum over data, so the bits do not depend on the ZeRO stage. Cost: for
//! vectors of S bytes, 2 S (t - 1) / t bytes sent; for a tied table of T bytes under stage 1 and above, its shard of
//! T / N.

use std::ops::Range;

use phalanx_collectives::{CollectiveError, Group};
use phalanx_tensor::{Category, Tensor};
use phalanx_trace::{Axis, Placement};

use super::{Zero, update};

impl Zero {
    /// Sums over `tensor` the gradients of which each rank has one term.
    ///
    /// # Errors
    /// When the all_reduce fails.
    pub fn sum_partial(&mut self, tensor: &dyn Group) -> Result<(), CollectiveError> {
        let places = self.places(&self.map.partial);
        let elements: usize = places.iter().map(|(_, range)| range.len()).sum();
        if elements == 0 {
            return Ok(());
        }
        let dtype = self.gradients.accumulate();
        let mut packed = self.device.alloc(dtype, [elements], Category::Communication, "partial_gradients");
        let mut at = 0;
        for (c, range) in &places {
            let to = packed.view_mut().range(at..at + range.len());
            self.device.copy(self.gradients.summed(&self.map, *c, range.clone()), to);
            at += range.len();
        }
        let packed = tensor.all_reduce(packed).wait()?;
        at = 0;
        for (c, range) in places {
            let from = packed.view().range(at..at + range.len());
            at += range.len();
            self.device.copy(from, self.gradients.summed_mut(&self.map, c, range));
        }
        Ok(())
    }

    /// Marks, in a dry run, the summed gradient of parameter `p` of the stage as one term of a sum over `axis`.
    pub fn place_terms(&self, p: usize, axis: Axis) {
        let wanted: Vec<bool> = (0..self.map.shapes.len()).map(|other| other == p).collect();
        for (c, range) in self.places(&wanted) {
            let view = self.gradients.summed(&self.map, c, range);
            self.device.place(view, self.device.placements(view).with(axis, Placement::Partial));
        }
    }

    /// Copies this rank's part of the summed gradient of parameter `number` of the model into a new tensor.
    pub fn take_summed(&self, number: usize) -> Tensor {
        let places = self.tied(number);
        let elements = places.iter().map(|(_, range)| range.len()).sum();
        let dtype = self.gradients.accumulate();
        let mut own: Tensor = self.device.alloc(dtype, [elements], Category::Communication, "tied_gradient");
        for (c, range) in places {
            self.device.copy(self.gradients.summed(&self.map, c, range), own.view_mut());
        }
        own
    }

    /// Writes `sum` over the part that [`Zero::take_summed`] copied.
    pub fn put_summed(&mut self, number: usize, sum: &Tensor) {
        for (c, range) in self.tied(number) {
            self.device.copy(sum.view(), self.gradients.summed_mut(&self.map, c, range));
        }
    }

    /// Chunk and elements of this rank's part of a tied parameter: none, or one span, since it is alone in its chunk.
    fn tied(&self, number: usize) -> Vec<(usize, Range<usize>)> {
        let places = self.places(&self.map.numbers.iter().map(|n| *n == number).collect::<Vec<_>>());
        assert!(places.len() <= 1, "a tied parameter is alone in its chunk");
        places
    }

    /// Chunk and elements of the parts of the `wanted` parameters that this rank updates.
    fn places(&self, wanted: &[bool]) -> Vec<(usize, Range<usize>)> {
        let of_chunk = |c: usize| {
            let stepped = update::stepped(&self.map, self.options.stage, c);
            let segments = self.map.layout.segments(c, stepped.start as u64..stepped.end as u64);
            let wanted = segments.filter(|s| wanted[s.parameter]);
            wanted.map(move |s| (c, s.in_chunk.start as usize..s.in_chunk.end as usize))
        };
        (0..self.map.chunk_count()).flat_map(of_chunk).collect()
    }
}
