//! Parameters and gradients, lent to a caller that moves them its own way: a parameter server, DataParallel.

use phalanx_collectives::CollectiveError;
use phalanx_tensor::Tensor;

use super::Zero;
use super::gradient_buffers::{Chunk as Gradients, GradientBuffers};
use super::parameters::Chunk as Parameters;

impl Zero {
    /// Passes what this rank stores of the parameters through `change`, chunk by chunk: whole chunks, or its shards. An error loses
    /// the chunk.
    ///
    /// # Errors
    /// Those of `change`.
    ///
    /// # Panics
    /// Where a chunk is in use, or does not lie in device memory.
    pub fn lend_parameters(
        &mut self,
        mut change: impl FnMut(Tensor) -> Result<Tensor, CollectiveError>,
    ) -> Result<(), CollectiveError> {
        for (c, slot) in self.parameters.chunks.iter_mut().enumerate() {
            *slot = match std::mem::replace(slot, Parameters::Moving) {
                Parameters::Whole(whole) => Parameters::Whole(change(whole)?),
                Parameters::Sharded(shard) => Parameters::Sharded(change(shard)?),
                _ => panic!("the parameters of chunk {c} cannot be lent"),
            };
        }
        Ok(())
    }

    /// The same for the gradients of trained chunks, between two steps.
    ///
    /// # Errors
    /// Those of `change`.
    ///
    /// # Panics
    /// As [`Zero::lend_parameters`].
    pub fn lend_gradients(
        &mut self,
        mut change: impl FnMut(Tensor) -> Result<Tensor, CollectiveError>,
    ) -> Result<(), CollectiveError> {
        for (c, slot) in self.gradients.chunks.iter_mut().enumerate() {
            *slot = Gradients::Here(match std::mem::replace(slot, Gradients::Moving) {
                Gradients::Here(GradientBuffers::Whole(whole)) => GradientBuffers::Whole(change(whole)?),
                Gradients::Here(GradientBuffers::Shard(shard)) => GradientBuffers::Shard(change(shard)?),
                _ => panic!("the gradients of chunk {c} cannot be lent"),
            });
        }
        Ok(())
    }
}
