//! What a launcher tells its ranks to do; [`task_file`](crate::task_file) is how.

use std::path::PathBuf;
use std::time::Duration;

use phalanx_collectives::Options;
use phalanx_train::ResolvedConfig;
use phalanx_train::dataset::DataDigests;
use phalanx_train::run::Start;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::rank_host;

/// The work of a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "task", rename_all = "snake_case")]
pub enum Task {
    /// Train in a run folder.
    Train(TrainTask),
    /// Time steps on random tokens.
    BenchStep(BenchStepTask),
    /// Time steps of one way of parallelism among several.
    BenchStrategy(BenchStepTask),
    /// Time collectives.
    BenchCollectives(BenchCollectivesTask),
}

impl Task {
    /// The configuration and the model's `config.json`, of a task that is about a run.
    pub fn run(&self) -> Option<(&ResolvedConfig, &Value)> {
        match self {
            Task::Train(TrainTask { config, model, .. })
            | Task::BenchStep(BenchStepTask { config, model, .. })
            | Task::BenchStrategy(BenchStepTask { config, model, .. }) => Some((config, model)),
            Task::BenchCollectives(_) => None,
        }
    }

    /// How long a rank waits for another, and how long it may stand still.
    pub fn timeout(&self) -> Duration {
        match self {
            Task::Train(TrainTask { config, .. })
            | Task::BenchStep(BenchStepTask { config, .. })
            | Task::BenchStrategy(BenchStepTask { config, .. }) => rank_host::timeout(config),
            Task::BenchCollectives(_) => Options::default().deadline,
        }
    }
}

/// See [`Task::Train`].
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
    /// What rank 0 shows on the way.
    pub show: Show,
    /// What the threads of all ranks together are capable of, in the compute type.
    pub peak_flops_per_s: f64,
}

/// What a training run shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Show {
    /// Plan, progress, and how it ended: for people.
    Progress,
    /// The lines of `metrics.jsonl` on standard output, and one line at the end: for scripts.
    Json,
    /// Errors only.
    Nothing,
}

impl TrainTask {
    /// What to start from.
    pub fn start(&self) -> Start {
        match (&self.resume, &self.import) {
            (Some(checkpoint), _) => Start::Resume(checkpoint.clone()),
            (None, Some(dir)) => Start::Import(dir.clone()),
            (None, None) => Start::Fresh,
        }
    }
}

/// See [`Task::BenchStep`].
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

/// See [`Task::BenchCollectives`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchCollectivesTask {
    /// Operations, one after another, each with all sizes.
    pub ops: Vec<phalanx_trace::CollectiveOp>,
    /// Type of the elements.
    pub dtype: phalanx_trace::DType,
    /// Bytes of the whole buffer.
    pub bytes: Vec<usize>,
}
