//! The way of a batch.

use phalanx_collectives::CollectiveError;
use phalanx_layers::Context;
use phalanx_parallel::forward_backward;
use phalanx_tensor::{CrossEntropy, DType};

use crate::rank::{Batch, Rank};

/// What a step leaves for the metrics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Mean loss over the global batch, before the update.
    pub loss: f32,
    /// Global gradient norm, before clipping.
    pub grad_norm: f32,
    /// Whether any rank wants to stop after this step.
    pub stop: bool,
}

impl Rank {
    /// Step `number` (from 1) on this rank's part of the global batch: micro-batches forward and backward,
    /// gradients to their owners, clip, update, publish. `stop` is this rank's wish to end the run.
    ///
    /// # Errors
    /// When a collective fails: a rank died, stalled or disagreed.
    pub fn step(&mut self, number: u64, batch: &Batch, stop: bool) -> Result<Outcome, CollectiveError> {
        let device = self.device.clone();
        device.try_phase("step", || {
            self.zero.begin("step");
            let mut loss = self.zeroed("step.loss");
            for micro in 0..self.spec.micro_batches {
                self.zero.begin_micro_batch(micro);
                let (tokens, targets) = self.upload(batch, micro);
                let draw = Some(self.spec.draw(number, micro, self.group().rank()));
                let cx = Context { device: &device, compute: DType::F32, keep: true, draw };
                let (label_smoothing, z_loss) = (self.spec.label_smoothing, self.spec.z_loss);
                let plain = CrossEntropy::scaled(self.spec.loss_scale());
                let numbers = CrossEntropy { label_smoothing, z_loss, ..plain };
                let part = forward_backward(&self.network, &mut self.zero, &cx, tokens, &targets, numbers)?;
                device.add(part.view(), loss.view_mut());
            }
            self.zero.finish_gradients()?;
            self.zero.clip(self.spec.clip)?;
            self.zero.update(number, self.spec.schedule.lr(number - 1) as f32)?;
            self.outcome(loss, stop)
        })
    }

    /// Sums loss and wishes over the ranks: the only numbers that a step reads back.
    fn outcome(&self, loss: phalanx_tensor::Tensor, stop: bool) -> Result<Outcome, CollectiveError> {
        let mut wish = self.zeroed("step.stop");
        self.device.fill(wish.view_mut(), stop as u8 as f32);
        let (loss, wish) = (self.group().all_reduce(loss), self.group().all_reduce(wish));
        let (loss, wish) = (loss.wait()?, wish.wait()?);
        let read = |x: phalanx_tensor::View| self.device.fetch(x);
        Ok(Outcome {
            loss: read(loss.view()),
            grad_norm: read(self.zero.norm()),
            stop: read(wish.view()) > 0.0,
        })
    }
}
