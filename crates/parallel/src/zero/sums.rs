//! Sums of gradients over the tensor and pipeline axes, after they are summed over the data axis.
//!
//! There are two kinds. *Terms*: every tensor-parallel rank has the whole parameter, but its layer sees only some rows (sequence
//! parallelism) or columns, or several ranks have the same part of it (keys and values with fewer heads than ranks), so each rank's
//! gradient is one term. These parameters are small; all of them are packed into one buffer for one all_reduce, in which each
//! different part has a place. *Tied*: several pipeline stages use the parameter; each has a copy,
//! alone in its chunk, and one term of the gradient.
//!
//! Sums are elementwise and come after the sum over data, so the bits do not depend on the ZeRO stage. Cost: for
//! vectors of S bytes, 2 S (t - 1) / t bytes sent; for a tied table of T bytes under stage 1 and above, its shard of
//! T / N.

use std::ops::Range;

use phalanx_collectives::{CollectiveError, Group};
use phalanx_layers::Share;
use phalanx_plan::trace::{Axis, Placement};
use phalanx_tensor::{Category, Tensor, View};

use super::stored_gradients::ChunkRange;
use super::{Zero, update};

impl Zero {
    /// Sums over `tensor` the gradients of which each rank has one term.
    ///
    /// # Errors
    /// When the all_reduce fails.
    pub fn sum_terms(&mut self, tensor: &dyn Group) -> Result<(), CollectiveError> {
        let places = self.places(|p| self.map.terms[p].is_some());
        let mut elements = 0;
        let place = |(p, c, range): (usize, usize, Range<usize>)| {
            let share = self.map.terms[p].expect("it is a term");
            let own = elements + share.index * range.len();
            elements += share.of * range.len();
            (p, c, own..own + range.len(), range)
        };
        let places: Vec<_> = places.into_iter().map(place).collect();
        if elements == 0 {
            return Ok(());
        }
        let dtype = self.gradients.accumulate();
        let mut packed = self.device.alloc(dtype, [elements], Category::Communication, "terms_of_gradients");
        if places.iter().any(|(p, ..)| self.map.terms[*p] != Some(Share::WHOLE)) {
            // Others have the parts that this rank has not.
            self.device.fill(packed.view_mut(), 0.0);
        }
        for (_, c, own, range) in &places {
            let to = packed.view_mut().range(own.clone());
            match self.states.has_gradients(*c) {
                true => {
                    let here = self.states.read_gradients(self.part(*c, range.clone()))?;
                    self.device.copy(here.view(), to);
                }
                false => self
                    .device
                    .copy(self.gradients.summed(&self.parameters, &self.map, *c, range.clone()), to),
            }
        }
        let packed = tensor.all_reduce(packed).wait()?;
        for (p, c, own, range) in places {
            let from = packed.view().range(own);
            let found = self.device.placements(from);
            if self.map.terms[p] != Some(Share::WHOLE) && found.get(Axis::Tensor) == Placement::Replicated {
                self.device.place(from, found.with(Axis::Tensor, Placement::Shard(0)));
            }
            self.put(c, range, from)?;
        }
        Ok(())
    }

    /// Overwrites the summed gradient of elements of a chunk.
    fn put(&mut self, c: usize, range: Range<usize>, from: View) -> Result<(), CollectiveError> {
        if !self.states.has_gradients(c) {
            self.device.copy(from, self.gradients.summed_mut(&mut self.parameters, &self.map, c, range));
            return Ok(());
        }
        let mut here =
            self.device.alloc(from.dtype(), [range.len()], Category::Communication, "summed_gradients");
        self.device.copy(from, here.view_mut());
        let start = self.part(c, range).1.start;
        Ok(self.states.write_gradients(c, start, here)?)
    }

    /// Elements of a chunk, as elements of the part of it that this rank updates.
    fn part(&self, c: usize, range: Range<usize>) -> ChunkRange {
        let first = update::stepped(&self.map, self.options.stage, c).start;
        (c, range.start - first..range.end - first)
    }

    /// Marks, in a dry run, the summed gradient of parameter `p` of the stage as one term of a sum over `axis`.
    pub fn place_terms(&self, p: usize, axis: Axis) {
        let mark = |view| {
            self.device.place(view, self.device.placements(view).with(axis, Placement::Partial));
        };
        for (_, c, range) in self.places(|other| other == p) {
            match self.states.has_gradients(c) {
                true => {
                    let views = self.states.gradient_views(self.part(c, range));
                    views.into_iter().for_each(|(_, view)| mark(view));
                }
                false => mark(self.gradients.summed(&self.parameters, &self.map, c, range)),
            }
        }
    }

    /// Copies this rank's part of the summed gradient of the tied parameter `p` of the stage into a new tensor.
    ///
    /// # Errors
    /// When gradients lie outside of device memory, and the device failed.
    pub fn take_summed(&mut self, p: usize) -> Result<Tensor, CollectiveError> {
        let places = self.tied(p);
        if let Some((c, range)) = places.first()
            && self.states.has_gradients(*c)
        {
            return Ok(self.states.read_gradients(self.part(*c, range.clone()))?);
        }
        let elements = places.iter().map(|(_, range)| range.len()).sum();
        let dtype = self.gradients.accumulate();
        let mut own: Tensor = self.device.alloc(dtype, [elements], Category::Communication, "tied_gradient");
        for (c, range) in places {
            self.device.copy(self.gradients.summed(&self.parameters, &self.map, c, range), own.view_mut());
        }
        Ok(own)
    }

    /// Writes `sum` over the part that [`Zero::take_summed`] copied.
    ///
    /// # Errors
    /// As for [`Zero::take_summed`].
    pub fn put_summed(&mut self, p: usize, sum: &Tensor) -> Result<(), CollectiveError> {
        self.tied(p).into_iter().try_for_each(|(c, range)| self.put(c, range, sum.view()))
    }

    /// Chunk and elements of this rank's part of a tied parameter: none, or one span, since it is alone in its chunk.
    fn tied(&self, p: usize) -> Vec<(usize, Range<usize>)> {
        let places = self.places(|other| other == p);
        assert!(places.len() <= 1, "a tied parameter is alone in its chunk");
        places.into_iter().map(|(_, c, range)| (c, range)).collect()
    }

    /// Parameter, chunk and elements of the parts of `wanted` parameters that this rank updates.
    fn places(&self, wanted: impl Fn(usize) -> bool) -> Vec<(usize, usize, Range<usize>)> {
        let wanted = &wanted;
        let of_chunk = |c: usize| {
            let stepped = update::stepped(&self.map, self.options.stage, c);
            let segments = self.map.layout.segments(c, stepped.start as u64..stepped.end as u64);
            let segments = segments.filter(|s| wanted(s.parameter));
            segments.map(move |s| (s.parameter, c, s.in_chunk.start as usize..s.in_chunk.end as usize))
        };
        (0..self.map.trained).flat_map(of_chunk).collect()
    }
}
