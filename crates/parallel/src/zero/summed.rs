//! Access to the summed gradients of a chunk after its reduction, to read and change them.

use std::ops::Range;

use phalanx_plan::ZeroStage;
use phalanx_tensor::{View, ViewMut};

use super::Map;
use super::gradient_buffers::{Chunk, GradientBuffers};
use super::gradients::GradientChunks;
use super::parameters::ParameterChunks;

impl GradientChunks {
    /// The summed gradient of elements `range` of chunk `c`: elements of this rank's shard, or under stage 0 any
    /// elements.
    pub(super) fn summed<'a>(
        &'a self,
        parameters: &'a ParameterChunks,
        map: &Map,
        c: usize,
        range: Range<usize>,
    ) -> View<'a> {
        match self.is_in_parameters(c) {
            true => parameters.part(map, c, &range),
            false => self.summed_in_buffer(map, c, range),
        }
    }

    /// The same of a chunk whose gradients have a buffer of their own.
    pub(super) fn summed_in_buffer(&self, map: &Map, c: usize, range: Range<usize>) -> View<'_> {
        let Chunk::Here(held) = &self.chunks[c] else {
            panic!("gradients of chunk {c} are still being reduced")
        };
        let (view, start) = match held {
            GradientBuffers::Whole(whole) => (whole.view(), 0),
            GradientBuffers::Both { whole, .. } if self.stage == ZeroStage::Zero => (whole.view(), 0),
            GradientBuffers::Shard(shard) | GradientBuffers::Both { shard, .. } => {
                (shard.view(), map.shard(c).start)
            }
            _ => panic!("gradients of chunk {c} are not in device memory"),
        };
        view.range(range.start - start..range.end - start)
    }

    /// The mutable form of [`GradientChunks::summed`].
    pub(super) fn summed_mut<'a>(
        &'a mut self,
        parameters: &'a mut ParameterChunks,
        map: &Map,
        c: usize,
        range: Range<usize>,
    ) -> ViewMut<'a> {
        if self.is_in_parameters(c) {
            return parameters.part_mut(map, c, &range);
        }
        let stage = self.stage;
        let Chunk::Here(held) = &mut self.chunks[c] else {
            panic!("gradients of chunk {c} are still being reduced")
        };
        let (view, start) = match held {
            GradientBuffers::Whole(whole) => (whole.view_mut(), 0),
            GradientBuffers::Both { whole, .. } if stage == ZeroStage::Zero => (whole.view_mut(), 0),
            GradientBuffers::Shard(shard) | GradientBuffers::Both { shard, .. } => {
                (shard.view_mut(), map.shard(c).start)
            }
            _ => panic!("gradients of chunk {c} are not in device memory"),
        };
        view.range(range.start - start..range.end - start)
    }
}
