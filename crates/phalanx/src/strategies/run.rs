//! Runs one way: plans it, refuses what does not fit, starts its ranks, collects what they measured.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use phalanx_models::Model;
use phalanx_plan::{Costs, simulate};
use phalanx_train::older::data_parallel::DataParallel;
use phalanx_train::{ResolvedConfig, RunConfig, stage_costs};

use super::ranks::{self, RankFigures};
use super::way::Way;
use crate::environment::Environment;
use crate::launch::{Output, RankProcesses};
use crate::machine;
use crate::planned::{self, Planned};
use crate::rank_host::RankHost;
use crate::report::bytes;
use crate::signals::Signals;
use crate::task::{BenchStepTask, Task};

/// What every way has in common.
pub struct Bench<'a> {
    /// The configuration; its [parallel] is replaced by each way.
    pub config: ResolvedConfig,
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
    /// How kernels compute.
    pub environment: Environment,
    /// Of this process.
    pub signals: &'a Signals,
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
        self.check_signals()?;
        let ran = ran.map_err(|error| format!("{error:#}"));
        Ok(Row { way, ranks: way.devices(self.ranks), threads, ran })
    }

    /// # Errors
    /// When a signal came.
    pub fn check_signals(&self) -> Result<()> {
        if self.signals.came() {
            bail!("stopped by a signal before all was measured; nothing was written");
        }
        Ok(())
    }

    /// A configuration whose ranks are processes, or one rank in this process.
    ///
    /// # Errors
    /// What cannot work or does not fit, a rank that died.
    pub fn ranks(&self, config: RunConfig) -> Result<Ran> {
        let planned = Planned::new(ResolvedConfig::new(config)?, Arc::clone(&self.model), 0)?;
        planned.check_memory()?;
        let spec = &planned.plan.spec;
        let task = BenchStepTask {
            config: planned.config.clone(),
            model: spec.model.to_config(),
            warmup: self.warmup,
            steps: self.steps,
        };
        let ranks = match spec.world() {
            1 => vec![ranks::steps(&task, &planned, &RankHost::Alone, self.environment)?],
            world => {
                let processes = RankProcesses::start(
                    world,
                    &Task::BenchStrategy(task),
                    Some(&planned.plan),
                    &Output::Gathered,
                )?;
                let lines = processes.wait(self.signals)?;
                let parse = |line: &String| serde_json::from_str(line).context("the figures of a rank");
                lines.iter().map(parse).collect::<Result<Vec<RankFigures>>>()?
            }
        };
        let costs = || Costs { stages: stage_costs(spec), message: 0.0 };
        let bubble = (spec.mesh.pipeline > 1).then(|| simulate(&spec.schedule, &costs()).bubble_fraction());
        Ok(Ran { ranks, micro_batches: spec.micro_batches, bubble })
    }

    /// Devices of this process.
    fn data_parallel(&self, config: RunConfig, loss_in_forward: bool) -> Result<Ran> {
        config.check()?;
        let spec = planned::spec(&config, Arc::clone(&self.model), 0)?;
        let plan = DataParallel::plan(&spec, self.ranks, loss_in_forward)?;
        let outside = planned::outside_bytes(&spec);
        let needed: u64 = plan.memory.iter().map(|memory| memory.arena_bytes + outside).sum();
        if let Some(available) = machine::available().filter(|available| needed > available.bytes) {
            bail!(
                "{} devices need {needed} bytes ({}), and {available}; make the model, model.seq or the batch smaller",
                self.ranks,
                bytes(needed)
            );
        }
        let ranks = ranks::data_parallel(&plan, &config, self.warmup, self.steps)?;
        Ok(Ran { ranks, micro_batches: 1, bubble: None })
    }
}
