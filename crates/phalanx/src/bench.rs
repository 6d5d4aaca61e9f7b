//! What a rank of `bench` does: steps on random tokens, or collectives, with the clock running.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use phalanx_collectives::bench::median_us;
use phalanx_collectives::{CollectiveOp, Group, MetaGroup};
use phalanx_models::Gpt2;
use phalanx_plan::{MemoryPlan, plan_memory};
use phalanx_tensor::cpu::peak;
use phalanx_tensor::{Cpu, DType, Device};
use phalanx_train::metrics::resident_bytes_peak;
use phalanx_train::rank::{Batch, Rank};
use serde::{Deserialize, Serialize};

use crate::planned::Planned;
use crate::seat::{self, Place, Seat};
use crate::task::{BenchCollectivesTask, BenchStepTask};

/// What one rank measured of steps.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepFigures {
    /// Seconds of each timed step.
    pub step_s: Vec<f64>,
    /// Loss of each timed step.
    pub losses: Vec<f32>,
    /// f32 operations per second of this rank's threads, measured while the others measure too.
    pub peak_flops_per_s: f64,
    /// Bytes this rank sent in a step.
    pub sent_bytes: u64,
    /// Seconds of a step in which this rank waited for communication, mean.
    pub exposed_s: f64,
    /// Most resident bytes, other ranks' memory aside.
    pub resident_bytes_peak: u64,
    /// Bytes of the arena.
    pub arena_bytes: u64,
}

/// Warm-up, then timed steps.
///
/// # Errors
/// Memory that the system does not give; a rank that died.
pub fn steps(task: &BenchStepTask, seat: &Seat) -> Result<StepFigures> {
    let model = Gpt2::from_config(&task.model)?;
    let Planned { config, plan } = Planned::new(task.config.clone(), model, 0)?;
    let spec = &plan.spec;
    let memory = &plan.ranks[seat.rank()].memory;
    let Place { cpu, device, group, arena_bytes } = seat.take(memory, spec.threads)?;
    let mut engine = Rank::new(device, group, spec, &plan.orders);
    engine.initialise(config.train.seed)?;
    let mut batch = Batch::with_rows(spec.micro * spec.micro_batches, spec.seq);
    let mut random = config.train.seed ^ ((seat.rank() as u64) << 32);
    let mut figures = StepFigures {
        step_s: Vec::new(),
        losses: Vec::new(),
        peak_flops_per_s: peak_together(&engine, &cpu)?,
        sent_bytes: 0,
        exposed_s: 0.0,
        resident_bytes_peak: 0,
        arena_bytes: memory.arena_bytes,
    };
    for number in 0..task.warmup + task.steps {
        for token in batch.tokens.iter_mut().chain(&mut batch.targets) {
            *token = below(&mut random, spec.model.vocab);
        }
        seat.note_step(number as u64 + 1);
        engine.group().take_statistics();
        let start = Instant::now();
        let outcome = engine.step(number as u64 + 1, &batch, false)?;
        if number >= task.warmup {
            figures.step_s.push(start.elapsed().as_secs_f64());
            figures.losses.push(outcome.loss);
            let communication = engine.group().take_statistics();
            figures.sent_bytes = communication.sent_bytes;
            figures.exposed_s += communication.exposed_s / task.steps as f64;
        }
    }
    // Again, now that the system has spread the threads over the cores.
    figures.peak_flops_per_s = figures.peak_flops_per_s.max(peak_together(&engine, &cpu)?);
    let foreign = if matches!(seat, Seat::Among(_)) { seat::foreign_bytes(arena_bytes) } else { 0 };
    figures.resident_bytes_peak = resident_bytes_peak(foreign);
    Ok(figures)
}

/// Measured by all ranks at the same time, as they compute in a step.
fn peak_together(engine: &Rank, cpu: &Cpu) -> Result<f64> {
    engine.group().barrier().wait()?;
    Ok(peak::flops_per_s(cpu))
}

/// A token below `vocab` (Knuth's linear congruence; the upper bits).
fn below(state: &mut u64, vocab: usize) -> u32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    ((*state >> 33) % vocab as u64) as u32
}

/// One measurement of a collective.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct CollectiveFigures {
    /// The operation.
    pub op: CollectiveOp,
    /// Type of the elements.
    pub dtype: DType,
    /// Ranks.
    pub ranks: usize,
    /// Bytes of the whole buffer.
    pub bytes: usize,
    /// Median microseconds of a call.
    pub us: f64,
    /// 10^9 bytes of the whole buffer a second.
    pub algbw_gbs: f64,
}

/// Times every operation with every size.
///
/// # Errors
/// Memory that the system does not give; a rank that died.
pub fn collectives(task: &BenchCollectivesTask, seat: &Seat) -> Result<Vec<CollectiveFigures>> {
    let Seat::Among(endpoint) = seat else { return Ok(Vec::new()) };
    let memory = plan_collectives(task, seat.rank(), endpoint.world_size())?;
    let Place { device, group, .. } = seat.take(&memory, 1)?;
    measure(task, &device, &*group)
}

/// The memory of the largest measurement: the same code on the device that only records.
fn plan_collectives(task: &BenchCollectivesTask, rank: usize, ranks: usize) -> Result<MemoryPlan> {
    let device = Device::meta(1);
    let recorder = Arc::clone(device.recorder().expect("Meta records"));
    let group: Arc<dyn Group> = Arc::new(MetaGroup::new("data", rank, ranks, recorder));
    measure(task, &device, &*group)?;
    Ok(plan_memory(&device.take_trace(rank))?)
}

fn measure(
    task: &BenchCollectivesTask,
    device: &Device,
    group: &dyn Group,
) -> Result<Vec<CollectiveFigures>> {
    let (ranks, dtype) = (group.world_size(), task.dtype);
    device.phase("init", || ());
    device.phase("bench", || {
        let mut all = Vec::new();
        for (op, bytes) in task.ops.iter().flat_map(|op| task.bytes.iter().map(|bytes| (*op, *bytes))) {
            let us = median_us(device, group, op, dtype, bytes)?;
            all.push(CollectiveFigures { op, dtype, ranks, bytes, us, algbw_gbs: bytes as f64 / us / 1e3 });
        }
        Ok(all)
    })
}
