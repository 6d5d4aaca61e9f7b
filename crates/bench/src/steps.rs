//! Measurements of one rank for `phalanx bench step`: training steps on random tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use phalanx_collectives::Statistics;
use phalanx_cpu::Cpu;
use phalanx_cpu::peak;
use phalanx_data::NOT_PREDICTED;
use phalanx_system::random::mix;
use phalanx_tensor::profile::Profile;
use phalanx_tensor::{DType, Device, DiskOptions};
use phalanx_train::metrics::resident_bytes_peak;
use phalanx_train::rank::{Batch, Rank};
use phalanx_train::step::Outcome;
use phalanx_train::{GroupSource, Groups, RunPlan, Spec};
use serde::{Deserialize, Serialize};

use crate::disk::{self, DiskTask};
use crate::kernel_table::{CallPrice, CollectiveTimes, KernelFigures, Peaks, StepProfile, product_types};

/// Largest number of steps whose kernel calls are timed.
const PROFILED: usize = 3;

/// Bytes to measure a rank's bandwidth with.
const MEMORY_BYTES: usize = 256 << 20;

/// The parts with which a rank measures: its processor and device, its connections to other ranks, and callbacks about
/// the process.
pub struct RankSetup<'a> {
    /// This rank's number.
    pub rank: usize,
    /// The processor, to measure its peaks.
    pub cpu: Arc<Cpu>,
    /// The device, with an arena that replays the rank's plan.
    pub device: Device,
    /// Bytes per second of copies between the device and the host, where the device says so. Elsewhere the rate of copies
    /// in memory is measured.
    pub copied_bytes_per_s: Option<f64>,
    /// Peak rates of the device, where they are not those measured on the processor.
    pub limits: Option<DeviceLimits>,
    /// Source of the rank's groups.
    pub source: GroupSource<'a>,
    /// Called with the number of each step when it starts.
    pub note_step: &'a dyn Fn(u64),
    /// Page faults of this process so far that needed no disk; `None` where the system does not tell.
    pub page_faults: &'a dyn Fn() -> Option<u64>,
    /// Launches on the device so far; `None` where they are not counted.
    pub launches: &'a dyn Fn() -> Option<Launches>,
    /// Bytes of other ranks' memory that are resident here because they were read.
    pub foreign_bytes: &'a dyn Fn() -> u64,
}

/// Peak rates of a card for one rank, from published figures; 0 where they are unknown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceLimits {
    /// Operations a second of products in f32.
    pub f32_flops_per_s: f64,
    /// The same in 16 bits.
    pub half_flops_per_s: f64,
    /// Bytes a second of its memory.
    pub bytes_per_s: f64,
}

impl DeviceLimits {
    /// The limits of a device that does not say how fast it runs.
    pub const UNKNOWN: DeviceLimits =
        DeviceLimits { f32_flops_per_s: 0.0, half_flops_per_s: 0.0, bytes_per_s: 0.0 };

    fn flops_per_s(&self, dtype: DType) -> f64 {
        if dtype.bytes() == 2 { self.half_flops_per_s } else { self.f32_flops_per_s }
    }
}

/// Numbers of launches on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Launches {
    /// Kernels, products and copies that were launched one by one.
    pub single: f64,
    /// Graphs of launches.
    pub graphs: f64,
    /// Kernels, products and copies that graphs have launched.
    pub in_graphs: f64,
}

impl Launches {
    /// Those of one of `steps` steps since `before`.
    fn of_step(self, before: Launches, steps: usize) -> Launches {
        let of = |after: f64, before: f64| (after - before) / steps.max(1) as f64;
        Launches {
            single: of(self.single, before.single),
            graphs: of(self.graphs, before.graphs),
            in_graphs: of(self.in_graphs, before.in_graphs),
        }
    }
}

/// Seed, and numbers of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCounts {
    /// Seed of parameters and tokens.
    pub seed: u64,
    /// Steps before the first that is timed.
    pub warmup: usize,
    /// Steps that are timed.
    pub steps: usize,
}

/// Bytes that are read and written to measure a disk, and those of a chunk of them: little memory and time beside a step.
const DISK_BYTES: u64 = 256 << 20;
const DISK_CHUNK: u64 = 8 << 20;

/// Measurements of steps on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepFigures {
    /// Seconds of each timed step.
    pub step_s: Vec<f64>,
    /// Loss of each timed step.
    pub losses: Vec<f32>,
    /// Peak rates of this rank's threads, measured while the others measure too.
    pub peaks: Peaks,
    /// The median of further steps whose kernel calls were timed one by one.
    pub profile: StepProfile,
    /// Number of steps whose kernel calls were timed.
    pub profiled: usize,
    /// Page faults of the first step, and of all later ones up to the last timed; `None` where the system does not tell.
    pub page_faults: Option<[u64; 2]>,
    /// Mean number of launches on the device in a timed step; `None` where they are not counted.
    pub launches: Option<Launches>,
    /// Bytes this rank sent in a step.
    pub sent_bytes: u64,
    /// Mean seconds of a step in which this rank waited for communication.
    pub exposed_s: f64,
    /// Peak of the resident bytes, without other ranks' memory.
    pub resident_bytes_peak: u64,
    /// Bytes of the arena.
    pub arena_bytes: u64,
}

