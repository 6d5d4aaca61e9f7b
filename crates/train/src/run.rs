//! The training loop of one rank: it reads batches, runs steps, and writes metrics and checkpoints.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use phalanx_checkpoint::{Checkpoint, HuggingFaceDir};
use phalanx_tensor::Device;

use crate::error::RunError;
use crate::groups::Groups;
use crate::job::{Job, Start};
use crate::metrics::{EvaluationRecord, RankBytes, StepRecord, resident_bytes_peak};
use crate::rank::{Batch, Rank};
use crate::run_files::RunFiles;
use crate::state::{Position, position};
use crate::step::Outcome;

/// What the program that starts a rank provides.
pub struct RankEnvironment<'a> {
    /// The device, with an arena that replays this rank's plan.
    pub device: Device,
    /// The process groups.
    pub groups: Groups,
    /// Set when the user wants to stop after the current step.
    pub stop_requested: &'a AtomicBool,
    /// Called with the number of each step when it starts.
    pub note_step: &'a dyn Fn(u64),
    /// Returns the bytes of other ranks' memory that are mapped and resident in this process.
    pub foreign_bytes: &'a dyn Fn() -> u64,
}

/// Receives the events of a run; only rank 0 prints them.
pub trait Observer {
    /// The state is complete; the first step is the one after `step`.
    fn starts(&mut self, _step: u64) {}
    /// A step is done.
    fn step(&mut self, _record: &StepRecord) {}
    /// A step was skipped, or the loss scale has changed.
    fn loss_scale(&mut self, _change: &ScaleChange) {}
    /// The batch of a step had no target, and nothing was updated.
    fn without_targets(&mut self, _step: u64) {}
    /// An evaluation is done.
    fn evaluation(&mut self, _record: &EvaluationRecord) {}
    /// A checkpoint is complete.
    fn saved(&mut self, _step: u64, _path: &Path) {}
}

/// A change of the loss scale, or a skipped step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleChange {
    /// The step.
    pub step: u64,
    /// Whether its gradients overflowed and it was not applied.
    pub skipped: bool,
    /// Loss scale of the step.
    pub from: f32,
    /// Loss scale of the next step.
    pub to: f32,
}

/// An observer that ignores all events.
pub struct Silent;

impl Observer for Silent {}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Number of steps so far, including those before a resume.
    pub step: u64,
    /// Whether the user stopped it before its last step.
    pub stopped: bool,
    /// Mean loss of the last step.
    pub loss: Option<f32>,
    /// Last evaluation.
    pub val_loss: Option<f32>,
    /// Last checkpoint.
    pub checkpoint: Option<PathBuf>,
}

/// Trains one rank from the initial state to the last step. What a step is saved for comes before its evaluation, which may take
/// long and be left for a resumed run.
///
/// # Errors
/// The errors of [`RunError`]: files, the device, other ranks, numbers that are not finite.
pub fn train(job: &Job, place: RankEnvironment, observer: &mut dyn Observer) -> Result<Summary, RunError> {
    let mut session = Session::start(job, place)?;
    observer.starts(session.at.step);
    let first = session.at.step + 1;
    let mut summary =
        Summary { step: session.at.step, stopped: false, loss: None, val_loss: None, checkpoint: None };
    if job.evaluates_first {
        summary.val_loss = session.evaluate(observer)?.map(|(val_loss, _)| val_loss);
        summary.stopped = summary.val_loss.is_none();
    }
    while session.at.step < job.config.train.steps && !summary.stopped {
        let (record, change, stop_requested) = session.step()?;
        observer.step(&record);
        if record.targets == Some(0) {
            observer.without_targets(record.step);
        }
        if let Some(change) = change {
            observer.loss_scale(&change);
        }
        let step = record.step;
        summary.loss = Some(record.loss);
        let last = step == job.config.train.steps;
        let due_save = last || due(step, job.config.train.save_every);
        let evaluates = evaluates_after(job, step) && !stop_requested;
        let (mut stops, mut saved, mut is_best) = (stop_requested, false, false);
        // With train.keep_best, a checkpoint says whether its own evaluation is the best, and comes behind it.
        if stops || (due_save && !(evaluates && job.config.train.keep_best)) {
            summary.checkpoint = Some(session.save(observer)?);
            saved = true;
        }
        if evaluates {
            match session.evaluate(observer)? {
                None => stops = true,
                Some((val_loss, best)) => (summary.val_loss, is_best) = (Some(val_loss), best),
            }
        }
        if (stops || due_save || is_best) && !saved {
            summary.checkpoint = Some(session.save(observer)?);
        }
        summary.stopped = stops;
        if step == first || last || stops {
            session.write_memory()?;
        }
        summary.step = step;
    }
    Ok(summary)
}

