//! `phalanx bench kernels`: every kernel of a step, alone and again and again, beside the machine's limits.

use std::time::Duration;

use anyhow::{Result, bail};
use phalanx_bench::kernels::{KernelBench, Labels, Setting, to_json, to_text};

use crate::arguments::bench_args::{BenchKernelsArgs, BenchSetting};
use crate::host::environment::Environment;
use crate::host::machine;
use crate::host::output::{print, print_json};
use phalanx_drawing::report::bytes;

/// Measures and prints.
///
/// # Errors
/// An unknown kernel name; not enough memory.
pub fn bench_kernels(args: &BenchKernelsArgs, environment: Environment) -> Result<()> {
    let all = args.threads.unwrap_or_else(machine::cores);
    let mut threads = vec![1, all];
    threads.dedup();
    let bench = KernelBench {
        setting: setting(args.setting),
        dtype: args.dtype.dtype(),
        threads,
        only: &args.only,
        time: Duration::from_millis(args.ms),
        options: &|threads| environment.options(threads),
        check_memory: &check_memory,
    };
    let columns = bench.run()?;
    let (setting, dtype, isa) = (args.setting.name(), args.dtype.dtype(), environment.isa().name());
    let labels = Labels { setting, dtype, isa };
    match args.json {
        true => print_json(&to_json(&labels, &columns)),
        false => Ok(print(&to_text(&labels, &columns))?),
    }
}

/// Refuses more bytes than this machine has available.
fn check_memory(needed: u64) -> Result<()> {
    if let Some(available) = machine::available().filter(|available| needed > available.bytes) {
        bail!("this needs {}, and {available}: give a smaller --setting", bytes(needed));
    }
    Ok(())
}

fn setting(name: BenchSetting) -> Setting {
    match name {
        BenchSetting::Mini => Setting { batch: 8, seq: 256, hidden: 512, heads: 8, vocab: 50_257 },
        BenchSetting::Small => Setting { batch: 4, seq: 256, hidden: 768, heads: 12, vocab: 50_257 },
        BenchSetting::Nano => Setting { batch: 12, seq: 64, hidden: 128, heads: 4, vocab: 65 },
        BenchSetting::Tiny => Setting { batch: 2, seq: 16, hidden: 32, heads: 4, vocab: 100 },
    }
}
