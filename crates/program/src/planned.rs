//! A configuration with its plan, and the check that this machine has the memory for it.
//!
//! The arena is planned to the byte. The memory outside of it (code, stacks, packing buffers of the matrix product,
//! windows of files) is an estimate and shown as such. Both together must fit.

use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use phalanx_baselines::asynchronous;
use phalanx_models::Model;
use phalanx_trace::DType;
use phalanx_train::config::{Reduce, Updates};
use phalanx_train::{RankPlan, ResolvedConfig, RunConfig, RunPlan, Spec};

use crate::machine;
use crate::report::bytes;
use crate::resolve::Resolved;

/// Maximum number of dry runs of a block ([`RunConfig::dry_runs`]) for a suggestion, which take 0.1 s to 0.2 s.
const MAX_DRY_RUNS: u128 = 1 << 12;

/// A complete configuration and its plan.
#[derive(Clone)]
pub struct Planned {
    /// The configuration.
    pub config: ResolvedConfig,
    /// The plan of its run.
    pub plan: Arc<RunPlan>,
}

impl Planned {
    /// Plans a resolved configuration; `evaluated` is the number of windows of one evaluation over all ranks.
    ///
    /// # Errors
    /// As for [`Planned::new`].
    pub fn of(resolved: Resolved, evaluated: usize) -> Result<Planned> {
        Planned::new(resolved.config, resolved.model, evaluated)
    }

    /// Plans `config` for `model`; `evaluated` is the number of windows of one evaluation over all ranks.
    ///
    /// # Errors
    /// When the run cannot be planned: an invalid key, or a bug of the engine.
    pub fn new(config: ResolvedConfig, model: Arc<dyn Model>, evaluated: usize) -> Result<Planned> {
        let spec = spec(&config, model, evaluated)?;
        let plan = match config.parallel.updates {
            Updates::Synchronous => RunPlan::new(spec)?,
            Updates::Asynchronous => asynchronous::plan(spec)?,
        };
        Ok(Planned { config, plan: Arc::new(plan) })
    }

    /// The plan of the configuration that `change` modifies.
    ///
    /// # Errors
    /// An invalid configuration.
    pub fn with(&self, change: impl FnOnce(&mut RunConfig)) -> Result<Planned> {
        let config = self.config.with(change)?;
        let spec = &self.plan.spec;
        let evaluated = spec.evaluation_batches * spec.micro_batch_size * spec.mesh.data;
        let whole = evaluated.next_multiple_of(config.micro_batch_size() * config.data());
        Planned::new(config, Arc::clone(&spec.model), whole)
    }

    /// Element type in which matrix products are computed.
    pub fn compute(&self) -> DType {
        self.plan.spec.precision.compute
    }

    /// Bytes that all ranks together need.
    pub fn needed_bytes(&self) -> u64 {
        let outside = outside_bytes(&self.plan.spec);
        let traced: u64 = self.plan.ranks.iter().map(|rank| own_bytes(rank) + outside).sum();
        traced * self.each_stands_for() as u64
    }

    /// Number of ranks that each planned rank represents, including itself.
    pub fn each_stands_for(&self) -> usize {
        self.plan.spec.world_size() / self.plan.ranks.len()
    }

    /// Bytes that the rank with the largest memory needs.
    pub fn needed_by_one(&self) -> u64 {
        let max = self.plan.ranks.iter().map(own_bytes).max().unwrap_or(0);
        max + outside_bytes(&self.plan.spec)
    }

    /// Refuses a run that needs more memory than is available.
    ///
    /// # Errors
    /// The bytes needed and available, and changes that need less.
    pub fn check_memory(&self) -> Result<()> {
        self.check_limit()?;
        let ranks = self.plan.spec.world_size();
        let (needed, Some(available)) = (self.needed_bytes(), machine::available()) else {
            return Ok(());
        };
        if needed > available.bytes {
            bail!(
                "{ranks} rank(s) need {needed} bytes ({}), and {available}; {}",
                bytes(needed),
                self.what_to_change(&|other| other.needed_bytes() <= available.bytes)
            );
        }
        Ok(())
    }

    /// Whether some ranks represent others, because the plan has more ranks than one machine runs.
    pub fn is_for_elsewhere(&self) -> bool {
        self.plan.ranks.len() < self.plan.spec.world_size()
    }

    /// Refuses a rank that needs more than the configuration allows.
    ///
    /// # Errors
    /// As for [`Planned::check_memory`].
    pub fn check_limit(&self) -> Result<()> {
        if let Some(limit) = self.config.memory.limit_mb {
            let limit = (limit * f64::from(1 << 20)) as u64;
            let needed = self.needed_by_one();
            if needed > limit {
                bail!(
                    "a rank needs {needed} bytes ({}), and memory.limit_mb allows {limit} ({}); {}",
                    bytes(needed),
                    bytes(limit),
                    self.what_to_change(&|other| other.needed_by_one() <= limit)
                );
            }
        }
        Ok(())
    }

