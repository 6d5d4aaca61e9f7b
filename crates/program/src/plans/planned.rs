//! A configuration with its plan, and what a run of it needs.
//!
//! The arena is planned to the byte. The memory outside of it (code, stacks, packing buffers of the matrix product,
//! windows of files) is an estimate and shown as such. Both together must fit.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use phalanx_bench::baselines::asynchronous;
use phalanx_collectives::{Connections, Hosts, transport_bytes};
use phalanx_cuda::DRIVER_HOST_BYTES;
use phalanx_models::Model;
use phalanx_parallel::zero::ChunkResidence;
use phalanx_plan::slot::Slot;
use phalanx_plan::trace::DType;
use phalanx_train::config::{DeviceKind, PlacementRule, Reduce, Updates};
use phalanx_train::planning::{BudgetError, PlanError, min_device_states};
use phalanx_train::spec::{BatchPart, DevicePart};
use phalanx_train::{RankPlan, ResolvedConfig, RunConfig, RunPlan, Spec};

use crate::host::card_needs::CardNeeds;
use crate::host::{busy, machine};
use crate::plans::placement_budget;
use crate::plans::resolve::Resolved;
use phalanx_drawing::report;

/// Runs of a block over a micro-batch in the dry runs of one plan, at most, for a change that is only tried.
const MAX_DRY_RUNS: u128 = 1 << 14;

/// Tiles of states in such a plan, at most: of 32G parameters by default.
const MAX_TILES: u64 = 1 << 13;

/// A complete configuration and its plan.
#[derive(Clone)]
pub struct Planned {
    /// The configuration.
    pub config: ResolvedConfig,
    /// The plan of its run.
    pub plan: Arc<RunPlan>,
    /// Layout of its ranks on several hosts, if they are on several.
    across: Option<Across>,
    /// Seconds of processor time that planning took.
    pub took_s: f64,
}

/// Properties of a plan that are known before it is made.
#[derive(Clone, Copy, Debug)]
pub struct Outlook {
    /// Bytes of a rank's states that lie on its device.
    pub states: u64,
    /// Runs of a block over a micro-batch in its dry runs.
    pub dry_runs: u128,
}

/// Predicate that is true if a plan is not worth making.
pub type IsHopeless<'a> = dyn Fn(&Spec, Outlook) -> bool + 'a;

/// Makes the plan of a synchronous run, with offsets or without.
pub type MakePlan = fn(Spec) -> Result<RunPlan, PlanError>;

/// Ranks on several hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Across {
    /// Which ranks run on which host.
    pub hosts: Hosts,
    /// Largest number of ranks that one machine runs.
    pub ranks_of_a_machine: usize,
    /// Connections between them.
    pub connections: Connections,
}

impl Across {
    /// The hosts that so many ranks take: as many on each as it can run, in their order. None for more than all can run, which are
    /// refused later.
    fn hosts_of(&self, world_size: usize) -> Option<Hosts> {
        let mut left = world_size;
        let sizes = (0..self.hosts.len()).map(|host| {
            let ranks = self.hosts.ranks(host).len().min(left);
            left -= ranks;
            ranks
        });
        let sizes: Vec<usize> = sizes.filter(|ranks| *ranks > 0).collect();
        (left == 0).then(|| Hosts::new(sizes))
    }
}

/// Runs of a block over a micro-batch in the dry runs of a step.
fn dry_runs(config: &RunConfig, spec: &Spec) -> u128 {
    config.dry_runs(spec.mesh.axes, (spec.model.whole().uses.len(), spec.model.definition.vocab()))
}

impl Planned {
    /// Plans a resolved configuration; `evaluated` is the number of windows of one evaluation over all ranks.
    ///
    /// # Errors
    /// When the engine cannot be planned: a key that means nothing, or a fault of the engine.
    pub fn of(resolved: Resolved, evaluated: usize) -> Result<Planned> {
        Planned::new(resolved.config, resolved.model, evaluated)
    }

    /// Plans `config` for `model`; `evaluated` is the number of windows of one evaluation over all ranks.
    ///
    /// # Errors
    /// As for [`Planned::of`].
    pub fn new(config: ResolvedConfig, model: Arc<dyn Model>, evaluated: usize) -> Result<Planned> {
        Planned::told(RunPlan::new, config, model, evaluated)
    }

