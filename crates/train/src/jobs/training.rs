//! Training from Rust, without a run folder: a specification, a source of samples, and a number of steps.

use std::sync::Arc;

use phalanx_collectives::Endpoint;
use phalanx_plan::Mesh;
use phalanx_tensor::disk::survey_folders;
use phalanx_tensor::{DeviceFactory, IGNORED};

use crate::data::source::DataSource;
use crate::engine::error::RunError;
use crate::engine::rank::{Batch, Rank};
use crate::engine::spec::{BatchPart, Spec};
use crate::engine::step::Outcome;
use crate::jobs::on_ranks::{on_endpoint, on_noticing_threads};
use crate::jobs::references;
use crate::jobs::run::init;
use crate::planner::planning::{PlanError, RunPlan};

/// A planned training run.
pub struct Training {
    plan: Arc<RunPlan>,
    data: Box<dyn DataSource>,
    steps: u64,
    notice: Notice,
}

/// Receives lines for the user.
type Notice = Arc<dyn Fn(&str) + Send + Sync>;

impl Training {
    /// Plans `steps` steps of the run that `spec` describes, on samples of `data`. There is no evaluation: the windows of
    /// `data` are not used, and [`Rank::evaluate`] takes those of the caller.
    ///
    /// # Errors
    /// When ranks disagree, a collective is missing or misplaced, or a phase does not free what it must: a mistake in a
    /// layer or model of the caller's own.
    pub fn new(spec: Spec, data: impl DataSource + 'static, steps: u64) -> Result<Training, PlanError> {
        let spec = if data.leaves_out_targets() { spec.counting_targets() } else { spec };
        Ok(Training {
            plan: Arc::new(RunPlan::new(spec)?),
            data: Box::new(data),
            steps,
            notice: Arc::new(|_| ()),
        })
    }

    /// The same, where `notice` is called with each line that a user should read: why chunks are larger than they were asked to be,
    /// what is slower than it could be where disk memory lies, and ranks for which others wait long. Without it, nothing is said.
    #[must_use]
    pub fn with_notices(self, notice: impl Fn(&str) + Send + Sync + 'static) -> Training {
        Training { notice: Arc::new(notice), ..self }
    }

    /// The plan: the memory of every rank, and the operations of a step.
    pub fn plan(&self) -> &RunPlan {
        &self.plan
    }

    /// Trains all ranks as threads of this process; returns the losses of each rank's steps.
    ///
    /// # Errors
    /// Those of the system, when it does not have the memory or the disk space of the plan, or starts no more threads; as a
    /// rank's result those of its steps.
    pub fn on_threads(
        &self,
        factory: &dyn DeviceFactory,
    ) -> std::io::Result<Vec<Result<Vec<f32>, RunError>>> {
        let notes = self.plan.disk_notes()?;
        self.plan.spec.chunk_note().iter().chain(&notes).for_each(|note| (self.notice)(note));
        on_noticing_threads(factory, &self.plan, &self.notice, |rank| self.train(rank, |_, _| {}))
    }

    /// Trains one rank of a job, in its process; returns the losses of its steps, which are the same on all ranks.
    ///
    /// # Errors
    /// Memory that the system does not give, and the errors of the steps.
    pub fn on_rank(&self, factory: &dyn DeviceFactory, endpoint: &Endpoint) -> Result<Vec<f32>, RunError> {
        if endpoint.rank() == 0 {
            let disk = self.plan.used_disk().map(survey_folders).transpose().map_err(RunError::Memory)?;
            let notes = disk.map_or(Vec::new(), |survey| survey.notes);
            self.plan.spec.chunk_note().iter().chain(&notes).for_each(|note| (self.notice)(note));
        }
        let note = |step| endpoint.note(step);
        let trained = on_endpoint(factory, &self.plan, endpoint, |rank| self.steps(rank, note, |_, _| {}));
        trained.map_err(RunError::Memory)?
    }

    /// Fills the parameters of `rank` with initial values, or with the weights of `ModelPart::init`, and runs all steps; calls `after_step`
    /// after each, which may save a checkpoint.
    ///
    /// # Errors
    /// Weights that cannot be imported, samples that the source does not have, and the errors of [`Rank::step`].
    pub fn train(
        &self,
        rank: &mut Rank,
        after_step: impl FnMut(&mut Rank, &Outcome),
    ) -> Result<Vec<f32>, RunError> {
        self.steps(rank, |_| (), after_step)
    }

