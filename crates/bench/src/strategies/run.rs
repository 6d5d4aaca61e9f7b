//! Runs one strategy: plans it, checks that it fits into memory, starts its ranks and collects their figures.

use std::sync::Arc;

use crate::baselines::data_parallel::{DataParallel, DataParallelPlan};
use anyhow::Result;
use phalanx_collectives::Isa;
use phalanx_models::Model;
use phalanx_plan::{Costs, simulate};
use phalanx_train::config::{Float, PrecisionConfig};
use phalanx_train::{ResolvedConfig, RunConfig, Spec};

use super::ranks::{self, RankFigures};
use super::strategy::Strategy;
use crate::steps::StepCounts;

/// The settings that all strategies share.
pub struct Bench<'a> {
    /// The complete configuration; each strategy replaces its table `[parallel]`.
    pub config: ResolvedConfig,
    /// The model.
    pub model: Arc<dyn Model>,
    /// Number of ranks.
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

/// Services that the comparison needs from the program, which starts processes and knows the machine.
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

/// The figures of a strategy that ran.
#[derive(Clone, Debug)]
pub struct StrategyFigures {
    /// Figures by rank, or by device of the one process.
    pub ranks: Vec<RankFigures>,
    /// Micro-batches of a step on a rank.
    pub micro_batches: usize,
    /// Idle fraction of a pipeline, simulated with the operations of each stage.
    pub bubble: Option<f64>,
}

/// One strategy with its figures, or the reason why it did not run.
#[derive(Clone, Debug)]
pub struct StrategyRun {
    /// The strategy.
    pub strategy: Strategy,
    /// Ranks or devices.
    pub ranks: usize,
    /// Threads of each.
    pub threads: usize,
    /// The figures, or the reason why there are none.
    pub ran: Result<StrategyFigures, String>,
}

impl Bench<'_> {
    /// Runs one strategy. A strategy that fails is returned with its reason.
    ///
    /// # Errors
    /// A signal that came meanwhile.
    pub fn row(&self, strategy: Strategy) -> Result<StrategyRun> {
        self.run(strategy, strategy.configure(&self.config, self.ranks, self.threads))
    }

    /// Runs a strategy once more in another precision: a run in f32 in bf16, and others in f32.
    ///
    /// # Errors
    /// A signal that came meanwhile.
    pub fn in_other_precision(&self, strategy: Strategy) -> Result<StrategyRun> {
        let mut config = strategy.configure(&self.config, self.ranks, self.threads);
        let compute = match config.precision.compute {
            Float::F32 => Float::Bf16,
            Float::Bf16 | Float::F16 => Float::F32,
        };
        config.precision = PrecisionConfig { compute, ..PrecisionConfig::default() };
        self.run(strategy, config)
    }

    fn run(&self, strategy: Strategy, config: RunConfig) -> Result<StrategyRun> {
        let threads = config.train.threads.unwrap_or(1);
        let ran = match strategy {
            Strategy::DataParallel | Strategy::DataParallelLoss => {
                self.data_parallel(config, strategy == Strategy::DataParallelLoss)
            }
            _ => self.ranks(config),
        };
        self.launcher.check_signals()?;
        let ran = ran.map_err(|error| format!("{error:#}"));
        Ok(StrategyRun { strategy, ranks: strategy.devices(self.ranks), threads, ran })
    }

    /// Runs a configuration whose ranks are processes, or one rank in this process.
    ///
    /// # Errors
    /// If the configuration is invalid or does not fit into memory, or if a rank died.
    pub fn ranks(&self, config: RunConfig) -> Result<StrategyFigures> {
        config.check()?;
        let counts = self.counts(&config);
        let (spec, ranks) = self.launcher.measure(config, Arc::clone(&self.model), counts)?;
        let costs = || Costs { stages: spec.stage_costs(), message: 0.0 };
        let bubble = (spec.mesh.axes.pipeline > 1)
            .then(|| simulate(&spec.pipeline.schedule, &costs()).bubble_fraction());
        Ok(StrategyFigures { ranks, micro_batches: spec.batch.micro_batches, bubble })
    }

    fn counts(&self, config: &RunConfig) -> StepCounts {
        StepCounts { seed: config.train.seed, warmup: self.warmup, steps: self.steps }
    }

    /// Runs the devices of this process.
    fn data_parallel(&self, config: RunConfig, loss_in_forward: bool) -> Result<StrategyFigures> {
        config.check()?;
        let threads = config.train.threads.unwrap_or(1);
        let spec = Spec::new(&config, Arc::clone(&self.model), 0, threads)?;
        let plan = DataParallel::plan(&spec, self.ranks, loss_in_forward)?;
        self.launcher.check_memory(&plan)?;
        let ranks = ranks::data_parallel(&plan, self.launcher.isa(), self.counts(&config))?;
        Ok(StrategyFigures { ranks, micro_batches: 1, bubble: None })
    }
}