    /// Advice: a change of the configuration that fits, or else those that need less.
    fn what_to_change(&self, fits: &dyn Fn(&Planned) -> bool) -> String {
        let config = &self.config;
        let micro_batch_size = self.plan.spec.micro_batch_size;
        let mut tried = Vec::new();
        let mut try_change = |words: String, change: &dyn Fn(&mut RunConfig)| {
            if let Ok(other) = self.with(change)
                && other.needed_bytes() < self.needed_bytes()
            {
                tried.push((fits(&other), other.needed_bytes(), words));
            }
        };
        let few = self.smallest_micro();
        let small = move |c: &mut RunConfig| (c.batch.micro, c.parallel.micro_batches) = (Some(few), None);
        let sharded = |c: &mut RunConfig| c.parallel.zero = 3;
        if config.data() > 1 && config.parallel.zero < 3 {
            try_change("parallel.zero=3".into(), &sharded);
        }
        if micro_batch_size > few {
            try_change(format!("batch.micro={few}"), &small);
        }
        if config.data() > 1 {
            let half = config.data() / 2;
            try_change(format!("parallel.data={half}"), &move |c| {
                (c.parallel.ranks, c.parallel.data) = (None, Some(half));
            });
            try_change(format!("parallel.zero=3 with batch.micro={few}"), &move |c| {
                sharded(c);
                small(c);
            });
        }
        tried.sort();
        let describe = |(_, needed, words): &(bool, u64, String)| format!("{words} needs {}", bytes(*needed));
        match tried.iter().find(|(fits, ..)| *fits) {
            Some(first) => format!("change the configuration: {}", describe(first)),
            None if tried.is_empty() => "make the model, model.seq or the batch smaller".to_string(),
            None => {
                let all: Vec<String> = tried.iter().map(describe).collect();
                format!("not even these fit: {}; make the model or model.seq smaller", all.join(", "))
            }
        }
    }

    /// The smallest micro-batch that is planned quickly: 1, unless that makes very many micro-batches.
    fn smallest_micro(&self) -> usize {
        let (spec, micro_batch_size) = (&self.plan.spec, self.plan.spec.micro_batch_size);
        let runs = |few: usize| {
            let mut config = RunConfig::clone(&self.config);
            (config.batch.micro, config.parallel.micro_batches) = (Some(few), None);
            config.dry_runs(spec.mesh, &spec.model.shape())
        };
        let mut divisors = (1..micro_batch_size).filter(|few| micro_batch_size.is_multiple_of(*few));
        divisors.find(|few| runs(*few) <= MAX_DRY_RUNS).unwrap_or(micro_batch_size)
    }

    /// The plan with the other value of `batch.reduce`, for a run that accumulates micro-batches.
    pub fn other_reduce(&self) -> Option<Planned> {
        if self.plan.spec.micro_batches < 2 || self.plan.spec.mesh.data < 2 {
            return None;
        }
        let other = match self.config.batch.reduce {
            Reduce::Each => Reduce::Defer,
            Reduce::Defer => Reduce::Each,
        };
        self.with(|config| config.batch.reduce = other).ok()
    }
}

/// The specification of a run of `model`; `evaluated` as for [`Planned::new`].
///
/// # Errors
/// When there is no chunk layout, cut into stages or mesh for the model.
pub fn spec(config: &RunConfig, model: Arc<dyn Model>, evaluated: usize) -> Result<Spec> {
    let threads = config.train.threads.unwrap_or_else(|| machine::threads_per_rank(config.world_size()));
    // The error message already includes its cause.
    Spec::new(config, model, evaluated, threads).map_err(|error| anyhow!("{error}"))
}

/// Bytes that a rank plans in its two memories, both of which are memory of this machine.
fn own_bytes(rank: &RankPlan) -> u64 {
    rank.memory.arena_bytes + rank.host.arena_bytes
}

/// Estimated bytes that one rank takes besides its arena: the program and its tables; for each thread a stack
/// and buffers for packed matrices; windows through which files pass; the batches on the host.
pub fn outside_bytes(spec: &Spec) -> u64 {
    const PROGRAM: u64 = 12 << 20;
    const THREAD: u64 = 6 << 20;
    const WINDOWS: u64 = 4 << 20;
    let rows = spec.micro_batch_size * (spec.micro_batches + spec.evaluation_batches);
    PROGRAM + WINDOWS + THREAD * spec.threads as u64 + 8 * (rows * spec.seq) as u64
}