/// A rank that runs steps on random tokens.
pub struct Stepper<'a> {
    setup: &'a RankSetup<'a>,
    engine: Rank,
    spec: Spec,
    seed: u64,
    batch: Batch,
    number: u64,
    /// As in [`StepFigures`].
    page_faults: Option<[u64; 2]>,
}

/// Called after each step with the rank, the number of the step and its outcome.
pub type AfterStep<'a> = dyn FnMut(&Rank, u64, &Outcome) -> Result<()> + 'a;

/// Figures of some timed steps.
pub struct Timed {
    /// As in [`StepFigures`].
    pub step_s: Vec<f64>,
    /// As in [`StepFigures`].
    pub losses: Vec<f32>,
    /// As in [`StepFigures`].
    pub sent_bytes: u64,
    /// As in [`StepFigures`].
    pub exposed_s: f64,
    /// As in [`StepFigures`].
    pub launches: Option<Launches>,
}

impl<'a> Stepper<'a> {
    /// The engine of a planned run on `device`, with initial parameters from `seed`.
    ///
    /// # Errors
    /// A rank that died.
    pub fn new(setup: &'a RankSetup<'a>, plan: &RunPlan, seed: u64, device: Device) -> Result<Stepper<'a>> {
        let spec = plan.spec.clone();
        let groups = Groups::new(&setup.source, &spec);
        let mut engine = Rank::new(device, groups, &spec)?;
        engine.initialise(seed)?;
        let batch = Batch::with_rows(spec.batch.micro_batch_size * spec.batch.micro_batches, spec.batch.seq);
        let page_faults = (setup.page_faults)().map(|_| [0, 0]);
        Ok(Stepper { setup, engine, spec, seed, batch, number: 0, page_faults })
    }

    /// Warm-up, then timed steps. `after` is called with the number and the outcome of each step, outside of the
    /// measured time.
    ///
    /// # Errors
    /// A rank that died, a step that cannot be applied, errors of `after`.
    pub fn timed(&mut self, warmup: usize, steps: usize, after: &mut AfterStep) -> Result<Timed> {
        for _ in 0..warmup {
            let (_, outcome) = self.step()?;
            after(&self.engine, self.number, &outcome)?;
        }
        let launches = None;
        let mut timed =
            Timed { step_s: Vec::new(), losses: Vec::new(), sent_bytes: 0, exposed_s: 0.0, launches };
        let before = (self.setup.launches)();
        for _ in 0..steps {
            let (seconds, outcome) = self.step()?;
            timed.step_s.push(seconds);
            timed.losses.push(outcome.loss);
            let communication = self.engine.groups().take_statistics();
            timed.sent_bytes = communication.sent_bytes;
            timed.exposed_s += communication.exposed_s / steps as f64;
            after(&self.engine, self.number, &outcome)?;
        }
        timed.launches =
            (self.setup.launches)().zip(before).map(|(after, before)| after.of_step(before, steps));
        Ok(timed)
    }

    /// The engine.
    pub fn engine(&self) -> &Rank {
        &self.engine
    }

    /// One step: its seconds and outcome.
    fn step(&mut self) -> Result<(f64, Outcome)> {
        self.number += 1;
        fill(&mut self.batch, &self.spec, self.seed, self.number, self.engine.at().data);
        (self.setup.note_step)(self.number);
        self.engine.groups().take_statistics();
        let faults = (self.setup.page_faults)();
        let start = Instant::now();
        let outcome = self.engine.step(self.number, &self.batch, false)?;
        let seconds = start.elapsed().as_secs_f64();
        if let (Some(sums), Some(before), Some(after)) =
            (&mut self.page_faults, faults, (self.setup.page_faults)())
        {
            sums[usize::from(self.number > 1)] += after - before;
        }
        Ok((seconds, outcome))
    }

    /// The median of some steps whose kernel calls are timed. Page faults of the table are not the step's.
    fn profile(&mut self, profile: &Profile, steps: usize) -> Result<StepProfile> {
        let page_faults = self.page_faults;
        profile.pause(false);
        let mut profiles = Vec::new();
        for _ in 0..steps {
            let (seconds, _) = self.step()?;
            // A card updates the parameters when the step has returned.
            let since = Instant::now();
            self.setup.device.synchronize()?;
            let step_s = seconds + since.elapsed().as_secs_f64();
            let Statistics { calls, sent_bytes, exposed_s, .. } = self.engine.groups().take_statistics();
            let collectives = CollectiveTimes { calls, sent_bytes, waited_s: exposed_s };
            let kernels = profile.take().into_iter().map(|(key, time)| KernelFigures {
                name: key.name.to_string(),
                price: CallPrice { flops: key.flops, bytes: key.bytes, rate: key.rate },
                calls: time.calls,
                seconds: time.time.as_secs_f64(),
            });
            profiles.push(StepProfile { step_s, kernels: kernels.collect(), collectives });
        }
        profile.pause(true);
        self.page_faults = page_faults;
        profiles.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        let mut median = profiles.swap_remove(profiles.len() / 2);
        median.sort();
        Ok(median)
    }

    /// Operations per second for each of some element types: those of the device's limits, or measured by all ranks at the same
    /// time, as they compute in a step.
    fn flops_per_s(&self, cpu: &Cpu, types: &BTreeSet<DType>) -> Result<BTreeMap<DType, f64>> {
        self.engine.group().barrier().wait()?;
        if let Some(limits) = self.setup.limits {
            return Ok(types.iter().map(|dtype| (*dtype, limits.flops_per_s(*dtype))).collect());
        }
        Ok(types.iter().map(|dtype| (*dtype, peak::flops_per_s(cpu, *dtype))).collect())
    }
}

