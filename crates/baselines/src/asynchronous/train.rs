//! A run with asynchronous updates: what `run::train` is for synchronous ones.
//!
//! Workers meet where the run evaluates or saves, and at its end; in between nobody waits but for the bound. Metrics
//! are those of rank 0's worker: its own loss, its own pace, and how stale its pushes were. Where a worker is
//! stopped early, steps are pushes over workers, and a resumed run takes up the samples there.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use phalanx_tensor::Device;
use serde::Serialize;

use super::{Asynchronous, Done, Links, server_device};
use phalanx_train::RunError;
use phalanx_train::job::{Job, Start};
use phalanx_train::metrics::{DeviceBytes, EvaluationRecord, RankBytes, StepRecord, resident_bytes_peak};
use phalanx_train::rank::Batch;
use phalanx_train::run::{Observer, ScaleChange, Summary, due, init, resume};
use phalanx_train::run_files::RunFiles;
use phalanx_train::saving;

/// What one rank runs on: device, groups, and callbacks to the program.
pub struct RankEnvironment<'a> {
    /// Its device, with an arena that replays this rank's part of [`plan`](super::plan).
    pub device: Device,
    /// Its groups.
    pub links: Links<'a>,
    /// Set when the user wants to stop after the current step.
    pub stop_requested: &'a AtomicBool,
    /// Told the number of each step as it starts.
    pub note_step: &'a dyn Fn(u64),
    /// Bytes of other ranks' memory that are resident here because they were read.
    pub foreign_bytes: &'a dyn Fn() -> u64,
}

/// One line of `metrics.jsonl` after a step of rank 0's worker.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// Loss and norm are of the worker's part of the batch, tokens as if all workers were at the same step.
    #[serde(flatten)]
    pub step: StepRecord,
    /// Updates of other workers that the push's parameters had not seen: mean over servers.
    pub staleness: f64,
    /// The largest.
    pub staleness_max: u64,
    /// Seconds from the push to the last answer.
    pub waited_s: f64,
}

/// Trains one rank from the job's start to its last step. The job's plan is that of [`plan`](super::plan).
///
/// # Errors
/// See [`RunError`].
pub fn train(job: &Job, place: RankEnvironment, observer: &mut dyn Observer) -> Result<Summary, RunError> {
    let mut session = Session::start(job, place)?;
    let first = session.engine.steps();
    observer.starts(first);
    let mut summary = Summary { step: first, stopped: false, loss: None, val_loss: None, checkpoint: None };
    let train = &job.config.train;
    while summary.step < train.steps && !summary.stopped {
        let until = session.next_meeting(summary.step);
        summary.loss = session.run(until - summary.step, observer)?.or(summary.loss);
        let step = session.engine.steps();
        summary.stopped = step < until;
        let last = step == train.steps;
        if job.data.evaluated() > 0 && (last || due(step, train.eval_every)) {
            let val_loss = session.engine.evaluate(&session.windows)?;
            let record = EvaluationRecord { step, val_loss };
            session.files.write(&record)?;
            observer.evaluation(&record);
            summary.val_loss = Some(val_loss);
        }
        if last || summary.stopped || due(step, train.save_every) {
            let path = session.save(step)?;
            observer.saved(step, &path);
            summary.checkpoint = Some(path);
        }
        if summary.step == first || last || summary.stopped {
            session.write_memory()?;
        }
        summary.step = step;
    }
    Ok(summary)
}

struct Session<'a> {
    job: &'a Job,
    stop_requested: &'a AtomicBool,
    note_step: &'a dyn Fn(u64),
    foreign_bytes: &'a dyn Fn() -> u64,
    engine: Asynchronous<'a>,
    windows: Batch,
    files: RunFiles<'a>,
}