/// Opens the Hugging Face directory `dir`, which `model.init` names, and hands it to `import`.
///
/// # Errors
/// [`RunError::Init`] with the cause: the directory cannot be opened, or `import` failed.
pub fn init(
    dir: &Path,
    import: impl FnOnce(&HuggingFaceDir) -> Result<(), RunError>,
) -> Result<(), RunError> {
    let imported = HuggingFaceDir::open(dir).map_err(RunError::from).and_then(|weights| import(&weights));
    imported.map_err(|cause| RunError::Init { dir: dir.to_path_buf(), cause: Box::new(cause) })
}

/// Opens the checkpoint `dir` and hands it to `restore`; returns where the run is.
///
/// # Errors
/// [`RunError::Restore`] for a checkpoint that cannot be used, and those of other ranks and of the device.
pub fn resume(
    dir: &Path,
    restore: impl FnOnce(&Checkpoint) -> Result<(), RunError>,
) -> Result<Position, RunError> {
    let restored = Checkpoint::open(dir).map_err(RunError::from).and_then(|checkpoint| {
        let position = position(&checkpoint)?;
        restore(&checkpoint)?;
        Ok(position)
    });
    restored.map_err(|error| match error {
        RunError::Checkpoint(_) | RunError::Shape { .. } | RunError::State { .. } => {
            RunError::Restore { cause: Box::new(error) }
        }
        other => other,
    })
}

/// Whether the run evaluates after `step`.
pub fn evaluates_after(job: &Job, step: u64) -> bool {
    let train = &job.config.train;
    job.data.evaluated() > 0 && (step == train.steps || due(step, train.eval_every))
}

/// Whether an action that happens every `every` steps is due after `step`; never for 0.
pub fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

struct Session<'a> {
    job: &'a Job,
    place: RankEnvironment<'a>,
    engine: Rank,
    batch: Batch,
    windows: Batch,
    files: RunFiles<'a>,
    at: Position,
}

