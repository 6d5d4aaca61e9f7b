//! The way of a batch.

use phalanx_collectives::CollectiveError;
use phalanx_layers::Context;
use phalanx_optim::{LossScaling, Verdict};
use phalanx_parallel::{Seen, forward_backward};
use phalanx_tensor::{Clip, Tensor, View};

use crate::rank::{Batch, Rank};
use crate::run::RunError;

/// What a step leaves for the metrics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Mean loss over the global batch, before the update.
    pub loss: f32,
    /// Global gradient norm, before clipping and without the loss scale.
    pub grad_norm: f32,
    /// Learning rate.
    pub lr: f64,
    /// Loss scale of the step; `None` where there is none (f32, bf16).
    pub loss_scale: Option<f32>,
    /// That of the next.
    pub next_loss_scale: Option<f32>,
    /// Whether the gradients overflowed and nothing was updated, on all ranks.
    pub skipped: bool,
    /// Whether any rank wants to stop after this step.
    pub stop: bool,
}

/// Watches the micro-batches of a step: which of them, what, and its numbers.
pub(crate) type WatchStep<'a> = Option<&'a mut dyn FnMut(usize, Seen, View)>;

impl Rank {
    /// Step `number` (from 1) on this rank's part of the global batch: micro-batches forward and backward,
    /// gradients to their owners, clip, update, publish. `stop` is this rank's wish to end the run.
    ///
    /// Loss and norm are the same on all ranks and are read before the update: where they are not finite, no
    /// rank updates anything.
    ///
    /// # Errors
    /// When a collective fails: a rank died, stalled or disagreed. [`RunError::NonFinite`] on all ranks when
    /// the step cannot be applied and no smaller loss scale is left to try.
    pub fn step(&mut self, number: u64, batch: &Batch, stop: bool) -> Result<Outcome, RunError> {
        let device = self.device.clone();
        let scale = self.loss_scale.scale();
        let lr = self.spec.schedule.lr(self.applied);
        let (outcome, verdict) = device.try_phase("step", || {
            let loss = self.gradients(number, batch, scale, None)?;
            let wish = self.wish(stop);
            let (loss, wish) = (self.group().all_reduce(loss), self.group().all_reduce(wish));
            self.zero.finish_gradients()?;
            self.zero.clip(Clip { max_norm: self.spec.clip, loss_scale: scale })?;
            let (loss, wish) = (loss.wait()?, wish.wait()?);
            let (loss, grad_norm) = (device.fetch(loss.view()), device.fetch(self.zero.norm()));
            let loss_scale = self.shown_loss_scale();
            let verdict = self.loss_scale.judge(loss.is_finite() && grad_norm.is_finite());
            if verdict == Verdict::Apply {
                self.zero.update(self.applied + 1, lr as f32)?;
            }
            let outcome = Outcome {
                loss,
                grad_norm,
                lr,
                loss_scale,
                next_loss_scale: self.shown_loss_scale(),
                skipped: verdict != Verdict::Apply,
                stop: device.fetch(wish.view()) > 0.0,
            };
            Ok::<_, CollectiveError>((outcome, verdict))
        })?;
        match verdict {
            Verdict::Apply => self.applied += 1,
            Verdict::Skip => self.skipped += 1,
            Verdict::Stuck => return Err(self.stuck(number, batch, &outcome)?),
        }
        Ok(outcome)
    }

    /// The micro-batches of a step, forward and backward: the loss of this rank, `[1]`. Gradients are on
    /// their way.
    pub(crate) fn gradients(
        &mut self,
        number: u64,
        batch: &Batch,
        loss_scale: f32,
        mut watch: WatchStep,
    ) -> Result<Tensor, CollectiveError> {
        let device = self.device.clone();
        self.zero.begin("step");
        let mut loss = self.zeroed("step.loss");
        let numbers = self.spec.cross_entropy(loss_scale);
        for micro in 0..self.spec.micro_batches {
            self.zero.begin_micro_batch(micro);
            let (tokens, targets) = self.upload(batch, micro);
            let draw = Some(self.spec.draw(number, micro, self.group().rank()));
            let cx = Context { device: &device, compute: self.spec.precision.compute, keep: true, draw };
            let mut seen = watch.as_mut().map(|watch| |seen: Seen, x: View| watch(micro, seen, x));
            let seen = seen.as_mut().map(|see| see as &mut dyn FnMut(Seen, View));
            let part = forward_backward(&self.network, &mut self.zero, &cx, tokens, &targets, numbers, seen)?;
            device.add(part.view(), loss.view_mut());
        }
        Ok(loss)
    }

    /// This rank's wish to stop, as a number that can be summed.
    fn wish(&self, stop: bool) -> Tensor {
        let mut wish = self.zeroed("step.stop");
        self.device.fill(wish.view_mut(), stop as u8 as f32);
        wish
    }

    fn shown_loss_scale(&self) -> Option<f32> {
        (self.loss_scale.scaling() != LossScaling::Off).then(|| self.loss_scale.scale())
    }
}
