//! What one rank of a way measures: of the engine, of asynchronous updates, of a DataParallel's devices.
//!
//! All of them compute the tokens of [`bench::fill`], which are the same in every way.

use std::time::{Duration, Instant};

use anyhow::Result;
use phalanx_plan::{MemoryPlan, Peak};
use phalanx_train::config::Updates;
use phalanx_train::older::asynchronous::{Asynchronous, Done, Links};
use phalanx_train::older::data_parallel::{DataParallel, DataParallelPlan};
use phalanx_train::rank::Batch;
use phalanx_train::{RunConfig, Source};
use serde::{Deserialize, Serialize};

use crate::bench::{self, Stepper, Timed};
use crate::environment::Environment;
use crate::planned::Planned;
use crate::rank_host::RankHost;
use crate::task::BenchStepTask;

/// What a rank does here, of what its plan has: nothing is diagnosed, evaluated or saved.
const PHASES: [&str; 4] = ["init", "load", "step", "gather"];

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
pub fn steps(
    task: &BenchStepTask,
    planned: &Planned,
    host: &RankHost,
    environment: Environment,
) -> Result<RankFigures> {
    match task.config.parallel.updates {
        Updates::Synchronous => synchronous(task, planned, host, environment),
        Updates::Asynchronous => asynchronous(task, planned, host, environment),
    }
}

/// The largest peak of the phases that run here, the first of equals: as the arena counts.
fn planned_peak(memory: &MemoryPlan) -> Peak {
    let phases = memory.phases.iter().filter(|phase| PHASES.contains(&phase.name));
    let larger = |most: Peak, peak: Peak| if peak.bytes > most.bytes { peak } else { most };
    phases.map(|phase| phase.peak).fold(Peak::default(), larger)
}

/// The engine of `train`.
fn synchronous(
    task: &BenchStepTask,
    planned: &Planned,
    host: &RankHost,
    environment: Environment,
) -> Result<RankFigures> {
    let memory = &planned.plan.of(host.rank()).memory;
    let factory = environment.device_factory(&task.config.device, planned.plan.spec.threads)?;
    let place = host.make_device(memory, &factory)?;
    let mut stepper = Stepper::new(host, planned, place.device)?;
    let Timed { step_s, losses, sent_bytes, exposed_s } = stepper.timed(task.warmup, task.steps)?;
    let measured = stepper.engine().device().arena().peak().expect("a planned arena measures its peak");
    stepper.engine().group().barrier().wait()?;
    Ok(RankFigures { step_s, losses, sent_bytes, exposed_s, planned: planned_peak(memory), measured })
}

/// A worker and server of asynchronous updates. A step lasts from the end of the one before.
fn asynchronous(
    task: &BenchStepTask,
    planned: &Planned,
    host: &RankHost,
    environment: Environment,
) -> Result<RankFigures> {
    let (spec, config) = (&planned.plan.spec, &planned.config);
    let memory = &planned.plan.of(host.rank()).memory;
    let factory = environment.device_factory(&task.config.device, spec.threads)?;
    let place = host.make_device(memory, &factory)?;
    let source = match host {
        RankHost::Alone => Source::Alone,
        RankHost::Job(endpoint) => Source::Host(endpoint),
    };
    let links = Links::new(&source, spec.world());
    let mut engine = Asynchronous::new(place.device, links, spec, config.parallel.max_staleness);
    engine.initialise(config.train.seed)?;
    let rank = engine.rank();
    let mut next_batch = |number: u64, batch: &mut Batch| {
        host.note_step(number);
        bench::fill(batch, spec, config.train.seed, number, rank);
        Ok(())
    };
    let mut all: Vec<(f64, Done)> = Vec::new();
    let mut before = Instant::now();
    let mut after = |done: &Done| {
        all.push((before.elapsed().as_secs_f64(), done.clone()));
        before = Instant::now();
        false
    };
    let steps = (task.warmup + task.steps) as u64;
    engine.run(steps, &mut next_batch, &mut after, Duration::ZERO)?;
    let timed = &all[task.warmup..];
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
pub fn data_parallel(
    plan: &DataParallelPlan,
    config: &RunConfig,
    warmup: usize,
    steps: usize,
) -> Result<Vec<RankFigures>> {
    let mut engine = DataParallel::new(plan)?;
    let (spec, seed) = (&plan.spec, config.train.seed);
    engine.initialise(seed)?;
    let mut batch = Batch::with_rows(spec.micro, spec.seq);
    let (mut step_s, mut losses) = (Vec::new(), Vec::new());
    for number in 1..=(warmup + steps) {
        if number == warmup + 1 {
            engine.take_statistics();
        }
        bench::fill(&mut batch, spec, seed, number as u64, 0);
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
