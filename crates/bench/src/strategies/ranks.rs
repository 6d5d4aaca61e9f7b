//! Measures steps on one rank: with the engine, with asynchronous updates, or on the devices of DataParallel.
//!
//! All of them compute the tokens of [`steps::fill`], which are the same in every strategy.

use std::time::Instant;

use crate::baselines::asynchronous::{Asynchronous, Done, Links, server_device};
use crate::baselines::data_parallel::{DataParallel, DataParallelPlan};
use anyhow::Result;
use phalanx_collectives::Isa;
use phalanx_plan::trace::PhaseName;
use phalanx_plan::{MemoryPlan, Peak};
use phalanx_train::config::Updates;
use phalanx_train::rank::{Batch, Rank};
use phalanx_train::run::Engine;
use phalanx_train::step::Outcome;
use phalanx_train::{RunConfig, RunPlan};
use serde::{Deserialize, Serialize};

use super::sketch::GradientSketch;
use crate::steps::{self, RankSetup, StepCounts, Stepper, Timed};

/// The phases of a rank's plan that run here: nothing is diagnosed, evaluated or saved.
const PHASES: [PhaseName; 4] = [PhaseName::Init, PhaseName::Load, PhaseName::Step, PhaseName::Gather];

/// The figures of one rank, or of one device of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankFigures {
    /// Seconds of each timed step.
    pub step_s: Vec<f64>,
    /// Loss of each timed step: over the whole batch, or over this rank's part under asynchronous updates.
    pub losses: Vec<f32>,
    /// Bytes that it sent in a step.
    pub sent_bytes: u64,
    /// Mean seconds of a step in which it waited for other ranks.
    pub exposed_s: f64,
    /// Planned peak of the arena, by category.
    pub planned: Peak,
    /// Measured peak of the arena, by category.
    pub measured: Peak,
    /// Projections of its part of the gradients of the first applied step; none under asynchronous updates.
    pub gradients: Option<GradientSketch>,
}

/// Measures the steps of one rank.
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

/// The largest planned peak of the phases that run here; the first of equals, as the arena counts.
fn planned_peak(memory: &MemoryPlan) -> Peak {
    let phases = memory.phases.iter().filter(|phase| PHASES.contains(&phase.name));
    let larger = |largest: Peak, peak: Peak| if peak.bytes > largest.bytes { peak } else { largest };
    phases.map(|phase| phase.peak).fold(Peak::default(), larger)
}

/// Measures the synchronous engine.
fn synchronous(setup: &RankSetup<'_>, plan: &RunPlan, counts: StepCounts) -> Result<RankFigures> {
    let memory = &plan.of(setup.rank).memory;
    let mut stepper = Stepper::new(setup, plan, counts.seed, setup.device.clone())?;
    let mut gradients = None;
    let mut after = |rank: &Rank, number: u64, outcome: &Outcome| {
        if gradients.is_none() && !outcome.skipped {
            gradients = Some(GradientSketch::of_rank(rank, number, outcome.loss_scale)?);
        }
        Ok(())
    };
    let timed = stepper.timed(counts.warmup, counts.steps, &mut after)?;
    let Timed { step_s, losses, sent_bytes, exposed_s, .. } = timed;
    let measured = stepper.engine().device().arena().peak().expect("a planned arena measures its peak");
    stepper.engine().group().barrier().wait()?;
    let planned = planned_peak(memory);
    Ok(RankFigures { step_s, losses, sent_bytes, exposed_s, planned, measured, gradients })
}

/// Measures the worker of an asynchronous rank. A step lasts from the end of the step before.
fn asynchronous(
    setup: &RankSetup<'_>,
    plan: &RunPlan,
    max_staleness: u64,
    counts: StepCounts,
) -> Result<RankFigures> {
    let (spec, memory) = (&plan.spec, &plan.of(setup.rank).memory);
    let StepCounts { seed, warmup, steps } = counts;
    let links = Links::new(&setup.source, spec);
    let mut engine =
        Asynchronous::new(setup.device.clone(), server_device(&setup.device), links, spec, max_staleness);
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
        losses: timed.iter().map(|(_, done)| done.outcome.loss).collect(),
        sent_bytes: timed.iter().map(|(_, done)| done.sent_bytes).sum::<u64>() / timed.len() as u64,
        exposed_s: timed.iter().map(|(_, done)| done.waited_s).sum::<f64>() / timed.len() as f64,
        planned: planned_peak(memory),
        measured: engine.device().arena().peak().expect("a planned arena measures its peak"),
        gradients: None,
    })
}

/// Measures the devices of one process: the figures by device.
///
/// # Errors
/// Memory that the system does not give; a step that cannot be applied.
pub fn data_parallel(plan: &DataParallelPlan, isa: Isa, counts: StepCounts) -> Result<Vec<RankFigures>> {
    let mut engine = DataParallel::new(plan, isa)?;
    let spec = &plan.spec;
    let StepCounts { seed, warmup, steps } = counts;
    engine.initialise(seed)?;
    let mut batch = Batch::with_rows(spec.batch.micro_batch_size, spec.batch.seq);
    let (mut step_s, mut losses, mut gradients) = (Vec::new(), Vec::new(), None);
    for number in 1..=(warmup + steps) {
        if number == warmup + 1 {
            engine.take_statistics();
        }
        steps::fill(&mut batch, spec, seed, number as u64, 0);
        let start = Instant::now();
        let outcome = engine.step(&batch)?;
        let seconds = start.elapsed().as_secs_f64();
        if number > warmup {
            step_s.push(seconds);
            losses.push(outcome.loss);
        }
        if gradients.is_none() && !outcome.skipped {
            gradients = Some(GradientSketch::of_rank(engine.root(), number as u64, outcome.loss_scale)?);
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
        gradients: gradients.take(),
    });
    Ok(figures.collect())
}
