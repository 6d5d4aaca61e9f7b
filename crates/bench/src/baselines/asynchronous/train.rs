//! A run with asynchronous updates: the loop of `train`, whose engine goes from meeting to meeting.
//!
//! Workers meet when the run evaluates or saves, and at its end; in between they wait only for the staleness bound. The
//! server of rank 0 receives the pushes of all workers, with their losses. A line of metrics is written after each step
//! of rank 0's worker and covers all pushes since the previous line; the last line before a meeting is written when all
//! workers are done, so that no push is left out. If a worker is stopped early, the number of steps is that of pushes
//! divided by workers, and a resumed run continues with the samples of that step.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Asynchronous, Done, Links, server_device};
use phalanx_train::RunError;
use phalanx_train::job::Job;
use phalanx_train::metrics::StepRecord;
use phalanx_train::position::Position;
use phalanx_train::rank::Batch;
use phalanx_train::run::{Observer, RankEnvironment, Run, Summary, drive};
use phalanx_train::run_files::RunFiles;

/// Trains one rank from the job's start to its last step. The job's plan is that of [`plan`](super::plan).
///
/// # Errors
/// The errors of [`RunError`]: files, the device, other ranks, numbers that are not finite.
pub fn train(
    job: &Job,
    place: RankEnvironment<Links>,
    observer: &mut dyn Observer,
) -> Result<Summary, RunError> {
    let (links, place) = place.take_groups();
    let (device, max_staleness) = (place.device.clone(), job.config.parallel.max_staleness);
    let serving = server_device(&device);
    drive(job, Asynchronous::new(device, serving, links, &job.plan.spec, max_staleness), place, observer)
}

/// The next step after which all workers meet.
fn next_meeting(job: &Job, step: u64) -> u64 {
    let train = &job.config.train;
    let evaluates = job.data.evaluated() > 0;
    let every = [train.save_every, if evaluates { train.eval_every } else { 0 }];
    let next = every.into_iter().filter(|every| *every > 0).map(|every| (step / every + 1) * every);
    next.min().map_or(train.steps, |next| next.min(train.steps))
}

impl Asynchronous<'_> {
    /// Runs the steps to the next meeting. Returns the last mean loss of all workers, and whether one was stopped before.
    pub(super) fn run_to_next_meeting(
        &mut self,
        run: &mut Run,
        observer: &mut dyn Observer,
    ) -> Result<(Option<f32>, bool), RunError> {
        let Run { job, place, files, at, .. } = run;
        let (rank, until) = (self.rank(), next_meeting(job, at.step));
        let started = self.started.get_or_insert_with(|| at.clone()).clone();
        let mut recorder = Recorder { job, files, observer, started: &started, last_line: Instant::now() };
        let (mut before, mut failed, mut held) = (Instant::now(), None, None);
        let mut next_batch = |number: u64, batch: &mut Batch| {
            (place.note_step)(number);
            let (spec, position) = (&job.plan.spec, samples_after(job, &started, number - 1));
            Ok(batch.fill((&spec.batch, spec.mesh.axes), rank, position, &*job.data)?)
        };
        let mut after = |done: &Done| {
            let step_s = before.elapsed();
            before = Instant::now();
            let ends = done.step == until || place.stop_requested.load(Ordering::Relaxed);
            if ends {
                held = Some((done.clone(), step_s));
            } else {
                failed = recorder.record(done, step_s).err();
            }
            failed.is_some() || ends
        };
        self.run(until - at.step, &mut next_batch, &mut after)?;
        if let Some(error) = failed {
            return Err(error);
        }
        let mut loss = None;
        if let Some((mut done, step_s)) = held {
            done.pushes.extend(self.take_pushes());
            recorder.record(&done, step_s)?;
            loss = Some(done.pushes.loss());
        }
        at.step = self.steps();
        at.samples = samples_after(job, &started, at.step);
        at.tokens = started.tokens + (at.samples - started.samples) * job.config.model.seq as u64;
        Ok((loss, at.step < until))
    }
}

/// Samples of the run before step `step + 1`.
fn samples_after(job: &Job, started: &Position, step: u64) -> u64 {
    started.samples + (step - started.step) * job.config.batch.global as u64
}

/// Writes the metrics of steps and passes them to the observer.
struct Recorder<'a, 'job> {
    job: &'a Job,
    files: &'a mut RunFiles<'job>,
    observer: &'a mut dyn Observer,
    /// Position of the run when it started.
    started: &'a Position,
    /// When the last line was written, or the first step began.
    last_line: Instant,
}

impl Recorder<'_, '_> {
    /// Records a step of this rank's worker, which took `step_s`, with the pushes of all workers. Tokens are counted when the
    /// server receives a worker's push; rates refer to the time since the last line.
    fn record(&mut self, done: &Done, step_s: Duration) -> Result<(), RunError> {
        let since_last_line = self.last_line.elapsed().as_secs_f64();
        self.last_line = Instant::now();
        let (spec, pushes) = (&self.job.plan.spec, &done.pushes);
        let ranks = spec.world_size() as u64;
        let tokens_per_push = spec.tokens_per_step() / ranks;
        let [mfu, hfu] = self.job.utilisations(pushes.count as f64 / ranks as f64 / since_last_line);
        let record = StepRecord {
            step: done.step,
            loss: pushes.loss(),
            targets: None,
            rewards: None,
            grad_norm: pushes.grad_norm(),
            loss_scale: done.outcome.loss_scale,
            skipped: done.outcome.skipped,
            lr: done.outcome.lr,
            tokens: self.started.tokens + (pushes.total - self.started.step * ranks) * tokens_per_push,
            step_s: step_s.as_secs_f64(),
            tokens_per_s: (pushes.count * tokens_per_push) as f64 / since_last_line,
            mfu,
            hfu,
            comm_bytes: done.sent_bytes,
            exposed_comm_s: done.waited_s,
            staleness: Some(pushes.staleness(done.waited_s)),
            at: self.files.stamp(),
        };
        self.files.write(&record)?;
        record.observed(done.outcome.next_loss_scale, self.observer);
        Ok(())
    }
}
