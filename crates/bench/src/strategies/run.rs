//! Runs one way: plans it, refuses what does not fit, starts its ranks, collects what they measured.

use std::sync::Arc;

use anyhow::Result;
use phalanx_baselines::data_parallel::{DataParallel, DataParallelPlan};
use phalanx_collectives::Isa;
use phalanx_models::Model;
use phalanx_plan::{Costs, simulate};
use phalanx_train::{RunConfig, Spec, stage_costs};

use super::ranks::{self, RankFigures};
use super::way::Way;
use crate::steps::StepCounts;

/// What every way has in common.
pub struct Bench<'a> {
    /// Complete; its [parallel] is replaced by each way.
    pub config: RunConfig,
    /// What is trained.
    pub model: Arc<dyn Model>,
    /// Ranks.
    pub ranks: usize,
    /// Threads of all ranks together.
    pub threads: usize,
    /// Steps before the first that is timed.
    pub warmup: usize,
    /// Steps that are timed.
    pub steps: usize,
    /// Starts the ranks.
    pub launcher: &'a dyn Launcher,
}

/// What the comparison needs of the program around it, which starts processes and knows the machine.
pub trait Launcher {
    /// The instruction set with which ranks compute and sum.
    fn isa(&self) -> Isa;

    /// Plans a checked configuration, refuses it where it does not fit into memory, and measures steps on all of its
    /// ranks: what was planned, and the figures by rank.
    ///
    /// # Errors
    /// A plan that cannot be made or does not fit, a rank that died.
    fn measure(
        &self,
        config: RunConfig,
        model: Arc<dyn Model>,
        counts: StepCounts,
    ) -> Result<(Spec, Vec<RankFigures>)>;

    /// Refuses devices of one process that need more memory than the machine has.
    ///
    /// # Errors
    /// With the bytes needed and available.
    fn check_memory(&self, plan: &DataParallelPlan) -> Result<()>;

    /// Refuses to go on after a signal.
    ///
    /// # Errors
    /// When a signal came.
    fn check_signals(&self) -> Result<()>;
}

/// One way as it ran.
#[derive(Clone, Debug)]
pub struct Ran {
    /// By rank, or by device of the one process.
    pub ranks: Vec<RankFigures>,
    /// Micro-batches of a step on a rank.
    pub micro_batches: usize,
    /// Idle part of a pipeline's time, simulated with the operations of each stage.
    pub bubble: Option<f64>,
}

/// One way, and what became of it.
#[derive(Clone, Debug)]
pub struct Row {
    /// Which.
    pub way: Way,
    /// Ranks or devices.
    pub ranks: usize,
    /// Threads of each.
    pub threads: usize,
    /// Figures, or why there are none.
    pub ran: Result<Ran, String>,
}

impl Bench<'_> {
    /// Runs one way. What goes wrong is in the row.
    ///
    /// # Errors
    /// A signal that came meanwhile.
    pub fn row(&self, way: Way) -> Result<Row> {
        let config = way.configure(&self.config, self.ranks, self.threads);
        let threads = config.train.threads.unwrap_or(1);
        let ran = match way {
            Way::DataParallel | Way::DataParallelLoss => {
                self.data_parallel(config, way == Way::DataParallelLoss)
            }
            _ => self.ranks(config),
        };
        self.launcher.check_signals()?;
        let ran = ran.map_err(|error| format!("{error:#}"));
        Ok(Row { way, ranks: way.devices(self.ranks), threads, ran })
    }

    /// A configuration whose ranks are processes, or one rank in this process.
    ///
    /// # Errors
    /// What cannot work or does not fit, a rank that died.
    pub fn ranks(&self, config: RunConfig) -> Result<Ran> {
        config.check()?;
        let counts = self.counts(&config);
        let (spec, ranks) = self.launcher.measure(config, Arc::clone(&self.model), counts)?;
        let costs = || Costs { stages: stage_costs(&spec), message: 0.0 };
        let bubble = (spec.mesh.pipeline > 1).then(|| simulate(&spec.schedule, &costs()).bubble_fraction());
        Ok(Ran { ranks, micro_batches: spec.micro_batches, bubble })
    }

    fn counts(&self, config: &RunConfig) -> StepCounts {
        StepCounts { seed: config.train.seed, warmup: self.warmup, steps: self.steps }
    }

    /// Devices of this process.
    fn data_parallel(&self, config: RunConfig, loss_in_forward: bool) -> Result<Ran> {
        config.check()?;
        let threads = config.train.threads.unwrap_or(1);
        let spec = Spec::new(&config, Arc::clone(&self.model), 0, threads)?;
        let plan = DataParallel::plan(&spec, self.ranks, loss_in_forward)?;
        self.launcher.check_memory(&plan)?;
        let ranks = ranks::data_parallel(&plan, self.launcher.isa(), self.counts(&config))?;
        Ok(Ran { ranks, micro_batches: 1, bubble: None })
    }
}
