//! The part of a benchmark that one rank runs: it takes its memory, and measures.

use anyhow::Result;
use phalanx_bench::collectives::{self, CollectiveFigures, CollectivesTask};
use phalanx_bench::memory::{self, MemoryFigures};
use phalanx_bench::steps::{self, DeviceLimits, Launches, RankSetup, StepCounts, StepFigures};
use phalanx_bench::strategies::{self, RankFigures};
use phalanx_tensor::ProductMethod;
use phalanx_train::GroupSource;
use phalanx_train::config::{DeviceChoice, DeviceConfig, DeviceKind};

use crate::host::card_needs::CardNeeds;
use crate::host::cards;
use crate::host::environment::Environment;
use crate::host::output;
use crate::jobs::rank_host::{self, RankDevice, RankHost};
use crate::jobs::task::BenchStepTask;
use crate::plans::planned::Planned;

/// Times steps on random tokens.
///
/// # Errors
/// When the system refuses memory, or a rank dies.
pub fn steps(
    task: &BenchStepTask,
    planned: &Planned,
    host: &RankHost,
    environment: Environment,
) -> Result<StepFigures> {
    on_device(planned, host, environment, |setup| steps::measure(setup, &planned.plan, counts(task)))
}

/// Times steps of one of several strategies.
///
/// # Errors
/// As [`steps`].
pub fn strategy(
    task: &BenchStepTask,
    planned: &Planned,
    host: &RankHost,
    environment: Environment,
) -> Result<RankFigures> {
    on_device(planned, host, environment, |setup| {
        strategies::measure(setup, &planned.plan, &planned.config, counts(task))
    })
}

/// Times steps under one placement, and records what each memory holds over a step.
///
/// # Errors
/// As [`steps`].
pub fn memory(
    task: &BenchStepTask,
    planned: &Planned,
    host: &RankHost,
    environment: Environment,
) -> Result<MemoryFigures> {
    on_device(planned, host, environment, |setup| memory::measure(setup, &planned.plan, counts(task)))
}

/// Times collectives.
///
/// # Errors
/// When the system refuses memory, or a rank dies.
pub fn collectives(
    task: &CollectivesTask,
    host: &RankHost,
    environment: Environment,
) -> Result<Vec<CollectiveFigures>> {
    let RankHost::Job(endpoint) = host else { return Ok(Vec::new()) };
    let plans = collectives::plan(task, host.rank(), endpoint.world_size())?;
    let factory = environment.device_factory(&DeviceConfig::default(), CardNeeds::NONE, output::note);
    let RankDevice { device, .. } = host.make_planned_device(1, plans.each_ref(), &*factory)?;
    collectives::measure(task, &device, &*endpoint.group("data"))
}

fn counts(task: &BenchStepTask) -> StepCounts {
    StepCounts { seed: task.config.train.seed, warmup: task.warmup, steps: task.steps }
}

/// Allocates the memory of this rank's plan, and runs `measure` with it.
fn on_device<T>(
    planned: &Planned,
    host: &RankHost,
    environment: Environment,
    measure: impl FnOnce(&RankSetup<'_>) -> Result<T>,
) -> Result<T> {
    let plan = &planned.plan;
    let (factory, made) =
        environment.counted_factory(&planned.config.device, CardNeeds::of(&plan.spec), output::note);
    let RankDevice { device, shared_bytes } =
        host.make_device(plan.of(host.rank()), &plan.spec.device, &*factory)?;
    let (source, shares_memory) = match host {
        RankHost::Alone => (GroupSource::Alone(environment.isa()), false),
        RankHost::Job(endpoint) => (GroupSource::Host(endpoint), true),
    };
    let setup = RankSetup {
        rank: host.rank(),
        cpu: environment.cpu(plan.spec.device.threads, plan.spec.device.products)?,
        device,
        copied_bytes_per_s: match planned.config.device.choice() {
            DeviceChoice::Cpu => None,
            DeviceChoice::Cuda { .. } => Some(cards::COPY_BYTES_PER_S),
            DeviceChoice::Simulated(simulated) => Some(simulated.copy_bytes_per_s),
        },
        limits: match planned.config.device.kind {
            DeviceKind::Cuda => {
                let tf32 = plan.spec.device.products == Some(ProductMethod::Tf32);
                let limits = cards::limits_of(host.rank(), plan.spec.world_size(), tf32);
                Some(limits.unwrap_or(DeviceLimits::UNKNOWN))
            }
            _ => None,
        },
        source,
        note_step: &|step| host.note_step(step),
        page_faults: &phalanx_system::host::process::page_faults,
        launches: &|| {
            let launches = made.as_ref()?.launches();
            let [single, graphs, in_graphs] =
                [launches.single, launches.graphs, launches.in_graphs].map(|count| count as f64);
            Some(Launches { single, graphs, in_graphs })
        },
        foreign_bytes: &|| if shares_memory { rank_host::foreign_bytes(shared_bytes) } else { 0 },
    };
    let measured = measure(&setup)?;
    let linked_bytes = made.as_ref().map_or(0, |made| made.linked_bytes());
    if linked_bytes > 0 {
        let (rank, planned) = (host.rank(), CardNeeds::of(&plan.spec).nccl_bytes());
        output::note(&format!(
            "rank {rank}: NCCL takes {linked_bytes} bytes of its card, of {planned} planned"
        ));
    }
    Ok(measured)
}