    /// Like [`Planned::of`], for a plan that is only looked at: it has no offsets, so that no run can replay it.
    ///
    /// # Errors
    /// As for [`Planned::of`].
    pub fn to_show(resolved: Resolved, evaluated: usize) -> Result<Planned> {
        Planned::told(RunPlan::without_offsets, resolved.config, resolved.model, evaluated)
    }

    /// A plan that a user asked for: where a budget is too small, the error names one that was planned.
    fn told(
        synchronous: MakePlan,
        config: ResolvedConfig,
        model: Arc<dyn Model>,
        evaluated: usize,
    ) -> Result<Planned> {
        let error = match Planned::by(synchronous, config.clone(), Arc::clone(&model), evaluated) {
            Ok(planned) => return Ok(planned),
            Err(error) => error,
        };
        match error.downcast::<PlanError>()? {
            PlanError::Budget(error) => {
                let error = RunPlan::with_budgets_that_do(&spec(&config, model, evaluated)?, error);
                Err(of_filled_budget(error, &config))
            }
            error => Err(error.into()),
        }
    }

    fn by(
        synchronous: MakePlan,
        config: ResolvedConfig,
        model: Arc<dyn Model>,
        evaluated: usize,
    ) -> Result<Planned> {
        let before_s = busy::own_s();
        let spec = spec(&config, model, evaluated)?;
        let plan = match config.parallel.updates {
            Updates::Synchronous => synchronous(spec)?,
            Updates::Asynchronous => asynchronous::plan(spec)?,
        };
        Ok(Planned { config, plan: Arc::new(plan), across: None, took_s: busy::own_s() - before_s })
    }

    /// The plan of another run, to look at: its configuration differs in what `change` does.
    ///
    /// # Errors
    /// An invalid configuration.
    pub fn with(&self, change: impl FnOnce(&mut RunConfig)) -> Result<Planned> {
        self.again(change, RunPlan::without_offsets)
    }

    /// The plan of another run, made by `make`: its configuration differs in what `change` does.
    ///
    /// # Errors
    /// An invalid configuration, a budget that is too small.
    pub fn again(&self, change: impl FnOnce(&mut RunConfig), make: MakePlan) -> Result<Planned> {
        let (config, evaluated) = self.changed(change)?;
        let model = Arc::clone(&self.plan.spec.model.definition);
        Ok(Planned::by(make, config, model, evaluated)?.across(self.across.clone()))
    }

    /// As [`Planned::with`]; `None` where it `is_hopeless`, or where the plan would take long.
    ///
    /// # Errors
    /// An invalid configuration.
    pub fn again_within(
        &self,
        change: impl FnOnce(&mut RunConfig),
        is_hopeless: &IsHopeless,
    ) -> Result<Option<Planned>> {
        let (config, evaluated) = self.changed(change)?;
        let planned =
            Planned::within(config, Arc::clone(&self.plan.spec.model.definition), evaluated, is_hopeless)?;
        Ok(planned.map(|planned| planned.across(self.across.clone())))
    }

    /// As [`Planned::to_show`], under the conditions of [`Planned::again_within`].
    ///
    /// # Errors
    /// As for [`Planned::of`].
    pub fn within(
        config: ResolvedConfig,
        model: Arc<dyn Model>,
        evaluated: usize,
        is_hopeless: &IsHopeless,
    ) -> Result<Option<Planned>> {
        let spec = spec(&config, Arc::clone(&model), evaluated)?;
        let all_on_device = spec.placement == PlacementRule::Uniform(ChunkResidence::DEVICE);
        // States that lie elsewhere pass the device in tiles.
        let tiles = if all_on_device {
            0
        } else {
            spec.mesh.layout.padded_elements() / spec.zero.buffer.max(1) as u64
        };
        let dry_runs = dry_runs(&config, &spec);
        let outlook = Outlook { states: min_device_states(&spec), dry_runs };
        if dry_runs > MAX_DRY_RUNS || tiles > MAX_TILES || is_hopeless(&spec, outlook) {
            return Ok(None);
        }
        Ok(Some(Planned::by(RunPlan::without_offsets, config, model, evaluated)?))
    }

    /// The configuration of another run, and the windows of one of its evaluations.
    fn changed(&self, change: impl FnOnce(&mut RunConfig)) -> Result<(ResolvedConfig, usize)> {
        Ok((self.config.with(change)?, self.plan.spec.batch.evaluated))
    }

