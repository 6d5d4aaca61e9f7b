//! What one rank does for a benchmark: it takes its memory, and measures.

use std::sync::Arc;

use anyhow::Result;
use phalanx_bench::collectives::{self, CollectiveFigures, CollectivesTask};
use phalanx_bench::steps::{self, RankSetup, StepCounts, StepFigures};
use phalanx_bench::strategies::{self, RankFigures};
use phalanx_train::GroupSource;

use crate::environment::Environment;
use crate::machine;
use crate::planned::Planned;
use crate::seat::{self, Place, Seat};
use crate::task::BenchStepTask;

/// Times steps on random tokens.
///
/// # Errors
/// Memory that the system does not give; a rank that died.
pub fn steps(
    task: &BenchStepTask,
    planned: &Planned,
    seat: &Seat,
    environment: Environment,
) -> Result<StepFigures> {
    on_seat(planned, seat, environment, |setup| steps::measure(setup, &planned.plan, counts(task)))
}

/// Times steps of one of several strategies.
///
/// # Errors
/// As [`steps`].
pub fn strategy(
    task: &BenchStepTask,
    planned: &Planned,
    seat: &Seat,
    environment: Environment,
) -> Result<RankFigures> {
    on_seat(planned, seat, environment, |setup| {
        strategies::measure(setup, &planned.plan, &planned.config, counts(task))
    })
}

/// Times collectives.
///
/// # Errors
/// Memory that the system does not give; a rank that died.
pub fn collectives(
    task: &CollectivesTask,
    seat: &Seat,
    environment: Environment,
) -> Result<Vec<CollectiveFigures>> {
    let Seat::Among(endpoint) = seat else { return Ok(Vec::new()) };
    let memory = collectives::plan(task, seat.rank(), endpoint.world_size())?;
    let Place { device, .. } = seat.take(&memory, environment.options(1))?;
    collectives::measure(task, &device, &*endpoint.group("data"))
}

fn counts(task: &BenchStepTask) -> StepCounts {
    StepCounts { seed: task.config.train.seed, warmup: task.warmup, steps: task.steps }
}

/// Takes the memory that this rank's plan asks for, and runs `measure` there.
fn on_seat<T>(
    planned: &Planned,
    seat: &Seat,
    environment: Environment,
    measure: impl FnOnce(&RankSetup<'_>) -> Result<T>,
) -> Result<T> {
    let plan = &planned.plan;
    let options = environment.options(plan.spec.threads);
    let Place { cpu, device, arena_bytes } = seat.take(&plan.of(seat.rank()).memory, options)?;
    let (source, shares_memory) = match seat {
        Seat::Alone => (GroupSource::Alone(environment.isa()), false),
        Seat::Among(endpoint) => (GroupSource::Host(endpoint), true),
    };
    let setup = RankSetup {
        rank: seat.rank(),
        cpu: Arc::clone(&cpu),
        device,
        source,
        note_step: &|step| seat.note_step(step),
        page_faults: &machine::page_faults,
        foreign_bytes: &|| if shares_memory { seat::foreign_bytes(arena_bytes) } else { 0 },
    };
    measure(&setup)
}
