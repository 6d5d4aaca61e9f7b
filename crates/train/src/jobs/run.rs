//! The training loop of one rank: it reads batches, runs steps, and writes metrics and checkpoints.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use phalanx_checkpoint::{Checkpoint, HuggingFaceDir};
use phalanx_collectives::CollectiveError;
use phalanx_tensor::Device;
use serde_json::Value;

use crate::engine::error::RunError;
use crate::engine::groups::Groups;
use crate::engine::rank::{Batch, MeanLoss, Rank};
use crate::engine::saving::{self, Saves};
use crate::engine::step::Outcome;
use crate::jobs::job::{Job, Start};
use crate::jobs::metrics::{EvaluationRecord, RankBytes, RewardRecord, StepRecord, resident_bytes_peak};
use crate::jobs::position::{Position, position};
use crate::jobs::references;
use crate::jobs::run_files::RunFiles;

/// Resources from the program that starts a rank. `G` are the process groups of its engine.
pub struct RankEnvironment<'a, G = Groups> {
    /// The device, with an arena that replays this rank's plan.
    pub device: Device,
    /// The process groups.
    pub groups: G,
    /// Set when the user wants to stop after the current step.
    pub stop_requested: &'a AtomicBool,
    /// Called with the number of each step when it starts.
    pub note_step: &'a dyn Fn(u64),
    /// Returns the bytes of other ranks' memory that are mapped and resident in this process.
    pub foreign_bytes: &'a dyn Fn() -> u64,
}

impl<'a, G> RankEnvironment<'a, G> {
    /// The groups, for the engine, and the rest, for the run.
    pub fn take_groups(self) -> (G, RankEnvironment<'a, ()>) {
        let RankEnvironment { device, groups, stop_requested, note_step, foreign_bytes } = self;
        (groups, RankEnvironment { device, groups: (), stop_requested, note_step, foreign_bytes })
    }
}

/// An engine that a run drives: of this crate ([`Rank`]), or of another method.
pub trait Engine: Saves {
    /// Fills parameters with initial values from the seed, and optimizer states with zeros.
    ///
    /// # Errors
    /// When the system starts no more threads.
    fn initialise(&mut self, seed: u64) -> Result<(), RunError>;

    /// Fills parameters with the weights of a Hugging Face directory, and optimizer states with zeros.
    ///
    /// # Errors
    /// A tensor that is missing, of another shape, or unreadable.
    fn import(&mut self, dir: &HuggingFaceDir) -> Result<(), RunError>;

    /// Restores parameters, states and counts from a checkpoint of any run.
    ///
    /// # Errors
    /// Damage, missing tensors, another shape.
    fn restore(&mut self, from: &Checkpoint) -> Result<(), RunError>;

    /// Which part of each batch this rank computes.
    fn part_of_data(&self) -> usize;

    /// Runs steps up to one after which something may be due, which may be the next one; writes their metrics and moves `run.at`.
    /// Returns the mean loss of the last one, and whether a rank asked to stop.
    ///
    /// # Errors
    /// Files, the device, other ranks, numbers that are not finite.
    fn advance(
        &mut self,
        run: &mut Run,
        observer: &mut dyn Observer,
    ) -> Result<(Option<f32>, bool), RunError>;

    /// Mean loss over the targets in the windows of all ranks; None when `stop` has ended the evaluation of one.
    ///
    /// # Errors
    /// When a collective fails.
    fn evaluate_unless(
        &mut self,
        windows: &Batch,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<MeanLoss>, CollectiveError>;

    /// The log-probability of each of the answers of all ranks, those of one data-parallel rank behind those of the one before.
    ///
    /// # Errors
    /// When a collective fails.
    ///
    /// # Panics
    /// If samples are no pairs, of which every rank is up to date.
    fn log_probabilities(&mut self, answers: &Batch) -> Result<Vec<f32>, CollectiveError>;

    /// Writes checkpoint `step` under `checkpoints`; `state`, an object, goes into its manifest, with the updates so far.
    ///
    /// # Errors
    /// Disk full, folder unwritable, numbers that are not finite, here or on another rank. Older checkpoints are untouched.
    fn save_checkpoint(&mut self, checkpoints: &Path, step: u64, state: &Value) -> Result<PathBuf, RunError>;
}

/// A run on one rank, as its engine sees it.
pub struct Run<'a> {
    /// Its job.
    pub job: &'a Job,
    /// Resources from the program.
    pub place: RankEnvironment<'a, ()>,
    /// The files of the run.
    pub files: RunFiles<'a>,
    /// Its progress.
    pub at: Position,
    batch: Batch,
}

/// Receives the events of a run; only rank 0 prints them.
pub trait Observer {
    /// The reference has given the log-probabilities of `_done` of `_all` answers.
    fn references(&mut self, _done: usize, _all: usize) {}
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
    /// True if its gradients overflowed and it was not applied.
    pub skipped: bool,
    /// Loss scale of the step.
    pub from: f32,
    /// Loss scale of the next step.
    pub to: f32,
}

/// An observer that ignores all events.
pub struct Silent;

