//! Command-line arguments of `phalanx bench memory`, and their help.

use std::path::PathBuf;

use clap::Args;

use crate::arguments::counts::{self, real, whole};
use crate::arguments::overrides::Overrides;

/// Compares placements of chunks under several budgets of device memory
///
/// Runs steps on random tokens with everything on the device, in host memory, on disk (with memory.nvme_path), and with
/// memory.placement = "auto" under shares of the device memory that the first needs. Writes into a folder: table.md and
/// memory.json (peaks, bytes moved, step times); budgets.svg (step time and bytes moved against the budget); and for each run
/// timeline-RUN.svg, what each memory holds over a step and when each stream works, planned and measured. A budget that is too small for any placement is
/// a row that says so.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx bench memory examples/gpt2_mini.toml --set parallel.zero=3 --set device.kind=simulated\n  \
    phalanx bench memory examples/gpt2_mini.toml --set memory.nvme_path=/mnt/nvme --budgets 75,50\n  \
    phalanx bench memory examples/quickstart.toml --nproc 2 --steps 3 --out sweep --json | jq '.runs[].step_s_median'")]
pub struct BenchMemoryArgs {
    /// Configuration (TOML)
    pub config: PathBuf,
    #[command(flatten)]
    pub overrides: Overrides,
    /// Budgets of auto, in percent of the device memory that everything on the device needs
    #[arg(long, value_delimiter = ',', default_values_t = [100.0, 75.0, 50.0, 25.0], value_name = "PERCENT,...", value_parser = real::<f64>(0.0..=counts::PERCENT))]
    pub budgets: Vec<f64>,
    /// Steps that are timed
    #[arg(long, default_value_t = 5, value_name = "K", value_parser = whole::<usize>(1..=counts::TIMES))]
    pub steps: usize,
    /// Steps before the first that is timed
    #[arg(long, default_value_t = 1, value_name = "W", value_parser = whole::<usize>(0..=counts::TIMES))]
    pub warmup: usize,
    /// Rounds in which all placements take turns; each has K timed steps
    #[arg(long, default_value_t = 1, value_name = "R", value_parser = whole::<usize>(1..=counts::TIMES))]
    pub rounds: usize,
    /// Folder for the table and the plots; it is made if it is not there
    #[arg(long, default_value = "bench-memory", value_name = "DIR")]
    pub out: PathBuf,
    /// Print figures as JSON
    #[arg(long)]
    pub json: bool,
}
