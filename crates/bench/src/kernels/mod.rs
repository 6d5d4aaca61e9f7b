//! Times each kernel of a training step alone, in a loop, and compares it with what the machine could do.
//!
//! Memory is that of a run: a planned arena in huge pages. A call is measured by the device itself, as in the
//! kernel table of `bench step`, with the same price.

mod calls;
mod families;
mod report;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use phalanx_cpu::Cpu;
use phalanx_cpu::pool::Pool;
use phalanx_cpu::{Options, peak};
use phalanx_drawing::report::bytes;
use phalanx_models::Gpt2;
use phalanx_plan::trace::PhaseName;
use phalanx_plan::{MemoryPlan, plan_memory};
use phalanx_tensor::profile::{KernelKey, Profile};
use phalanx_tensor::{Arena, DType, Device, Region};
use phalanx_train::{RunConfig, RunPlan, Spec};

use crate::kernel_table::{CallPrice, Peaks, product_types};
use calls::Calls;
pub use families::{FamilyRate, family_rates};
pub use report::{Columns, Labels, to_json, to_text};

/// Minimum number of calls of a kernel.
const MIN_CALLS: usize = 5;

/// Bytes to measure bandwidth with.
const MEMORY_BYTES: usize = 512 << 20;

/// The shape of a training step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// Sequences of a micro-batch.
    pub batch: usize,
    /// Tokens of each.
    pub seq: usize,
    /// Width of the model.
    pub hidden: usize,
    /// Heads of an attention.
    pub heads: usize,
    /// Rows of the token table.
    pub vocab: usize,
}

/// Options of a measurement.
pub struct KernelBench<'a> {
    /// Setting, which determines the shapes.
    pub setting: Setting,
    /// Type of the elements.
    pub dtype: DType,
    /// Numbers of threads, measured one after another.
    pub threads: Vec<usize>,
    /// Only kernels whose name and size contain one of these; all where there is none.
    pub only: &'a [String],
    /// Time for which each kernel is called repeatedly.
    pub time: Duration,
    /// Returns the device options for a number of threads.
    pub options: &'a dyn Fn(usize) -> Options,
    /// Refuses a number of bytes that the machine does not have.
    pub check_memory: &'a dyn Fn(u64) -> Result<()>,
}

/// A number of threads, and their peak rates.
#[derive(Clone, Debug, PartialEq)]
pub struct Threads {
    /// Number of threads.
    pub threads: usize,
    /// Measured in the same run.
    pub peaks: Peaks,
    /// Seconds of starting and joining empty work on two of them.
    pub fork_join_s: f64,
}

/// One kernel at one size by one number of threads.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// As in the plan.
    pub name: &'static str,
    /// For people.
    pub size: String,
    /// The price of a call, by the description of the operation.
    pub price: CallPrice,
    /// Number of calls.
    pub calls: usize,
    /// Seconds of the fastest call.
    pub min_s: f64,
    /// Seconds of the median call.
    pub median_s: f64,
}

