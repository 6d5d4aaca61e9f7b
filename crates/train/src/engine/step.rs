//! A training step: micro-batches, gradients, norm, update.

use phalanx_collectives::{CollectiveError, Pending};
use phalanx_layers::{Context, Draw};
use phalanx_optim::{LossScaling, Verdict};
use phalanx_parallel::pipeline::{Feed, WatchMicroBatches, run};
use phalanx_parallel::zero::Update;
use phalanx_plan::trace::{PhaseName, Placements};
use phalanx_tensor::{Clip, Tensor, View};

use crate::engine::error::RunError;
use crate::engine::rank::{Batch, MeanLoss, Rank, Rewards, uploads, zeroed};

/// The result of a step, for the metrics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Mean loss over the targets of the global batch, before the update; NaN for a batch without any.
    pub loss: f32,
    /// Number of these targets.
    pub targets: usize,
    /// Rewards of the answers, where samples are pairs.
    pub rewards: Option<Rewards>,
    /// Global gradient norm, before clipping and without the loss scale.
    pub grad_norm: f32,
    /// Learning rate.
    pub lr: f64,
    /// Loss scale of the step; `None` where there is none (f32, bf16).
    pub loss_scale: Option<f32>,
    /// Loss scale of the next step.
    pub next_loss_scale: Option<f32>,
    /// True if nothing was updated on any rank: the gradients overflowed, or there was no target.
    pub skipped: bool,
    /// True if any rank asked to stop after this step.
    pub stop_requested: bool,
}

impl Rank {
    /// Runs step `number` (from 1) on this rank's part of the global batch: forward and backward of its micro-batches
    /// in the order of the schedule, reduction of gradients, clipping, update. `stop_requested` asks all ranks to end
    /// the run after this step.
    ///
    /// Loss and norm are the same on all ranks and are read before the update: where they are not finite, no
    /// rank updates anything. With updates within backward, a rank updates nothing from the first gradient on that is not finite.
    /// A batch without a target updates nothing, either.
    ///
    /// # Errors
    /// When a collective fails: a rank died, stalled or disagreed. [`RunError::NonFinite`] on all ranks when
    /// the step cannot be applied and no smaller loss scale is left to try.
    pub fn step(&mut self, number: u64, batch: &Batch, stop_requested: bool) -> Result<Outcome, RunError> {
        self.step_unless(number, batch, &|| stop_requested)
    }

    /// The same, with a request that is asked for at the end of backward.
    ///
    /// # Errors
    /// As for [`Rank::step`].
    pub fn step_unless(
        &mut self,
        number: u64,
        batch: &Batch,
        stop: &dyn Fn() -> bool,
    ) -> Result<Outcome, RunError> {
        let device = self.device.clone();
        let scale = self.loss_scale.scale();
        let (lr, update) = (self.lr(), self.counted.applied + 1);
        self.in_flight = true;
        let done = device.try_phase(PhaseName::Step, || {
            let part = &self.spec.batch;
            let targets = part.count_targets(&device, &*self.groups.data, batch, part.step_targets())?;
            self.chunks.set_update(Update { number: update, lr: lr as f32, applies: targets > 0 });
            let loss = self.gradients(PhaseName::Step, (number, batch), targets, scale, None)?;
            let stop_requests = self.stop_requests(stop());
            let loss = self.sum_of_replicas(loss)?;
            self.chunks.pause()?;
            let judged = self.judge(targets, lr, loss, stop_requests)?;
            self.update(number, &judged)?;
            Ok::<_, CollectiveError>(judged)
        });
        let (outcome, verdict) = done.inspect_err(|error| self.groups.abort_for(error))?;
        if verdict == Verdict::Stuck {
            return Err(self.stuck(number, batch, &outcome)?);
        }
        Ok(outcome)
    }

