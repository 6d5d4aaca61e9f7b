//! The arguments of `plan --search`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use crate::arguments::counts::{self, whole};

/// What is searched, and within which limits.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("searching").args(["search", "min_devices"])))]
pub struct SearchArgs {
    /// Search for the fastest configuration that fits: meshes, ZeRO stages, schedules, micro-batches, checkpointing, placements and types on
    /// the wire, on the devices of --machine and --hosts (or --nproc)
    #[arg(long, conflicts_with_all = ["schedule", "chunks", "placement", "chunk_program"])]
    pub search: bool,
    /// Find how many devices of --machine hold the run at least, within --keep and --only, and one configuration that fits them
    #[arg(long, conflicts_with_all = ["search", "hosts", "nproc", "schedule", "chunks", "placement", "chunk_program"])]
    pub min_devices: bool,
    /// Plan for so many hosts of --machine, with all their devices
    #[arg(long, value_name = "N", conflicts_with_all = ["nproc", "schedule"], value_parser = whole::<usize>(1..=counts::RANKS))]
    pub hosts: Option<usize>,
    /// With --search: keep a key at a value, as parallel.tensor=8, or at that of CONFIG, as parallel.tensor; may be repeated, also with
    /// several values of a key
    #[arg(long, value_name = "KEY[=VALUE]", requires = "searching")]
    pub keep: Vec<String>,
    /// With --search: try other values of these keys alone, and keep all others as CONFIG has them
    #[arg(long, value_name = "KEY,...", requires = "searching", value_delimiter = ',')]
    pub only: Vec<String>,
    /// With --search: let batch.global be one of MIN, twice that and so on, up to MAX; the most tokens a second win
    #[arg(long, value_name = "MIN..MAX", requires = "search", value_parser = parse_range)]
    pub global: Option<(usize, usize)>,
    /// Print the formulas that people quote beside the exact figures, with what each difference is
    #[arg(long, conflicts_with_all = ["search", "schedule", "chunks", "placement", "chunk_program", "json"])]
    pub explain: bool,
    /// With --machine: show what the streams of a rank of each pipeline stage do in a step; with FILE, write it as a picture (.svg) or as
    /// events for Perfetto and Chrome's tracing (.json)
    #[arg(long, value_name = "FILE", num_args = 0..=1, requires = "machine",
          conflicts_with_all = ["search", "schedule", "chunks", "placement", "chunk_program", "sweep"])]
    pub timeline: Option<Option<PathBuf>>,
    /// Plan for several values of a key, as batch.micro=1,2,4,8, and compare memory and, with --machine, the step
    #[arg(long, value_name = "KEY=A,B,...",
          conflicts_with_all = ["search", "schedule", "chunks", "placement", "chunk_program", "explain"])]
    pub sweep: Option<String>,
    /// With --search or --min-devices: write the configuration that was found to a file that does not exist yet
    #[arg(long, value_name = "FILE", requires = "searching")]
    pub write: Option<PathBuf>,
}

fn parse_range(text: &str) -> Result<(usize, usize), String> {
    let range = text.split_once("..").and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
    let max = counts::RANKS as usize * 4;
    range
        .filter(|(low, high)| 1 <= *low && low <= high && *high <= max)
        .ok_or_else(|| format!("expected two numbers of sequences, as 256..1024, of at most {max}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_ascend() {
        assert_eq!(parse_range("8..64"), Ok((8, 64)));
        for wrong in ["8", "64..8", "0..8", "a..b", "8..99999999999"] {
            assert!(parse_range(wrong).unwrap_err().contains("expected"), "{wrong}");
        }
    }
}