impl Observer for Silent {}

/// Result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Number of steps so far, including those before a resume.
    pub step: u64,
    /// True if the user stopped it before its last step.
    pub stopped: bool,
    /// True if it ended before its last step, after `train.patience` evaluations without a smaller loss.
    pub ended_early: bool,
    /// Mean loss of the last step.
    pub loss: Option<f32>,
    /// Last evaluation.
    pub val_loss: Option<f32>,
    /// Last checkpoint.
    pub checkpoint: Option<PathBuf>,
}

/// Trains one rank from the initial state to the last step.
///
/// # Errors
/// The errors of [`drive`].
pub fn train(job: &Job, place: RankEnvironment, observer: &mut dyn Observer) -> Result<Summary, RunError> {
    let (groups, place) = place.take_groups();
    let planned = job.plan.of(groups.world.rank()).programs;
    let engine = Rank::new(place.device.clone(), groups, &job.plan.spec)?;
    engine.check_programs(planned).map_err(Box::new)?;
    drive(job, engine, place, observer)
}

/// Drives an engine from the initial state to the last step. What a step is saved for comes before its evaluation, which may take
/// long and be left for a resumed run.
///
/// # Errors
/// The errors of [`RunError`]: files, the device, other ranks, numbers that are not finite.
pub fn drive(
    job: &Job,
    engine: impl Engine,
    place: RankEnvironment<()>,
    observer: &mut dyn Observer,
) -> Result<Summary, RunError> {
    let mut session = Session::start(job, place, engine, observer)?;
    let first = session.run.at.step;
    observer.starts(first);
    let mut summary = Summary {
        step: first,
        stopped: false,
        ended_early: false,
        loss: None,
        val_loss: None,
        checkpoint: None,
    };
    let mut without_best = 0;
    if job.evaluates_first {
        summary.val_loss = session.evaluate(observer)?.map(|(val_loss, _)| val_loss);
        summary.stopped = summary.val_loss.is_none();
    }
    while summary.step < job.config.train.steps && !summary.stopped && !summary.ended_early {
        let (loss, stop_requested) = session.engine.advance(&mut session.run, observer)?;
        let step = session.run.at.step;
        summary.loss = loss.or(summary.loss);
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
            without_best = if is_best { 0 } else { without_best + 1 };
            summary.ended_early = !last && !stops && job.config.train.patience == Some(without_best);
            session.run.files.ended_early = summary.ended_early;
        }
        if (stops || due_save || is_best || summary.ended_early) && !saved {
            summary.checkpoint = Some(session.save(observer)?);
        }
        summary.stopped = stops;
        if summary.step == first || last || stops || summary.ended_early {
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

/// Returns whether the run evaluates after `step`.
pub fn evaluates_after(job: &Job, step: u64) -> bool {
    let train = &job.config.train;
    job.data.evaluated() > 0 && (step == train.steps || due(step, train.eval_every))
}

/// Returns whether an action that happens every `every` steps is due after `step`; never for 0.
pub fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

/// The log-probabilities of answers under the reference: those that a resumed run finds in its folder, else those by `engine`, which
/// has not trained yet.
fn references_of(
    job: &Job,
    engine: &mut impl Engine,
    observer: &mut dyn Observer,
) -> Result<Vec<f32>, RunError> {
    let (source, tokens) = (&*job.data, job.digests.tokens.as_deref().unwrap_or_default());
    if matches!(job.start, Start::Resume(_)) {
        return references::read(&job.run, source.answers(), tokens);
    }
    let (data, all) = (engine.part_of_data(), source.answers());
    let mut score = |answers: &Batch| engine.log_probabilities(answers);
    let mut told = |done| observer.references(done, all);
    let found = references::compute(&job.plan.spec, data, source, &mut score, &mut told)?;
    if engine.world().rank() == 0 {
        references::write(&job.run, &found, tokens)?;
    }
    Ok(found)
}

struct Session<'a, E> {
    engine: E,
    windows: Batch,
    run: Run<'a>,
}

impl<'a, E: Engine> Session<'a, E> {
    fn start(
        job: &'a Job,
        place: RankEnvironment<'a, ()>,
        mut engine: E,
        observer: &mut dyn Observer,
    ) -> Result<Session<'a, E>, RunError> {
        let spec = &job.plan.spec;
        let mut at = Position::default();
        match &job.start {
            Start::Fresh => engine.initialise(job.config.train.seed)?,
            Start::Import(dir) => init(dir, |weights| engine.import(weights))?,
            Start::Resume(dir) => {
                at = resume(dir, |checkpoint| engine.restore(checkpoint))?;
            }
        }
        let files = RunFiles::open(job, engine.world().rank(), &at)?;
        if job.config.has_reference() {
            job.data.keep_references(references_of(job, &mut engine, observer)?);
        }
        let batch = Batch::of(&spec.batch, spec.batch.micro_batch_size * spec.batch.micro_batches);
        let mut windows = Batch::of(&spec.batch, spec.batch.evaluation_rows());
        windows.fill_windows(&spec.batch, engine.part_of_data(), &*job.data)?;
        Ok(Session { engine, windows, run: Run { job, place, files, at, batch } })
    }

    /// Evaluates: the loss, and whether it is the best, so that this state is saved. None when a rank asks to stop meanwhile. A
    /// resumed run begins with such an evaluation.
    fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<Option<(f32, bool)>, RunError> {
        let Run { job, place, files, at, .. } = &mut self.run;
        let stop = || place.stop_requested.load(Ordering::Relaxed);
        let Some(evaluated) = self.engine.evaluate_unless(&self.windows, &stop)? else { return Ok(None) };
        let record = EvaluationRecord::new(at.step, job.data.evaluated(), evaluated, files.stamp());
        let is_best = files.evaluated(&record)?;
        observer.evaluation(&record);
        Ok(Some((record.val_loss, is_best)))
    }

    fn save(&mut self, observer: &mut dyn Observer) -> Result<PathBuf, RunError> {
        let Run { files, at: Position { step, samples, tokens, .. }, .. } = &mut self.run;
        files.before_save()?;
        let state = files.state([*step, *samples, *tokens]);
        let path = self.engine.save_checkpoint(&files.checkpoints(), *step, &state)?;
        files.after_save(*step)?;
        observer.saved(*step, &path);
        Ok(path)
    }

    /// Writes `memory.json`: the measured peak of every rank so far.
    fn write_memory(&mut self) -> Result<(), RunError> {
        let Run { place, files, .. } = &self.run;
        let resident = resident_bytes_peak((place.foreign_bytes)());
        saving::report(&self.engine, |engine| {
            files.write_memory_part(&RankBytes::measured(engine.world().rank(), engine.device(), resident))
        })?;
        files.write_memory(self.engine.world().world_size())
    }
}