    /// The learning rate of the step that begins.
    pub fn lr(&mut self) -> f64 {
        let Rank { spec, counted, .. } = self;
        let schedule = &spec.update.schedule_of_rate;
        schedule.lr(counted.next(&**schedule))
    }

    /// The loss scale of the next step; 1 where there is none.
    pub fn loss_scale(&self) -> f32 {
        self.loss_scale.scale()
    }

    /// Forward and backward of a replica, with the gradients of `batch` alone; they are ready afterwards. Returns its part, `[1]`, of the
    /// mean loss over `targets`.
    ///
    /// # Errors
    /// When a collective of a layer fails.
    pub fn own_gradients(
        &mut self,
        number: u64,
        batch: &Batch,
        targets: usize,
        loss_scale: f32,
    ) -> Result<Tensor, CollectiveError> {
        let loss = self.gradients(PhaseName::Step, (number, batch), targets, loss_scale, None)?;
        self.chunks.pause()?;
        Ok(loss)
    }

    /// Starts to count the ranks that ask to stop, `[1]`.
    pub fn stop_requests(&self, stop: bool) -> Pending<Tensor> {
        self.counted_over.all_reduce(self.stop_request(stop, "step.stop"))
    }

    /// Takes the norm of the gradients, and judges a step with this `loss`, the mean over `targets`.
    ///
    /// # Errors
    /// When a collective or the device fails.
    pub fn judge(
        &mut self,
        targets: usize,
        lr: f64,
        loss: Tensor,
        stop_requests: Pending<Tensor>,
    ) -> Result<(Outcome, Verdict), CollectiveError> {
        let clip = Clip { max_norm: self.spec.update.clip, loss_scale: self.loss_scale.scale() };
        self.chunks.set_clip(clip);
        self.chunks.pause()?;
        let stop_requests = stop_requests.wait()?;
        let numbers = [loss.view().range(0..1), self.chunks.norm().view(), stop_requests.view()];
        let [first, grad_norm, stop_requests] = self.device.fetch(numbers)?;
        let mut all = vec![0.0; loss.shape().elements()];
        let places = self.loss_places(false);
        let sums = if places.is_one() { vec![first] } else { self.whole_loss(&loss, places, &mut all)? };
        let loss = sums[0];
        let loss_scale = self.shown_loss_scale();
        let verdict = match targets {
            0 => Verdict::Skip,
            _ => self.loss_scale.judge(loss.is_finite() && grad_norm.is_finite()),
        };
        let outcome = Outcome {
            loss: MeanLoss::over(targets, loss).loss,
            targets,
            rewards: Rewards::of(&sums),
            grad_norm,
            lr,
            loss_scale,
            next_loss_scale: self.shown_loss_scale(),
            skipped: verdict != Verdict::Apply,
            stop_requested: stop_requests > 0.0,
        };
        Ok((outcome, verdict))
    }

