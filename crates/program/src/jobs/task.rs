//! The tasks that a launcher gives to its ranks; [`task_file`](crate::jobs::task_file) brings them there.

use std::path::PathBuf;
use std::time::Duration;

use crate::arguments::train_args::Show;
use phalanx_bench::collectives::CollectivesTask;
use phalanx_collectives::Options;
use phalanx_train::ResolvedConfig;
use phalanx_train::dataset::DataDigests;
use phalanx_train::job::Start;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::jobs::rank_host;

/// The work of a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "task", rename_all = "snake_case")]
pub enum Task {
    /// Train in a run folder.
    Train(TrainTask),
    /// Time steps on random tokens.
    BenchStep(BenchStepTask),
    /// Time steps of one strategy of parallelism.
    BenchStrategy(BenchStepTask),
    /// Time steps under one placement of chunks.
    BenchMemory(BenchStepTask),
    /// Time collectives.
    BenchCollectives(CollectivesTask),
}

impl Task {
    /// The configuration and the model's `config.json`, of a task that is about a run.
    pub fn run(&self) -> Option<(&ResolvedConfig, &Value)> {
        match self {
            Task::Train(TrainTask { config, model, .. })
            | Task::BenchStep(BenchStepTask { config, model, .. })
            | Task::BenchStrategy(BenchStepTask { config, model, .. })
            | Task::BenchMemory(BenchStepTask { config, model, .. }) => Some((config, model)),
            Task::BenchCollectives(_) => None,
        }
    }

    /// Returns whether each rank is bound to cores of its own, if there are enough. Benchmarks measure what training does by default.
    pub fn pin(&self) -> bool {
        !matches!(self, Task::Train(TrainTask { pin: false, .. }))
    }

    /// Time that a rank waits for another, and for which it may be stalled.
    pub fn timeout(&self) -> Duration {
        match self {
            Task::Train(TrainTask { config, .. })
            | Task::BenchStep(BenchStepTask { config, .. })
            | Task::BenchStrategy(BenchStepTask { config, .. })
            | Task::BenchMemory(BenchStepTask { config, .. }) => rank_host::timeout(config),
            Task::BenchCollectives(_) => Options::default().deadline,
        }
    }
}

/// Training in a run folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TrainTask {
    /// The configuration.
    pub config: ResolvedConfig,
    /// The model's `config.json`.
    pub model: Value,
    /// Run folder, whose tokens are there.
    pub run: PathBuf,
    /// A Hugging Face folder to start from.
    pub import: Option<PathBuf>,
    /// A checkpoint to start from.
    pub resume: Option<PathBuf>,
    /// Checksums of the data, which checkpoints keep.
    pub digests: DataDigests,
    /// Output of rank 0.
    pub show: Show,
    /// Peak floating-point operations per second of the threads of all ranks together, in the compute type.
    pub peak_flops_per_s: f64,
    /// True if each rank is bound to cores of its own.
    pub pin: bool,
    /// True if the evaluation after the step of the checkpoint is still to be done.
    pub evaluates_first: bool,
}

impl TrainTask {
    /// The first state of the run.
    pub fn start(&self) -> Start {
        match (&self.resume, &self.import) {
            (Some(checkpoint), _) => Start::Resume(checkpoint.clone()),
            (None, Some(dir)) => Start::Import(dir.clone()),
            (None, None) => Start::Fresh,
        }
    }
}

/// Steps on random tokens, timed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchStepTask {
    /// The configuration.
    pub config: ResolvedConfig,
    /// The model's `config.json`.
    pub model: Value,
    /// Steps before the first that is timed.
    pub warmup: usize,
    /// Steps that are timed.
    pub steps: usize,
}
