//! `phalanx bench kernels`: every kernel of a step, alone and again and again, beside the machine's limits.

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use crate::args::{BenchKernelsArgs, BenchSetting};
use crate::environment::Environment;
use crate::kernel_bench::{Measured, Plan, Setting, Threads};
use crate::kernel_table::percent;
use crate::machine;
use crate::output::{print, print_json};
use crate::report::Table;

/// Measures and prints.
///
/// # Errors
/// A name that is no kernel's; memory that there is not.
pub fn bench_kernels(args: &BenchKernelsArgs, environment: Environment) -> Result<()> {
    let all = args.threads.unwrap_or_else(machine::cores);
    if all == 0 {
        bail!("--threads 0: expected at least 1 thread");
    }
    let mut threads = vec![1, all];
    threads.dedup();
    let plan = Plan {
        setting: setting(args.setting),
        dtype: args.dtype.dtype(),
        threads,
        only: &args.only,
        time: Duration::from_millis(args.ms),
    };
    let columns = plan.run(environment)?;
    match args.json {
        true => print_json(&to_json(args, environment, &columns)),
        false => Ok(print(&to_text(args, environment, &columns))?),
    }
}

fn setting(name: BenchSetting) -> Setting {
    match name {
        BenchSetting::Mini => Setting { batch: 8, seq: 256, hidden: 512, heads: 8, vocab: 50_257 },
        BenchSetting::Small => Setting { batch: 4, seq: 256, hidden: 768, heads: 12, vocab: 50_257 },
        BenchSetting::Nano => Setting { batch: 12, seq: 64, hidden: 128, heads: 4, vocab: 65 },
        BenchSetting::Tiny => Setting { batch: 2, seq: 16, hidden: 32, heads: 4, vocab: 100 },
    }
}

type Columns = [(Threads, Vec<Measured>)];

fn to_json(args: &BenchKernelsArgs, environment: Environment, columns: &Columns) -> Value {
    let run = |threads: &Threads, kernel: &Measured| {
        let Measured { flops, bytes, calls, min_s, median_s, .. } = kernel;
        let floor_s = threads.peaks.floor_s(*flops, *bytes);
        json!({
            "threads": threads.threads, "calls": calls, "s_min": min_s, "s_median": median_s,
            "flops_per_s": *flops as f64 / min_s, "bytes_per_s": *bytes as f64 / min_s, "floor_s": floor_s,
            "floor_share": floor_s / min_s,
        })
    };
    let kernel = |(index, kernel): (usize, &Measured)| {
        let runs: Vec<Value> = columns.iter().map(|(threads, all)| run(threads, &all[index])).collect();
        json!({
            "name": kernel.name, "size": kernel.size, "flops": kernel.flops, "bytes": kernel.bytes, "runs": runs,
        })
    };
    let threads = |(threads, _): &(Threads, _)| {
        let Threads { threads, peaks, fork_join_s } = threads;
        json!({ "threads": threads, "peaks": peaks, "fork_join_s": fork_join_s })
    };
    json!({
        "setting": args.setting.name(), "dtype": args.dtype.dtype().name(), "isa": environment.isa().name(),
        "threads": columns.iter().map(threads).collect::<Vec<_>>(),
        "kernels": columns[0].1.iter().enumerate().map(kernel).collect::<Vec<_>>(),
    })
}

fn to_text(args: &BenchKernelsArgs, environment: Environment, columns: &Columns) -> String {
    let (dtype, isa) = (args.dtype.dtype().name(), environment.isa().name());
    let mut text = format!(
        "{} in {dtype}, {isa}; rates and shares are those of the fastest call\n",
        args.setting.name()
    );
    let mut headings = vec!["kernel".to_string()];
    for (Threads { threads, peaks, fork_join_s }, _) in columns {
        text.push_str(&format!(
            "{threads}t: peaks {:.1} GFLOP/s, {:.1} GB/s of memory; {:.2} us a fork and join\n",
            peaks.flops_per_s / 1e9,
            peaks.bytes_per_s / 1e9,
            fork_join_s * 1e6
        ));
        headings.extend(["ms", "median", "rate", "of floor"].map(|word| format!("{threads}t {word}")));
    }
    headings.extend(columns.get(1).map(|_| "gain".to_string()));
    let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    for (index, first) in columns[0].1.iter().enumerate() {
        let mut cells = vec![format!("{} {}", first.name, first.size)];
        for (Threads { peaks, .. }, all) in columns {
            let Measured { flops, bytes, min_s, median_s, .. } = all[index];
            cells.extend([
                ms(min_s),
                ms(median_s),
                peaks.rate(flops, bytes, min_s).to_string(),
                percent(peaks.floor_s(flops, bytes) / min_s),
            ]);
        }
        cells.extend(columns.get(1).map(|(_, all)| format!("x{:.2}", first.min_s / all[index].min_s)));
        table.row(cells);
    }
    text + &table.to_string()
}

/// Milliseconds, short ones to a tenth of a microsecond.
fn ms(seconds: f64) -> String {
    let digits = if seconds < 1e-3 { 4 } else { 3 };
    format!("{:.digits$}", seconds * 1e3)
}
