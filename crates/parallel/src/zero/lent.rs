//! Parameters and gradients, lent to a caller that moves them its own way: a parameter server, DataParallel.

use phalanx_collectives::CollectiveError;
use phalanx_tensor::{Tensor, View};

use super::Zero;
use super::gradient_buffers::{Chunk as Gradients, GradientBuffers};
use super::parameters::Chunk as Parameters;
use super::update::Step;

impl Zero {
    /// Passes what this rank stores of the parameters through `change`, chunk by chunk: whole chunks, or its shards. An error loses
    /// the chunk.
    ///
    /// # Errors
    /// Those of `change`.
    ///
    /// # Panics
    /// If a chunk is in use, or does not lie in device memory.
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

    /// The same for the gradients of trained chunks, between two steps of a rank without others.
    ///
    /// # Errors
    /// Those of `change`.
    ///
    /// # Panics
    /// If they are not whole, or are still being reduced.
    pub fn lend_gradients(
        &mut self,
        mut change: impl FnMut(Tensor) -> Result<Tensor, CollectiveError>,
    ) -> Result<(), CollectiveError> {
        for (c, slot) in self.gradients.chunks.iter_mut().enumerate() {
            let Gradients::Here(GradientBuffers::Whole(whole)) = std::mem::replace(slot, Gradients::Moving)
            else {
                panic!("the gradients of chunk {c} cannot be lent")
            };
            *slot = Gradients::Here(GradientBuffers::Whole(change(whole)?));
        }
        Ok(())
    }

    /// Updates this rank's part of the only chunk, all of which lies in device memory, with a `gradient` of that part. `number`
    /// counts updates from 1.
    ///
    /// # Panics
    /// With several chunks.
    pub fn update_with(&mut self, number: u64, lr: f32, gradient: View, factor: View) {
        assert_eq!(self.map.chunk_count(), 1, "a gradient of one chunk is given");
        let step = Step { number, lr, applies: true };
        self.update_tile((0, 0), 0..gradient.elements(), step, factor, Some(gradient));
    }
}