    /// Runs of a block over a micro-batch in the dry runs of its step.
    pub fn dry_runs(&self) -> u128 {
        dry_runs(&self.config, &self.plan.spec)
    }

    /// Element type in which matrix products are computed.
    pub fn compute(&self) -> DType {
        self.plan.spec.precision.types.compute
    }

    /// The same, for ranks on several hosts, if they are.
    #[must_use]
    pub fn across(self, across: Option<Across>) -> Planned {
        Planned { across, ..self }
    }

    /// Number of its ranks that one machine runs.
    pub fn ranks_here(&self) -> usize {
        self.across.as_ref().map_or(self.plan.spec.world_size(), |across| across.ranks_of_a_machine)
    }

    /// The plan as one of its ranks has it.
    pub fn of_one_rank(config: ResolvedConfig, plan: RunPlan) -> Planned {
        Planned { config, plan: Arc::new(plan), across: None, took_s: 0.0 }
    }

    /// Bytes that all ranks of one machine together need; of several machines, an estimate from the largest rank.
    pub fn needed_bytes(&self) -> u64 {
        let needed = self.plan.ranks.iter().map(|rank| self.needed_by(rank));
        match &self.across {
            None => needed.sum::<u64>() * self.each_stands_for() as u64,
            Some(across) => needed.max().unwrap_or(0) * across.ranks_of_a_machine as u64,
        }
    }

    /// Number of ranks that each planned rank represents, including itself.
    pub fn each_stands_for(&self) -> usize {
        self.plan.spec.world_size() / self.plan.ranks.len()
    }

    /// Bytes that a rank needs.
    pub fn needed_by(&self, rank: &RankPlan) -> u64 {
        needed_by(&self.plan.spec, rank) + self.between_hosts(rank)
    }

    /// Bytes that a rank keeps to exchange data with other hosts: staging of sums, and buffers of connections.
    fn between_hosts(&self, rank: &RankPlan) -> u64 {
        let spec = &self.plan.spec;
        let bytes = |across: &Across| {
            let hosts = across.hosts_of(spec.world_size());
            hosts.map_or(0, |hosts| {
                transport_bytes(&hosts, rank.rank, &spec.group_sums(rank.rank), across.connections)
            })
        };
        self.across.as_ref().map_or(0, bytes)
    }

    /// The largest of [`Planned::between_hosts`], for reports; None on one host.
    pub fn between_hosts_bytes(&self) -> Option<u64> {
        self.across.as_ref()?;
        self.plan.ranks.iter().map(|rank| self.between_hosts(rank)).max()
    }

    /// The most that a rank needs of what `need` counts.
    pub fn needed_by_one(&self, need: Need) -> u64 {
        self.plan.ranks.iter().map(|rank| need(&self.plan.spec, rank)).max().unwrap_or(0)
    }

    /// Estimated bytes of the rank that takes most besides its arena.
    pub fn outside_bytes(&self) -> u64 {
        let outside = |rank: &RankPlan| outside_of(&self.plan.spec, rank) + self.between_hosts(rank);
        self.plan.ranks.iter().map(outside).max().unwrap_or(0)
    }

    /// Returns whether some ranks represent others, because the plan has more ranks than one machine runs.
    pub fn is_for_elsewhere(&self) -> bool {
        self.plan.ranks.len() < self.plan.spec.world_size()
    }

    /// The plan with the other value of `batch.reduce`, for a run that accumulates micro-batches.
    pub fn other_reduce(&self) -> Option<Planned> {
        if self.plan.spec.batch.micro_batches < 2 || self.plan.spec.mesh.axes.data < 2 {
            return None;
        }
        let other = match self.config.batch.reduce {
            Reduce::Each => Reduce::Defer,
            Reduce::Defer => Reduce::Each,
        };
        self.with(|config| config.batch.reduce = other).ok()
    }
}