    /// The factor, `[1]`, by which an update multiplies the gradients of the last step that was judged.
    pub fn gradient_factor(&self) -> View<'_> {
        self.chunks.factor().view()
    }

    /// Ends step `number`: updates the parameters if it is to be applied, and counts it.
    ///
    /// # Errors
    /// When a collective or the device fails.
    pub fn update(
        &mut self,
        number: u64,
        (outcome, verdict): &(Outcome, Verdict),
    ) -> Result<(), CollectiveError> {
        let applies = *verdict == Verdict::Apply;
        if self.spec.zero.update_in_backward {
            self.finish_updates(number, outcome.targets == 0 || applies)?;
        } else {
            if !applies {
                self.device.leave_out_rest();
            }
            let lr = outcome.lr as f32;
            self.chunks.set_update(Update { number: self.counted.applied + 1, lr, applies });
            self.chunks.finish(applies, None)?;
        }
        match verdict {
            Verdict::Apply => self.counted.applied += 1,
            Verdict::Skip => self.counted.skipped += 1,
            Verdict::Stuck => {}
        }
        Ok(())
    }

    /// Ends updates within backward; `applies` says that the norm is finite. If a replicated gradient that this rank does
    /// not count in the norm is not finite, the norm cannot show it: then this rank aborts the job.
    fn finish_updates(&mut self, number: u64, applies: bool) -> Result<(), CollectiveError> {
        self.updated_in_part = self.updated_in_part.or((!applies).then_some(number));
        self.not_finite = self.chunks.finish(applies, None)?;
        if let Some(found) = self.not_finite.filter(|_| applies) {
            self.updated_in_part = self.updated_in_part.or(Some(number));
            let name = &self.outline.parameters[found.parameter];
            let reason = format!(
                "step {number}: the gradient of {name} is not finite on this rank alone, and memory.update_in_backward has updated others: the \
                 last checkpoint stands"
            );
            self.groups.world.abort(&reason);
            return Err(CollectiveError::Aborted { rank: self.groups.world.rank(), reason });
        }
        Ok(())
    }

    /// Runs forward and backward of the micro-batches of a step, whose global batch has `targets` targets, and returns the
    /// losses of this rank ([`LossPlaces`](crate::engine::rank::LossPlaces)), zero for other ranks'. Reductions of gradients may still run.
    pub(crate) fn gradients(
        &mut self,
        phase: PhaseName,
        (number, batch): (u64, &Batch),
        targets: usize,
        loss_scale: f32,
        watch: WatchMicroBatches,
    ) -> Result<Tensor, CollectiveError> {
        let (device, spec, at) = (self.device.clone(), &self.spec, self.at);
        let places = self.loss_places(false);
        let mut loss = zeroed(&device, places.elements(), "step.loss");
        let (seed, axes) = (spec.model.seed, spec.mesh.axes);
        let rows = spec.mesh.rows(&spec.batch, at.tensor);
        let loss_at = |micro_batch| places.at(spec.batch.number_of(axes, micro_batch, at.data));
        let first_sample = |micro_batch| spec.batch.first_sample(axes, micro_batch, at.data) as u64;
        let context = |micro_batch: usize| Context {
            draw: Some(Draw { seed, step: number, first_sample: first_sample(micro_batch) }),
            rows,
            slice_bytes: spec.device.slice_bytes,
            ..Context::new(&device, spec.precision.types.compute, rows.tokens)
        };
        let numbers = spec.loss.cross_entropy(targets, loss_scale);
        let of_batch = if self.is_replica { Placements::REPLICATED } else { spec.mesh.batch_placements() };
        let upload = uploads(&device, (&spec.batch, spec.precision.types.compute), of_batch, batch);
        if !self.is_replica {
            spec.batch.check_weights(&device, axes.data, numbers.scale);
        }
        let feed = Feed {
            device: &device,
            context: &context,
            upload: &upload,
            first: spec.batch.first_input(),
            has_targets: spec.batch.has_targets(),
            numbers,
            loss_at: &loss_at,
            loss_width: places.width,
            see_logits: None,
            ranks_of_rows: spec.mesh.ranks_of_rows(),
            placements: spec.mesh.boundary(),
        };
        self.chunks.begin(phase);
        let chunks = &mut self.chunks;
        run(
            (&mut self.stages, chunks),
            &self.program,
            &self.groups.wires,
            at.pipeline,
            &feed,
            &mut loss,
            watch,
        )?;
        Ok(loss)
    }

    /// 1 if this rank asks to stop, else 0, as a tensor `[1]` that ranks can sum.
    pub(crate) fn stop_request(&self, requested: bool, name: &'static str) -> Tensor {
        let mut request = zeroed(&self.device, 1, name);
        self.device.fill(request.view_mut(), requested as u8 as f32);
        request
    }

    fn shown_loss_scale(&self) -> Option<f32> {
        (self.loss_scale.scaling() != LossScaling::Off).then(|| self.loss_scale.scale())
    }
}
