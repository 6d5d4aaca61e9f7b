//! A run with asynchronous updates: what `run::train` is for synchronous ones.
//!
//! Workers meet when the run evaluates or saves, and at its end; in between they wait only for the staleness bound. The
//! server of rank 0 receives the pushes of all workers, with their losses. A line of metrics is written after each step
//! of rank 0's worker and covers all pushes since the previous line; the last line before a meeting is written when all
//! workers are done, so that no push is left out. If a worker is stopped early, the number of steps is that of pushes
//! divided by workers, and a resumed run continues with the samples of that step.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use phalanx_tensor::Device;

use super::{Asynchronous, Done, Links, server_device};
use phalanx_train::RunError;
use phalanx_train::job::{Job, Start};
use phalanx_train::metrics::{EvaluationRecord, RankBytes, StepRecord, resident_bytes_peak};
use phalanx_train::rank::Batch;
use phalanx_train::run::{Observer, ScaleChange, Summary, due, evaluates_after, init, resume};
use phalanx_train::run_files::RunFiles;
use phalanx_train::saving;
use phalanx_train::state::Position;

/// The device, groups and callbacks of one rank.
pub struct RankEnvironment<'a> {
    /// Its device, with an arena that replays this rank's part of [`plan`](super::plan).
    pub device: Device,
    /// Its groups.
    pub links: Links<'a>,
    /// Set when the user wants to stop after the current step.
    pub stop_requested: &'a AtomicBool,
    /// Called with the number of each step when it starts.
    pub note_step: &'a dyn Fn(u64),
    /// Bytes of other ranks' memory that are resident here because they were read.
    pub foreign_bytes: &'a dyn Fn() -> u64,
}