/// Why no placement fits, where the budget follows from the memory of a device: another value of its key would not help.
fn of_filled_budget(error: BudgetError, config: &RunConfig) -> anyhow::Error {
    match &error {
        BudgetError::Device { rank, min_bytes, usable_bytes, smallest_bytes, other_bytes, .. }
            if config.is_decided("memory.device_budget_mb") =>
        {
            let whole = placement_budget::device_of_budget(config, *smallest_bytes);
            let host = other_bytes.map_or(String::new(), |host| {
                format!(", with memory.host_budget_mb = {}", host.div_ceil(1 << 20))
            });
            anyhow!(
                "memory.placement = \"auto\": rank {rank} needs at least {min_bytes} bytes of device memory, with as much as possible \
                 elsewhere, and {usable_bytes} of what it may take are left for them; the smallest device that would do has {whole} bytes \
                 ({}){host}: --device-memory of a plan, memory.limit_mb, or a rank's share of a card or of this machine",
                report::bytes(whole)
            )
        }
        _ => error.into(),
    }
}

/// The specification of a run of `model`; `evaluated` as for [`Planned::new`].
///
/// # Errors
/// When there is no chunk layout, cut into stages or mesh for the model.
pub fn spec(config: &RunConfig, model: Arc<dyn Model>, evaluated: usize) -> Result<Spec> {
    let threads = config.train.threads.unwrap_or_else(|| machine::threads_per_rank(config.world_size()));
    // The error message already includes its cause.
    let mut spec = Spec::new(config, model, evaluated, threads).map_err(|error| anyhow!("{error}"))?;
    spec.device.beside_plan = (config.device.kind == DeviceKind::Cuda).then(|| CardNeeds::of(&spec).bytes());
    Ok(spec)
}

/// Counts bytes that a rank needs.
pub type Need = fn(&Spec, &RankPlan) -> u64;

/// Bytes that a rank needs in the memory of its device. Where that is memory of the host, the process lies in it too.
pub fn needed_on_device(spec: &Spec, rank: &RankPlan) -> u64 {
    let outside = if spec.device.host_addressable { outside_of(spec, rank) } else { 0 };
    rank.memory.arena_bytes + outside + spec.device.beside_plan.unwrap_or(0)
}

/// Bytes that a rank needs.
pub fn needed_by(spec: &Spec, rank: &RankPlan) -> u64 {
    own_bytes(&spec.device, rank) + outside_of(spec, rank)
}

/// Bytes that a rank with a device of its own needs in memory of its host.
pub fn needed_of_host(spec: &Spec, rank: &RankPlan) -> u64 {
    rank.host.arena_bytes + outside_of(spec, rank)
}

/// Bytes that a rank plans in memory of its machine: in host memory, and in device memory unless that is a card's.
fn own_bytes(device: &DevicePart, rank: &RankPlan) -> u64 {
    let device = if device.beside_plan.is_none() { rank.memory.arena_bytes } else { 0 };
    device + rank.host.arena_bytes
}

/// Estimated bytes that one rank takes besides its arena.
fn outside_of(spec: &Spec, rank: &RankPlan) -> u64 {
    let disk = spec.device.disk.as_ref().map_or(0, |disk| disk.bytes_in_memory(rank.disk.arena_bytes));
    outside_bytes(&spec.batch, &spec.device, rank.allocations) + disk
}

/// Estimated bytes that one rank takes besides its arena, with so many planned allocations: the program and its tables, and the driver of a
/// card; for each thread a stack and buffers for
/// packed matrices; windows through which files pass; the batches on the host; and
/// the plan that it replays, with the text from which it is read.
pub fn outside_bytes(batch: &BatchPart, device: &DevicePart, allocations: u64) -> u64 {
    const PROGRAM: u64 = 12 << 20;
    const THREAD: u64 = 6 << 20;
    const WINDOWS: u64 = 4 << 20;
    // In the text, in the table (which grows by doubling), and in the books of what is live.
    const ALLOCATION: u64 = 145 + 2 * size_of::<Slot>() as u64 + 24;
    let rows =
        batch.micro_batch_size * (batch.micro_batches + batch.evaluation_batches * batch.evaluation_parts);
    let batches = 8 * (rows * batch.seq) as u64;
    let driver = if device.beside_plan.is_some() { DRIVER_HOST_BYTES } else { 0 };
    PROGRAM + driver + WINDOWS + THREAD * device.threads as u64 + batches + ALLOCATION * allocations
}

/// Bytes that no rank of a run does without beside its arena.
pub fn min_outside_bytes(spec: &Spec) -> u64 {
    let batch =
        BatchPart { micro_batch_size: 1, micro_batches: 1, evaluation_batches: 0, ..spec.batch.clone() };
    outside_bytes(&batch, &DevicePart { threads: 1, ..spec.device.clone() }, 0)
}
