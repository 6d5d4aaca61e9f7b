//! What one rank of a way measures: of the engine, of asynchronous updates, of a DataParallel's devices.
//!
//! All of them compute the tokens of [`steps::fill`], which are the same in every way.

use std::time::Instant;

use anyhow::Result;
use phalanx_baselines::asynchronous::{Asynchronous, Done, Links};
use phalanx_baselines::data_parallel::{DataParallel, DataParallelPlan};
use phalanx_collectives::Isa;
use phalanx_plan::{MemoryPlan, Peak};
use phalanx_trace::PhaseName;
use phalanx_train::config::Updates;
use phalanx_train::rank::Batch;
use phalanx_train::{RunConfig, RunPlan};
use serde::{Deserialize, Serialize};

use crate::steps::{self, RankSetup, StepCounts, Stepper, Timed};

/// What a rank does here, of what its plan has: nothing is diagnosed, evaluated or saved.
const PHASES: [PhaseName; 4] = [PhaseName::Init, PhaseName::Load, PhaseName::Step, PhaseName::Gather];

/// One rank, or one device of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankFigures {
    /// Seconds of each timed step.
    pub step_s: Vec<f64>,
    /// Loss of each: of the whole batch, but under asynchronous updates of this rank's part.
    pub losses: Vec<f32>,
    /// Bytes that it sent in a step.
    pub sent_bytes: u64,
    /// Seconds of a step in which it waited for others, mean.
    pub exposed_s: f64,
    /// Peak of the arena by category, before anything ran.
    pub planned: Peak,
    /// The same as it came.
    pub measured: Peak,
}

/// Measures a rank.
///
/// # Errors
/// Memory that the system does not give; a rank that died; a step that cannot be applied.
pub fn measure(
    setup: &RankSetup<'_>,
    plan: &RunPlan,
    config: &RunConfig,
    counts: StepCounts,
) -> Result<RankFigures> {
    match config.parallel.updates {
        Updates::Synchronous => synchronous(setup, plan, counts),
        Updates::Asynchronous => asynchronous(setup, plan, config.parallel.max_staleness, counts),
    }
}

/// The largest peak of the phases that run here, the first of equals: as the arena counts.
fn planned_peak(memory: &MemoryPlan) -> Peak {
    let phases = memory.phases.iter().filter(|phase| PHASES.contains(&phase.name));
    let larger = |max: Peak, peak: Peak| if peak.bytes > max.bytes { peak } else { max };
    phases.map(|phase| phase.peak).fold(Peak::default(), larger)
}

/// The engine of `train`.
fn synchronous(setup: &RankSetup<'_>, plan: &RunPlan, counts: StepCounts) -> Result<RankFigures> {
    let memory = &plan.of(setup.rank).memory;
    let mut stepper = Stepper::new(setup, plan, counts.seed, setup.device.clone())?;
    let Timed { step_s, losses, sent_bytes, exposed_s } = stepper.timed(counts.warmup, counts.steps)?;
    let measured = stepper.engine().device().arena().peak().expect("a planned arena measures its peak");
    stepper.engine().group().barrier().wait()?;
    Ok(RankFigures { step_s, losses, sent_bytes, exposed_s, planned: planned_peak(memory), measured })
}

/// A worker and server of asynchronous updates. A step lasts from the end of the one before.
fn asynchronous(
    setup: &RankSetup<'_>,
    plan: &RunPlan,
    max_staleness: u64,
    counts: StepCounts,
) -> Result<RankFigures> {
    let (spec, memory) = (&plan.spec, &plan.of(setup.rank).memory);
    let StepCounts { seed, warmup, steps } = counts;
    let links = Links::new(&setup.source, spec.world_size());
    let mut engine = Asynchronous::new(setup.device.clone(), links, spec, max_staleness);
    engine.initialise(seed)?;
    let rank = engine.rank();
    let mut next_batch = |number: u64, batch: &mut Batch| {
        (setup.note_step)(number);
        steps::fill(batch, spec, seed, number, rank);
        Ok(())
    };
    let mut all: Vec<(f64, Done)> = Vec::new();
    let mut before = Instant::now();
    let mut after = |done: &Done| {
        all.push((before.elapsed().as_secs_f64(), done.clone()));
        before = Instant::now();
        false
    };
    engine.run((warmup + steps) as u64, &mut next_batch, &mut after)?;
    let timed = &all[warmup..];
    Ok(RankFigures {
        step_s: timed.iter().map(|(seconds, _)| *seconds).collect(),
        losses: timed.iter().map(|(_, done)| done.loss).collect(),
        sent_bytes: timed.iter().map(|(_, done)| done.sent_bytes).sum::<u64>() / timed.len() as u64,
        exposed_s: timed.iter().map(|(_, done)| done.waited_s).sum::<f64>() / timed.len() as f64,
        planned: planned_peak(memory),
        measured: engine.device().arena().peak().expect("a planned arena measures its peak"),
    })
}

/// The devices of one process, by device.
///
/// # Errors
/// Memory that the system does not give; a step that cannot be applied.
pub fn data_parallel(plan: &DataParallelPlan, isa: Isa, counts: StepCounts) -> Result<Vec<RankFigures>> {
    let mut engine = DataParallel::new(plan, isa)?;
    let spec = &plan.spec;
    let StepCounts { seed, warmup, steps } = counts;
    engine.initialise(seed)?;
    let mut batch = Batch::with_rows(spec.micro_batch_size, spec.seq);
    let (mut step_s, mut losses) = (Vec::new(), Vec::new());
    for number in 1..=(warmup + steps) {
        if number == warmup + 1 {
            engine.take_statistics();
        }
        steps::fill(&mut batch, spec, seed, number as u64, 0);
        let start = Instant::now();
        let outcome = engine.step(&batch)?;
        if number > warmup {
            step_s.push(start.elapsed().as_secs_f64());
            losses.push(outcome.loss);
        }
    }
    let devices = plan.memory.iter().zip(engine.peaks()).zip(engine.take_statistics());
    let figures = devices.map(|((memory, measured), communication)| RankFigures {
        step_s: step_s.clone(),
        losses: losses.clone(),
        sent_bytes: communication.sent_bytes / steps as u64,
        exposed_s: communication.exposed_s / steps as f64,
        planned: planned_peak(memory),
        measured,
    });
    Ok(figures.collect())
}