    /// As [`Training::train`]; calls `before_step` with the number of each step that begins.
    fn steps(
        &self,
        rank: &mut Rank,
        before_step: impl Fn(u64),
        mut after_step: impl FnMut(&mut Rank, &Outcome),
    ) -> Result<Vec<f32>, RunError> {
        let spec = &self.plan.spec;
        match &spec.model.init {
            None => rank.initialise(spec.model.seed)?,
            Some(dir) => init(dir, |weights| rank.import(weights))?,
        }
        if spec.model.preference.is_some_and(|preference| preference.kind.has_reference()) {
            let data = rank.at().data;
            let mut score = |answers: &Batch| rank.log_probabilities(answers);
            let found = references::compute(spec, data, &*self.data, &mut score, &mut |_| ())?;
            self.data.keep_references(found);
        }
        let mut batch = Batch::of(&spec.batch, spec.batch.micro_batch_size * spec.batch.micro_batches);
        let samples = (spec.batch.micro_batch_size * spec.batch.micro_batches * spec.mesh.axes.data) as u64;
        let mut losses = Vec::with_capacity(self.steps as usize);
        for step in 1..=self.steps {
            before_step(step);
            batch.fill((&spec.batch, spec.mesh.axes), rank.at().data, (step - 1) * samples, &*self.data)?;
            let outcome = rank.step(step, &batch, false)?;
            losses.push(outcome.loss);
            if outcome.targets == 0 && rank.group().rank() == 0 {
                (self.notice)(&without_targets(step));
            }
            after_step(rank, &outcome);
        }
        Ok(losses)
    }
}

/// Message about a step whose batch has no target.
pub fn without_targets(step: u64) -> String {
    format!(
        "step {step}: every target of its batch is left out (IGNORED), so it has no loss and changes nothing"
    )
}

impl Batch {
    /// Reads the samples of data-parallel rank `data`, where `position` samples of the run come before the batch.
    ///
    /// [`BatchPart::first_sample`] says which.
    ///
    /// # Errors
    /// Those of the source.
    pub fn fill(
        &mut self,
        (part, axes): (&BatchPart, Mesh),
        data: usize,
        position: u64,
        source: &dyn DataSource,
    ) -> Result<(), phalanx_data::DataError> {
        let rows = part.micro_batches * part.micro_batch_size;
        for m in 0..part.micro_batches {
            for row in 0..part.micro_batch_size {
                let position = position + (part.first_sample(axes, m, data) + row) as u64;
                let at = m * part.micro_batch_size + row;
                let [tokens, targets] = sample([&mut self.tokens, &mut self.targets], at, rows);
                source.sample(position, tokens, targets)?;
                for (name, numbers) in &mut self.others {
                    source.input(position, name, numbers.sample(at, rows))?;
                }
            }
        }
        Ok(())
    }

    /// Reads the evaluation windows of data-parallel rank `data`: the `data`-th part of all windows, one for each row of
    /// the batch. Rows beyond the last window have no target.
    ///
    /// # Errors
    /// Those of the source.
    pub fn fill_windows(
        &mut self,
        part: &BatchPart,
        data: usize,
        source: &dyn DataSource,
    ) -> Result<(), phalanx_data::DataError> {
        let rows = self.rows(part);
        for row in 0..rows {
            let [tokens, targets] = sample([&mut self.tokens, &mut self.targets], row, rows);
            match data * rows + row {
                window if window < source.evaluated() => {
                    source.window(window, tokens, targets)?;
                    for (name, numbers) in &mut self.others {
                        source.window_input(window, name, numbers.sample(row, rows))?;
                    }
                }
                _ => {
                    tokens.fill(0);
                    targets.fill(IGNORED);
                }
            }
        }
        Ok(())
    }
}

/// Sample `row` of `rows` of tokens and of targets, each empty where the model does not read it.
fn sample([tokens, targets]: [&mut [u32]; 2], row: usize, rows: usize) -> [&mut [u32]; 2] {
    [tokens, targets].map(|ids| {
        let each = ids.len() / rows;
        &mut ids[row * each..(row + 1) * each]
    })
}