impl KernelBench<'_> {
    /// Measures: the same kernels for each number of threads.
    ///
    /// # Errors
    /// An unknown kernel name; not enough memory.
    pub fn run(&self) -> Result<Vec<(Threads, Vec<Measured>)>> {
        let slice = self.logits_slice()?;
        self.check_names(slice)?;
        self.threads.iter().map(|threads| self.run_with(*threads, slice)).collect()
    }

    /// Rows of logits that a step makes at a time, as its own plan has them.
    fn logits_slice(&self) -> Result<usize> {
        let Setting { batch, seq, hidden, heads, vocab } = self.setting;
        let text = format!(
            "[model]\nseq = {seq}\n[batch]\nglobal = {batch}\n[precision]\ncompute = {:?}\n",
            self.dtype.name()
        );
        let config: RunConfig = toml::from_str(&text)?;
        let model = Gpt2 { layers: 1, hidden, heads, vocab, positions: seq, ..Gpt2::default() };
        let plan = RunPlan::new(Spec::new(&config, model, 0, 1)?)?;
        let step = plan.ranks[0].memory.phase(PhaseName::Step).context("the plan of a step")?;
        let slice =
            step.slots.iter().find(|slot| slot.name == "head.logits_slice").context("a slice of logits")?;
        Ok(slice.bytes as usize / self.dtype.bytes() / vocab)
    }

    fn wants(&self, name: &str, size: &str) -> bool {
        let label = format!("{name} {size}");
        self.only.is_empty() || self.only.iter().any(|only| label.contains(only.as_str()))
    }

    /// Checks that every requested name exists, on a device that computes nothing.
    fn check_names(&self, slice: usize) -> Result<()> {
        let mut labels = Vec::new();
        Calls::new(&Device::meta(1), self.setting, self.dtype, slice)
            .each(&mut |name, size, _| labels.push(format!("{name} {size}")));
        for only in self.only {
            if !labels.iter().any(|label| label.contains(only.as_str())) {
                bail!("--only {only}: no kernel has this name; the kernels are:\n  {}", labels.join("\n  "));
            }
        }
        Ok(())
    }

    /// The memory of the calls: the same code on the device that only records.
    fn memory(&self, threads: usize, slice: usize) -> Result<MemoryPlan> {
        let meta = Device::meta(threads);
        meta.phase(PhaseName::Init, || drop(Calls::new(&meta, self.setting, self.dtype, slice)));
        let plan = plan_memory(&meta.take_trace(0))?;
        (self.check_memory)(plan.arena_bytes)?;
        Ok(plan)
    }

    fn run_with(&self, threads: usize, slice: usize) -> Result<(Threads, Vec<Measured>)> {
        let options = (self.options)(threads);
        let cpu = Cpu::with_options(options)?;
        let before = peak::flops_per_s(&cpu, self.dtype);
        let bandwidth = peak::bandwidth(&cpu, MEMORY_BYTES).context("memory to measure its bandwidth")?;
        let plan = self.memory(threads, slice)?;
        let region = Region::anonymous(plan.arena_bytes as usize)
            .and_then(|region| cpu.populate(&region).map(|()| region))
            .with_context(|| format!("{} of memory", bytes(plan.arena_bytes)))?;
        let profile = Arc::new(Profile::default());
        let device =
            Device::new(Arc::clone(&cpu) as _, Arena::replaying(plan, region)).profiled(Arc::clone(&profile));
        let measured = device.phase(PhaseName::Init, || {
            let mut measured = Vec::new();
            Calls::new(&device, self.setting, self.dtype, slice).each(&mut |name, size, call| {
                if self.wants(name, &size) {
                    measured.push(self.measure(&profile, name, size, call));
                }
            });
            measured
        });
        // Again, now that the system has spread the threads over the cores.
        let mut flops_per_s = BTreeMap::from([(self.dtype, before)]);
        for dtype in product_types(measured.iter().map(|kernel| kernel.price.rate)) {
            let after = peak::flops_per_s(&cpu, dtype);
            flops_per_s.entry(dtype).and_modify(|before| *before = before.max(after)).or_insert(after);
        }
        let fork_join_s = fork_join_s(&Pool::new(threads, options.spin)?);
        let (copied_bytes_per_s, sent_bytes_per_s) = (bandwidth.copied(), bandwidth.copied());
        let peaks = Peaks {
            flops_per_s,
            bytes_per_s: bandwidth.max(),
            copied_bytes_per_s,
            sent_bytes_per_s,
            disk_bytes_per_s: None,
        };
        Ok((Threads { threads, peaks, fork_join_s }, measured))
    }

    fn measure(
        &self,
        profile: &Profile,
        name: &'static str,
        size: String,
        call: &mut dyn FnMut(),
    ) -> Measured {
        let mut timed = || {
            profile.take();
            call();
            let (key, time) =
                profile.take().into_iter().find(|(key, _)| key.name == name).expect("it was called");
            (key, time.time.as_secs_f64())
        };
        let (KernelKey { flops, bytes, rate, .. }, _) = timed();
        let begin = Instant::now();
        let mut seconds = Vec::new();
        while seconds.len() < MIN_CALLS || begin.elapsed() < self.time {
            seconds.push(timed().1);
        }
        seconds.sort_by(f64::total_cmp);
        let (min_s, median_s) = (seconds[0], seconds[seconds.len() / 2]);
        let price = CallPrice { flops, bytes, rate };
        Measured { name, size, price, calls: seconds.len(), min_s, median_s }
    }
}

/// Seconds of a run of two empty tasks.
fn fork_join_s(pool: &Pool) -> f64 {
    const RUNS: u32 = 1000;
    let one = |_| {
        let start = Instant::now();
        (0..RUNS).for_each(|_| pool.run(2, &|_| ()));
        start.elapsed().as_secs_f64() / f64::from(RUNS)
    };
    (0..20).map(one).fold(f64::MAX, f64::min)
}