impl Engine for Rank {
    fn initialise(&mut self, seed: u64) -> Result<(), RunError> {
        Rank::initialise(self, seed)
    }

    fn import(&mut self, dir: &HuggingFaceDir) -> Result<(), RunError> {
        Rank::import(self, dir)
    }

    fn restore(&mut self, from: &Checkpoint) -> Result<(), RunError> {
        Rank::restore(self, from)
    }

    fn part_of_data(&self) -> usize {
        self.at().data
    }

    /// Runs one step on the next samples.
    fn advance(
        &mut self,
        run: &mut Run,
        observer: &mut dyn Observer,
    ) -> Result<(Option<f32>, bool), RunError> {
        let start = Instant::now();
        let Run { job, place, files, at, batch } = run;
        let (number, plan) = (at.step + 1, &job.plan);
        (place.note_step)(number);
        batch.fill((&plan.spec.batch, plan.spec.mesh.axes), self.at().data, at.samples, &*job.data)?;
        let stop = || place.stop_requested.load(Ordering::Relaxed);
        let outcome = self.step_unless(number, batch, &stop)?;
        let seconds = start.elapsed().as_secs_f64();
        let Outcome { loss, targets, rewards, grad_norm, lr, loss_scale, skipped, stop_requested, .. } =
            outcome;
        let communication = self.groups().take_statistics();
        let tokens = plan.spec.tokens_per_step();
        at.step = number;
        at.samples += job.config.batch.global as u64;
        at.tokens += tokens;
        let [mfu, hfu] = job.utilisations(1.0 / seconds);
        let record = StepRecord {
            step: number,
            loss,
            targets: plan.spec.batch.counts_targets.then_some(targets),
            rewards: rewards.map(RewardRecord::from),
            grad_norm,
            loss_scale,
            skipped,
            lr,
            tokens: at.tokens,
            step_s: seconds,
            tokens_per_s: tokens as f64 / seconds,
            mfu,
            hfu,
            comm_bytes: communication.sent_bytes,
            exposed_comm_s: communication.exposed_s,
            staleness: None,
            at: files.stamp(),
        };
        files.write(&record)?;
        record.observed(outcome.next_loss_scale, observer);
        Ok((Some(loss), stop_requested))
    }

    fn evaluate_unless(
        &mut self,
        windows: &Batch,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<MeanLoss>, CollectiveError> {
        Rank::evaluate_unless(self, windows, stop)
    }

    fn log_probabilities(&mut self, answers: &Batch) -> Result<Vec<f32>, CollectiveError> {
        Rank::log_probabilities(self, answers)
    }

    fn save_checkpoint(&mut self, checkpoints: &Path, step: u64, state: &Value) -> Result<PathBuf, RunError> {
        Rank::save_checkpoint(self, checkpoints, step, state)
    }
}

impl StepRecord {
    /// Tells an observer of the step, and of a change of the loss scale to that of the next step.
    pub fn observed(&self, next_loss_scale: Option<f32>, observer: &mut dyn Observer) {
        observer.step(self);
        if self.targets == Some(0) {
            observer.without_targets(self.step);
        }
        if let Some((from, to)) = self.loss_scale.zip(next_loss_scale)
            && (self.skipped || from != to)
        {
            observer.loss_scale(&ScaleChange { step: self.step, skipped: self.skipped, from, to });
        }
    }
}