/// Warm-up, then timed steps, then steps whose kernels are timed.
///
/// # Errors
/// When the system refuses memory, or a rank dies.
pub fn measure(setup: &RankSetup<'_>, plan: &RunPlan, counts: StepCounts) -> Result<StepFigures> {
    let cpu = &*setup.cpu;
    let mut types = product_types(plan.of(setup.rank).step.kernels.iter().map(|kernel| kernel.rate));
    types.insert(plan.spec.precision.types.compute);
    let StepCounts { seed, warmup, steps } = counts;
    let profile = Arc::new(Profile::default());
    profile.pause(true);
    let device = setup.device.clone().profiled(Arc::clone(&profile));
    let mut stepper = Stepper::new(setup, plan, seed, device)?;
    let before = stepper.flops_per_s(cpu, &types)?;
    let Timed { step_s, losses, sent_bytes, exposed_s, launches } =
        stepper.timed(warmup, steps, &mut |_, _, _| Ok(()))?;
    let profiled = steps.min(PROFILED);
    let profile = stepper.profile(&profile, profiled)?;
    let resident_bytes_peak = resident_bytes_peak((setup.foreign_bytes)());
    // Measured again, now that the system has spread the threads over the cores.
    let mut flops_per_s = stepper.flops_per_s(cpu, &types)?;
    flops_per_s.iter_mut().for_each(|(dtype, after)| *after = after.max(before[dtype]));
    stepper.engine.group().barrier().wait()?;
    let bandwidth = peak::bandwidth(cpu, MEMORY_BYTES).context("memory to measure its bandwidth")?;
    let sent_bytes_per_s = bandwidth.copied();
    let copied_bytes_per_s = setup.copied_bytes_per_s.unwrap_or(sent_bytes_per_s);
    stepper.engine.group().barrier().wait()?;
    let disk_bytes_per_s = disk_rate(plan.spec.device.disk.clone());
    let bytes_per_s = setup.limits.map_or(bandwidth.max(), |limits| limits.bytes_per_s);
    Ok(StepFigures {
        step_s,
        losses,
        peaks: Peaks { flops_per_s, bytes_per_s, copied_bytes_per_s, sent_bytes_per_s, disk_bytes_per_s },
        profile,
        profiled,
        page_faults: stepper.page_faults,
        launches,
        sent_bytes,
        exposed_s,
        resident_bytes_peak,
        arena_bytes: plan.of(setup.rank).memory.arena_bytes,
    })
}

/// Bytes per second of the folders of disk memory, while each of the ranks uses them. None without disk memory, or where the
/// disk has no room beside it.
fn disk_rate(options: Option<DiskOptions>) -> Option<f64> {
    let options = options?;
    let task = DiskTask { options, bytes: DISK_BYTES, chunk: DISK_CHUNK, rounds: 1 };
    let figures = task.measure(&mut |_, _| {}, &mut || Ok(())).ok()?;
    Some(disk::best(&figures.both_bytes_per_s))
}

/// Random tokens and targets of step `number` (from 1) for the ranks at `data` on the data axis. Each sequence is a
/// function of the seed, the step and its place in the global batch: however that is cut and shared, it is the same.
/// With a masked model, a sequence has as many targets as a sample.
pub fn fill(batch: &mut Batch, spec: &Spec, seed: u64, number: u64, data: usize) {
    let (batch_part, vocab) = (&spec.batch, spec.model.definition.vocab());
    let seq = batch_part.seq;
    let rows = batch.tokens.chunks_mut(seq).zip(batch.targets.chunks_mut(seq));
    for (index, (tokens, targets)) in rows.enumerate() {
        let (micro_batch, row) = (index / batch_part.micro_batch_size, index % batch_part.micro_batch_size);
        let place = batch_part.first_sample(spec.mesh.axes, micro_batch, data) + row;
        let mut random = mix(mix(seed ^ number) ^ place as u64);
        for token in tokens.iter_mut().chain(targets.iter_mut()) {
            *token = below(&mut random, vocab);
        }
        let unpredicted = seq - batch_part.targets_per_sequence.min(seq);
        targets[..unpredicted].fill(NOT_PREDICTED);
    }
}

/// A token below `vocab` (Knuth's linear congruence; the upper bits).
fn below(state: &mut u64, vocab: usize) -> u32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    ((*state >> 33) % vocab as u64) as u32
}
