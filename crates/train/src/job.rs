//! The run that all ranks train together.

use std::path::PathBuf;
use std::sync::Arc;

use crate::config::ResolvedConfig;
use crate::dataset::DataDigests;
use crate::planning::RunPlan;
use crate::source::DataSource;

/// The initial state of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Start {
    /// Initial values from the seed.
    Fresh,
    /// Weights of a Hugging Face directory.
    Import(PathBuf),
    /// A checkpoint folder.
    Resume(PathBuf),
}

/// What all ranks of a run share.
pub struct Job {
    /// The configuration, checked and complete.
    pub config: ResolvedConfig,
    /// The plan of the run.
    pub plan: Arc<RunPlan>,
    /// The samples of the run.
    pub data: Box<dyn DataSource>,
    /// The run folder.
    pub run: PathBuf,
    /// Checksums of the data, which checkpoints store.
    pub digests: DataDigests,
    /// The initial state.
    pub start: Start,
    /// Whether the evaluation after the step of this state is still to be done.
    pub evaluates_first: bool,
    /// Peak operations per second of all ranks together, in the compute type; None leaves utilisation out of the
    /// metrics.
    pub peak_flops_per_s: Option<f64>,
}
