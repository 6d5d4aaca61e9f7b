//! What a rank of `bench` does: steps on random tokens, or collectives, with the clock running.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use phalanx_collectives::bench::median_us;
use phalanx_collectives::{CollectiveOp, Group, MetaGroup};
use phalanx_data::NOT_PREDICTED;
use phalanx_plan::{MemoryPlan, plan_memory};
use phalanx_tensor::profile::Profile;
use phalanx_tensor::{DType, Device};
use phalanx_train::Spec;
use phalanx_train::config::DeviceConfig;
use phalanx_train::metrics::resident_bytes_peak;
use phalanx_train::rank::{Batch, Rank};
use serde::{Deserialize, Serialize};

use crate::environment::{Environment, Processor};
use crate::kernel_table::{KernelFigures, Peaks, StepProfile};
use crate::machine;
use crate::planned::Planned;
use crate::rank_host::{self, RankDevice, RankHost};
use crate::task::{BenchCollectivesTask, BenchStepTask};

/// Most steps whose kernel calls are timed.
const PROFILED: usize = 3;

/// Bytes to measure a rank's bandwidth with.
const MEMORY_BYTES: usize = 256 << 20;

/// What one rank measured of steps.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepFigures {
    /// Seconds of each timed step.
    pub step_s: Vec<f64>,
    /// Loss of each timed step.
    pub losses: Vec<f32>,
    /// What this rank's threads are capable of, measured while the others measure too.
    pub peaks: Peaks,
    /// Of further steps, whose kernel calls were timed one by one, the one with the median time.
    pub profile: StepProfile,
    /// How many of those there were.
    pub profiled: usize,
    /// Page faults of the first step of all, and of the later ones to the last that is timed; not where the system
    /// does not tell.
    pub page_faults: Option<[u64; 2]>,
    /// Bytes this rank sent in a step.
    pub sent_bytes: u64,
    /// Seconds of a step in which this rank waited for communication, mean.
    pub exposed_s: f64,
    /// Most resident bytes, other ranks' memory aside.
    pub resident_bytes_peak: u64,
    /// Bytes of the arena.
    pub arena_bytes: u64,
}

/// A rank that steps on random tokens.
pub struct Stepper<'a> {
    host: &'a RankHost,
    engine: Rank,
    spec: Spec,
    seed: u64,
    batch: Batch,
    number: u64,
    /// As in [`StepFigures`].
    page_faults: Option<[u64; 2]>,
}

/// Some steps, one after another.
pub struct Timed {
    /// As in [`StepFigures`].
    pub step_s: Vec<f64>,
    /// As in [`StepFigures`].
    pub losses: Vec<f32>,
    /// As in [`StepFigures`].
    pub sent_bytes: u64,
    /// As in [`StepFigures`].
    pub exposed_s: f64,
}