/// Trains one rank from the job's start to its last step. The job's plan is that of [`plan`](super::plan).
///
/// # Errors
/// The errors of [`RunError`]: files, the device, other ranks, numbers that are not finite.
pub fn train(job: &Job, place: RankEnvironment, observer: &mut dyn Observer) -> Result<Summary, RunError> {
    let mut session = Session::start(job, place)?;
    let first = session.engine.steps();
    observer.starts(first);
    let mut summary = Summary { step: first, stopped: false, loss: None, val_loss: None, checkpoint: None };
    let train = &job.config.train;
    if job.evaluates_first {
        summary.val_loss = session.evaluate(first, observer)?.map(|(val_loss, _)| val_loss);
        summary.stopped = summary.val_loss.is_none();
    }
    while summary.step < train.steps && !summary.stopped {
        let until = session.next_meeting(summary.step);
        summary.loss = session.run(until - summary.step, observer)?.or(summary.loss);
        let step = session.engine.steps();
        summary.stopped = step < until;
        let last = step == train.steps;
        let due_save = last || due(step, train.save_every);
        let evaluates = evaluates_after(job, step) && !summary.stopped;
        let (mut saved, mut is_best) = (false, false);
        if summary.stopped || (due_save && !(evaluates && train.keep_best)) {
            summary.checkpoint = Some(session.save(step, observer)?);
            saved = true;
        }
        if evaluates {
            match session.evaluate(step, observer)? {
                None => summary.stopped = true,
                Some((val_loss, best)) => (summary.val_loss, is_best) = (Some(val_loss), best),
            }
        }
        if (summary.stopped || due_save || is_best) && !saved {
            summary.checkpoint = Some(session.save(step, observer)?);
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
    /// Where the run was when it started.
    started: Position,
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
        let mut at = Position::default();
        match &job.start {
            Start::Fresh => engine.initialise(job.config.train.seed)?,
            Start::Import(dir) => init(dir, |weights| engine.import(weights))?,
            Start::Resume(dir) => {
                at = resume(dir, |checkpoint| engine.restore(checkpoint))?;
            }
        }
        let files = RunFiles::open(job, engine.rank(), &at)?;
        let mut windows = Batch::with_rows(spec.evaluation_rows(), spec.seq);
        windows.fill_windows(spec.seq, engine.rank(), &*job.data)?;
        Ok(Session { job, stop_requested, note_step, foreign_bytes, engine, windows, files, started: at })
    }

    /// The next step after which all workers meet.
    fn next_meeting(&self, step: u64) -> u64 {
        let train = &self.job.config.train;
        let evaluates = self.job.data.evaluated() > 0;
        let every = [train.save_every, if evaluates { train.eval_every } else { 0 }];
        let next = every.into_iter().filter(|every| *every > 0).map(|every| (step / every + 1) * every);
        next.min().map_or(train.steps, |next| next.min(train.steps))
    }

    /// Runs the steps to the next meeting. Returns the last mean loss of all workers.
    fn run(&mut self, steps: u64, observer: &mut dyn Observer) -> Result<Option<f32>, RunError> {
        let Session { job, stop_requested, note_step, files, engine, started, .. } = self;
        let (rank, last) = (engine.rank(), engine.steps() + steps);
        let mut recorder = Recorder { job, files, observer, started, last_line: Instant::now() };
        let (mut before, mut failed, mut held) = (Instant::now(), None, None);
        let mut next_batch = |number: u64, batch: &mut Batch| {
            note_step(number);
            let first = samples_after(job, started, number - 1);
            Ok(batch.fill(&job.plan.spec, rank, first, &*job.data)?)
        };
        let mut after = |done: &Done| {
            let step_s = before.elapsed();
            before = Instant::now();
            let ends = done.step == last || stop_requested.load(Ordering::Relaxed);
            if ends {
                held = Some((done.clone(), step_s));
            } else {
                failed = recorder.record(done, step_s).err();
            }
            failed.is_some() || ends
        };
        engine.run(steps, &mut next_batch, &mut after)?;
        if let Some(error) = failed {
            return Err(error);
        }
        let Some((mut done, step_s)) = held else { return Ok(None) };
        done.pushes.extend(engine.take_pushes());
        recorder.record(&done, step_s)?;
        Ok(Some(done.pushes.loss()))
    }

    /// Evaluates: the loss, and whether it is the best, so that its state is saved. None when a worker asks to stop meanwhile.
    fn evaluate(&mut self, step: u64, observer: &mut dyn Observer) -> Result<Option<(f32, bool)>, RunError> {
        let stop = || self.stop_requested.load(Ordering::Relaxed);
        let Some(evaluated) = self.engine.evaluate(&self.windows, &stop)? else { return Ok(None) };
        let record = EvaluationRecord::new(step, self.job.data.evaluated(), evaluated);
        let is_best = self.files.evaluated(&record)?;
        observer.evaluation(&record);
        Ok(Some((record.val_loss, is_best)))
    }

    fn save(&mut self, step: u64, observer: &mut dyn Observer) -> Result<PathBuf, RunError> {
        self.files.before_save()?;
        let samples = samples_after(self.job, &self.started, step);
        let tokens = tokens_after(self.job, &self.started, samples);
        let state = self.files.state([step, samples, tokens]);
        let path = self.engine.save_checkpoint(&self.files.checkpoints(), step, &state)?;
        self.files.after_save(step)?;
        observer.saved(step, &path);
        Ok(path)
    }

    /// Writes `memory.json`: the measured peak of every rank so far.
    fn write_memory(&mut self) -> Result<(), RunError> {
        let resident = resident_bytes_peak((self.foreign_bytes)());
        let files = &self.files;
        saving::report(&self.engine, |engine| {
            files.write_memory_part(&RankBytes::measured(engine.rank(), engine.device(), resident))
        })?;
        files.write_memory(self.job.plan.spec.world_size())
    }
}

/// Samples of the run before step `step + 1`.
fn samples_after(job: &Job, started: &Position, step: u64) -> u64 {
    started.samples + (step - started.step) * job.config.batch.global as u64
}

/// Tokens of the run in so many samples.
fn tokens_after(job: &Job, started: &Position, samples: u64) -> u64 {
    started.tokens + (samples - started.samples) * job.config.model.seq as u64
}

/// Writes the metrics of steps and passes them to the observer.
struct Recorder<'a, 'job> {
    job: &'a Job,
    files: &'a mut RunFiles<'job>,
    observer: &'a mut dyn Observer,
    /// Where the run was when it started.
    started: &'a Position,
    /// When the last line was written, or the first step began.
    last_line: Instant,
}

impl Recorder<'_, '_> {
    /// Records a step of this rank's worker, which took `step_s`, with the pushes of all workers.
    fn record(&mut self, done: &Done, step_s: Duration) -> Result<(), RunError> {
        let since_last_line = self.last_line.elapsed().as_secs_f64();
        self.last_line = Instant::now();
        let record = record(self.job, self.started, done, [step_s.as_secs_f64(), since_last_line]);
        self.files.write(&record)?;
        self.observer.step(&record);
        if let Some((from, to)) = done.loss_scale.zip(done.next_loss_scale)
            && (done.skipped || from != to)
        {
            let change = ScaleChange { step: done.step, skipped: done.skipped, from, to };
            self.observer.loss_scale(&change);
        }
        Ok(())
    }
}

/// The line of metrics for a step. Tokens are counted when the server receives a worker's push; rates refer to the time
/// since the last line.
fn record(job: &Job, started: &Position, done: &Done, [step_s, since_last_line]: [f64; 2]) -> StepRecord {
    let (plan, pushes) = (&job.plan, &done.pushes);
    let ranks = plan.spec.world_size() as u64;
    let tokens_per_push = plan.spec.tokens_per_step() / ranks;
    let steps_per_s = pushes.count as f64 / ranks as f64 / since_last_line;
    let utilisation = |flops: u128| job.peak_flops_per_s.map(|peak| flops as f64 * steps_per_s / peak);
    let (model, executed) = (plan.model_flops_per_step(), plan.flops_per_step());
    StepRecord {
        step: done.step,
        loss: pushes.loss(),
        targets: None,
        grad_norm: pushes.grad_norm(),
        loss_scale: done.loss_scale,
        skipped: done.skipped,
        lr: done.lr,
        tokens: started.tokens + (pushes.total - started.step * ranks) * tokens_per_push,
        step_s,
        tokens_per_s: (pushes.count * tokens_per_push) as f64 / since_last_line,
        mfu: utilisation(model),
        hfu: utilisation(executed).filter(|_| executed != model),
        comm_bytes: done.sent_bytes,
        exposed_comm_s: done.waited_s,
        staleness: Some(pushes.staleness(done.waited_s)),
    }
}