impl<'a> Session<'a> {
    fn start(job: &'a Job, place: RankEnvironment<'a>) -> Result<Session<'a>, RunError> {
        let RankEnvironment { device, links, stop_requested, note_step, foreign_bytes } = place;
        let spec = &job.plan.spec;
        let mut engine = Asynchronous::new(
            device.clone(),
            server_device(&device),
            links,
            spec,
            job.config.parallel.max_staleness,
        );
        match &job.start {
            Start::Fresh => engine.initialise(job.config.train.seed)?,
            Start::Import(dir) => init(dir, |weights| engine.import(weights))?,
            Start::Resume(dir) => {
                resume(dir, |checkpoint| engine.restore(checkpoint))?;
            }
        }
        let files = RunFiles::open(job, engine.rank(), engine.steps())?;
        let rows = spec.micro_batch_size * spec.evaluation_batches;
        let mut windows = Batch::with_rows(rows, spec.seq);
        for row in 0..rows {
            let here = row * spec.seq..(row + 1) * spec.seq;
            let (tokens, targets) = (&mut windows.tokens[here.clone()], &mut windows.targets[here]);
            job.data.window(engine.rank() * rows + row, tokens, targets)?;
        }
        Ok(Session { job, stop_requested, note_step, foreign_bytes, engine, windows, files })
    }

    /// The next step after which all workers meet.
    fn next_meeting(&self, step: u64) -> u64 {
        let train = &self.job.config.train;
        let evaluates = self.job.data.evaluated() > 0;
        let every = [train.save_every, if evaluates { train.eval_every } else { 0 }];
        let next = every.into_iter().filter(|every| *every > 0).map(|every| (step / every + 1) * every);
        next.min().map_or(train.steps, |next| next.min(train.steps))
    }

    /// Steps to the next meeting; the loss of this worker's last.
    fn run(&mut self, steps: u64, observer: &mut dyn Observer) -> Result<Option<f32>, RunError> {
        let Session { job, stop_requested, note_step, files, engine, .. } = self;
        let rank = engine.rank();
        let (mut before, mut failed) = (Instant::now(), None);
        let mut next_batch = |number: u64, batch: &mut Batch| {
            note_step(number);
            fill(job, rank, number, batch)
        };
        let mut after = |done: &Done| {
            let record = record(job, done, before.elapsed());
            before = Instant::now();
            failed = files.write(&record).err();
            observer.step(&record.step);
            if let Some((from, to)) = done.loss_scale.zip(done.next_loss_scale)
                && (done.skipped || from != to)
            {
                observer.loss_scale(&ScaleChange { step: done.step, skipped: done.skipped, from, to });
            }
            failed.is_some() || stop_requested.load(Ordering::Relaxed)
        };
        let report = engine.run(steps, &mut next_batch, &mut after)?;
        failed.map_or(Ok(report.losses.last().copied()), Err)
    }

    fn save(&mut self, step: u64) -> Result<PathBuf, RunError> {
        self.files.before_save()?;
        let state = self.files.state(step, step * self.job.config.batch.global as u64);
        let path = self.engine.save_checkpoint(&self.files.checkpoints(), step, &state)?;
        self.files.after_save(step)?;
        Ok(path)
    }

    /// `memory.json`: what every rank took at most so far.
    fn write_memory(&mut self) -> Result<(), RunError> {
        let resident = resident_bytes_peak((self.foreign_bytes)());
        let files = &self.files;
        saving::report(&self.engine, |engine| {
            let device = engine.device().arena().peak().expect("a planned arena measures its peak").into();
            // Host memory without a plan is not measured.
            let host = engine.device().host_arena().peak().map_or(DeviceBytes::default(), DeviceBytes::from);
            let rank = engine.rank();
            let bytes = RankBytes { rank, device, host, resident_bytes_peak: Some(resident) };
            files.write_memory_part(&bytes)
        })?;
        files.write_memory(self.job.plan.spec.world_size())
    }
}

/// The samples of step `number` (from 1) that a synchronous run would give the rank.
fn fill(job: &Job, rank: usize, number: u64, batch: &mut Batch) -> Result<(), RunError> {
    let spec = &job.plan.spec;
    let first = (number - 1) * job.config.batch.global as u64;
    for m in 0..spec.micro_batches {
        for row in 0..spec.micro_batch_size {
            let position = first + (spec.first_sample(m, rank) + row) as u64;
            let at = (m * spec.micro_batch_size + row) * spec.seq;
            let here = at..at + spec.seq;
            let (tokens, targets) = (&mut batch.tokens[here.clone()], &mut batch.targets[here]);
            job.data.sample(position, tokens, targets)?;
        }
    }
    Ok(())
}

fn record(job: &Job, done: &Done, took: Duration) -> Record {
    let seconds = took.as_secs_f64();
    let plan = &job.plan;
    let tokens = plan.spec.tokens_per_step();
    let utilisation = |flops: u128| job.peak_flops_per_s.map(|peak| flops as f64 / seconds / peak);
    let (model, executed) = (plan.model_flops_per_step(), plan.flops_per_step());
    let staleness = &done.staleness;
    let step = StepRecord {
        step: done.step,
        loss: done.loss,
        grad_norm: done.grad_norm,
        loss_scale: done.loss_scale,
        skipped: done.skipped,
        lr: done.lr,
        tokens: done.step * tokens,
        step_s: seconds,
        tokens_per_s: tokens as f64 / seconds,
        mfu: utilisation(model),
        hfu: utilisation(executed).filter(|_| executed != model),
        comm_bytes: done.sent_bytes,
        exposed_comm_s: done.waited_s,
    };
    Record {
        step,
        staleness: staleness.iter().sum::<u64>() as f64 / staleness.len().max(1) as f64,
        staleness_max: staleness.iter().copied().max().unwrap_or(0),
        waited_s: done.waited_s,
    }
}