impl<'a> Session<'a> {
    fn start(job: &'a Job, place: RankEnvironment<'a>) -> Result<Session<'a>, RunError> {
        let spec = &job.plan.spec;
        let orders = &job.plan.of(place.groups.world.rank()).orders;
        let mut engine = Rank::new(place.device.clone(), place.groups.clone(), spec, orders)?;
        let mut at = Position::default();
        match &job.start {
            Start::Fresh => engine.initialise(job.config.train.seed)?,
            Start::Import(dir) => init(dir, |weights| engine.import(weights))?,
            Start::Resume(dir) => {
                at = resume(dir, |checkpoint| engine.restore(checkpoint))?;
            }
        }
        let files = RunFiles::open(job, place.groups.world.rank(), &at)?;
        let batch = Batch::with_rows(spec.micro_batch_size * spec.micro_batches, spec.seq);
        let windows = Batch::with_rows(spec.evaluation_rows(), spec.seq);
        let mut session = Session { job, place, engine, batch, windows, files, at };
        session.fill_windows()?;
        Ok(session)
    }

    /// Runs one step on the next samples. Returns its record, a change of the loss scale, and whether any rank asked
    /// to stop.
    fn step(&mut self) -> Result<(StepRecord, Option<ScaleChange>, bool), RunError> {
        let start = Instant::now();
        let number = self.at.step + 1;
        (self.place.note_step)(number);
        self.fill_batch()?;
        let stop = || self.place.stop_requested.load(Ordering::Relaxed);
        let outcome = self.engine.step_unless(number, &self.batch, &stop)?;
        let seconds = start.elapsed().as_secs_f64();
        let Outcome { loss, targets, grad_norm, lr, loss_scale, skipped, stop_requested, .. } = outcome;
        self.at.step = number;
        self.at.samples += self.job.config.batch.global as u64;
        let communication = self.place.groups.take_statistics();
        let plan = &self.job.plan;
        let tokens = plan.spec.tokens_per_step();
        self.at.tokens += tokens;
        let utilisation = |flops: u128| self.job.peak_flops_per_s.map(|peak| flops as f64 / seconds / peak);
        let (model, executed) = (plan.model_flops_per_step(), plan.flops_per_step());
        let record = StepRecord {
            step: number,
            loss,
            targets: plan.spec.counts_targets.then_some(targets),
            grad_norm,
            loss_scale,
            skipped,
            lr,
            tokens: self.at.tokens,
            step_s: seconds,
            tokens_per_s: tokens as f64 / seconds,
            mfu: utilisation(model),
            hfu: utilisation(executed).filter(|_| executed != model),
            comm_bytes: communication.sent_bytes,
            exposed_comm_s: communication.exposed_s,
            staleness: None,
        };
        self.files.write(&record)?;
        let change = loss_scale.zip(outcome.next_loss_scale).filter(|(from, to)| skipped || from != to);
        let change = change.map(|(from, to)| ScaleChange { step: number, skipped, from, to });
        Ok((record, change, stop_requested))
    }

    /// Evaluates: the loss, and whether it is the best, so that this state is saved. None when a rank asks to stop meanwhile. A
    /// resumed run begins with such an evaluation.
    fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<Option<(f32, bool)>, RunError> {
        let stop = || self.place.stop_requested.load(Ordering::Relaxed);
        let Some(evaluated) = self.engine.evaluate_unless(&self.windows, &stop)? else { return Ok(None) };
        let record = EvaluationRecord::new(self.at.step, self.job.data.evaluated(), evaluated);
        let is_best = self.files.evaluated(&record)?;
        observer.evaluation(&record);
        Ok(Some((record.val_loss, is_best)))
    }

    fn save(&mut self, observer: &mut dyn Observer) -> Result<PathBuf, RunError> {
        self.files.before_save()?;
        let Position { step, samples, tokens, .. } = self.at;
        let state = self.files.state([step, samples, tokens]);
        let path = self.engine.save_checkpoint(&self.files.checkpoints(), step, &state)?;
        self.files.after_save(step)?;
        observer.saved(step, &path);
        Ok(path)
    }

    /// Writes `memory.json`: the measured peak of every rank so far.
    fn write_memory(&mut self) -> Result<(), RunError> {
        let foreign = (self.place.foreign_bytes)();
        let files = &self.files;
        self.engine.report(|engine| {
            let (rank, resident) = (engine.group().rank(), resident_bytes_peak(foreign));
            files.write_memory_part(&RankBytes::measured(rank, engine.device(), resident))
        })?;
        self.files.write_memory(self.place.groups.world.world_size())
    }

    fn fill_batch(&mut self) -> Result<(), RunError> {
        let (spec, data) = (&self.job.plan.spec, self.engine.at().data);
        Ok(self.batch.fill(spec, data, self.at.samples, &*self.job.data)?)
    }

    fn fill_windows(&mut self) -> Result<(), RunError> {
        let (seq, data) = (self.job.plan.spec.seq, self.engine.at().data);
        Ok(self.windows.fill_windows(seq, data, &*self.job.data)?)
    }
}
