//! The run that all ranks train together.

use std::path::PathBuf;
use std::sync::Arc;

use crate::config::ResolvedConfig;
use crate::data::dataset::DataDigests;
use crate::data::source::DataSource;
use crate::planner::planning::RunPlan;

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

/// State that all ranks of a run share.
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
    /// True if the evaluation after the step of this state is still to be done.
    pub evaluates_first: bool,
    /// Peak operations per second of all ranks together, in the compute type; None leaves utilisation out of the
    /// metrics.
    pub peak_flops_per_s: Option<f64>,
}

impl Job {
    /// Utilisation of the peak at so many steps per second: by the operations of the model, and, where they are more, by those that
    /// are executed.
    pub fn utilisations(&self, steps_per_s: f64) -> [Option<f64>; 2] {
        let of = |flops: u128| self.peak_flops_per_s.map(|peak| flops as f64 * steps_per_s / peak);
        let (model, executed) = (self.plan.model_flops_per_step(), self.plan.flops_per_step());
        [of(model), of(executed).filter(|_| executed != model)]
    }
}