impl<'a> Stepper<'a> {
    /// The engine of a planned run on the device of its host, with initial values.
    ///
    /// # Errors
    /// A rank that died.
    pub fn new(host: &'a RankHost, planned: &Planned, device: Device) -> Result<Stepper<'a>> {
        let spec = planned.plan.spec.clone();
        let mut engine = Rank::new(device, host.groups(&spec), &spec, &planned.plan.of(host.rank()).orders);
        let seed = planned.config.train.seed;
        engine.initialise(seed)?;
        let batch = Batch::with_rows(spec.micro * spec.micro_batches, spec.seq);
        let page_faults = machine::page_faults().map(|_| [0, 0]);
        Ok(Stepper { host, engine, spec, seed, batch, number: 0, page_faults })
    }

    /// Warm-up, then timed steps.
    ///
    /// # Errors
    /// A rank that died, a step that cannot be applied.
    pub fn timed(&mut self, warmup: usize, steps: usize) -> Result<Timed> {
        for _ in 0..warmup {
            self.step()?;
        }
        let mut timed = Timed { step_s: Vec::new(), losses: Vec::new(), sent_bytes: 0, exposed_s: 0.0 };
        for _ in 0..steps {
            let (seconds, loss) = self.step()?;
            timed.step_s.push(seconds);
            timed.losses.push(loss);
            let communication = self.engine.groups().take_statistics();
            timed.sent_bytes = communication.sent_bytes;
            timed.exposed_s += communication.exposed_s / steps as f64;
        }
        Ok(timed)
    }

    /// The engine.
    pub fn engine(&self) -> &Rank {
        &self.engine
    }

    /// One step: its seconds and loss.
    fn step(&mut self) -> Result<(f64, f32)> {
        self.number += 1;
        fill(&mut self.batch, &self.spec, self.seed, self.number, self.engine.at().data);
        self.host.note_step(self.number);
        self.engine.groups().take_statistics();
        let faults = machine::page_faults();
        let start = Instant::now();
        let outcome = self.engine.step(self.number, &self.batch, false)?;
        let seconds = start.elapsed().as_secs_f64();
        if let (Some(sums), Some(before), Some(after)) =
            (&mut self.page_faults, faults, machine::page_faults())
        {
            sums[usize::from(self.number > 1)] += after - before;
        }
        Ok((seconds, outcome.loss))
    }

    /// The median of some steps whose kernel calls are timed. Page faults of the table are not the step's.
    fn profile(&mut self, profile: &Profile, steps: usize) -> Result<StepProfile> {
        let page_faults = self.page_faults;
        profile.pause(false);
        let mut profiles = Vec::new();
        for _ in 0..steps {
            let (step_s, _) = self.step()?;
            let kernels = profile.take().into_iter().map(|(key, time)| KernelFigures {
                name: key.name.to_string(),
                flops: key.flops,
                bytes: key.bytes,
                calls: time.calls,
                seconds: time.time.as_secs_f64(),
            });
            profiles.push(StepProfile { step_s, kernels: kernels.collect() });
        }
        profile.pause(true);
        self.page_faults = page_faults;
        profiles.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        let mut median = profiles.swap_remove(profiles.len() / 2);
        median.sort();
        Ok(median)
    }

    /// Operations per second, measured by all ranks at the same time, as they compute in a step.
    fn flops_per_s(&self, processor: &Processor, compute: DType) -> Result<f64> {
        self.engine.group().barrier().wait()?;
        Ok(processor.flops_per_s(compute))
    }
}

/// Warm-up, then timed steps, then steps whose kernels are timed.
///
/// # Errors
/// Memory that the system does not give; a rank that died.
pub fn steps(
    task: &BenchStepTask,
    planned: &Planned,
    host: &RankHost,
    environment: Environment,
) -> Result<StepFigures> {
    let (spec, compute) = (&planned.plan.spec, planned.compute());
    let plan = planned.plan.of(host.rank());
    let memory = &plan.memory;
    let factory = environment.device_factory(&task.config.device, spec.threads)?;
    let RankDevice { processor, device, arena_bytes } = host.make_device(memory, &factory)?;
    let profile = Arc::new(Profile::default());
    profile.pause(true);
    let device = device.profiled(Arc::clone(&profile));
    let mut stepper = Stepper::new(host, planned, device)?;
    let before = stepper.flops_per_s(&processor, compute)?;
    let Timed { step_s, losses, sent_bytes, exposed_s } = stepper.timed(task.warmup, task.steps)?;
    let profiled = task.steps.min(PROFILED);
    let profile = stepper.profile(&profile, profiled)?;
    let foreign = if matches!(host, RankHost::Job(_)) { rank_host::foreign_bytes(arena_bytes) } else { 0 };
    let resident_bytes_peak = resident_bytes_peak(foreign);
    // Again, now that the system has spread the threads over the cores.
    let flops_per_s = before.max(stepper.flops_per_s(&processor, compute)?);
    stepper.engine.group().barrier().wait()?;
    let bytes_per_s = processor.bandwidth(MEMORY_BYTES).context("memory to measure its bandwidth")?.most();
    Ok(StepFigures {
        step_s,
        losses,
        peaks: Peaks { flops_per_s, bytes_per_s },
        profile,
        profiled,
        page_faults: stepper.page_faults,
        sent_bytes,
        exposed_s,
        resident_bytes_peak,
        arena_bytes: memory.arena_bytes,
    })
}

/// Random tokens and targets of step `number` (from 1) for the ranks at `data` on the data axis. Each sequence is a
/// function of the seed, the step and its place in the global batch: however that is cut and shared, it is the same.
/// Of a masked model a sequence has as many targets as a sample.
pub fn fill(batch: &mut Batch, spec: &Spec, seed: u64, number: u64, data: usize) {
    let (seq, vocab) = (spec.seq, spec.model.shape().vocab);
    let rows = batch.tokens.chunks_mut(seq).zip(batch.targets.chunks_mut(seq));
    for (index, (tokens, targets)) in rows.enumerate() {
        let place = spec.first_sample(index / spec.micro, data) + index % spec.micro;
        let mut random = mixed(mixed(seed ^ number) ^ place as u64);
        for token in tokens.iter_mut().chain(targets.iter_mut()) {
            *token = below(&mut random, vocab);
        }
        let unpredicted = seq - spec.targets_per_sequence.min(seq);
        targets[..unpredicted].fill(NOT_PREDICTED);
    }
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): neighbours become unlike.
fn mixed(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
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
pub fn collectives(
    task: &BenchCollectivesTask,
    host: &RankHost,
    environment: Environment,
) -> Result<Vec<CollectiveFigures>> {
    let RankHost::Job(endpoint) = host else { return Ok(Vec::new()) };
    let memory = plan_collectives(task, host.rank(), endpoint.world_size())?;
    let factory = environment.device_factory(&DeviceConfig::default(), 1)?;
    let RankDevice { device, .. } = host.make_device(&memory, &factory)?;
    measure(task, &device, &*endpoint.group("data"))
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
