//! Command-line arguments of `phalanx bench strategies`, and their help.

use std::path::PathBuf;

use clap::Args;

use crate::arguments::counts::{self, whole};

/// Compares the strategies of parallelism on one model
///
/// Runs the model of CONFIG in every strategy: on one device, as DataParallel (devices of one process, outputs gathered on
/// the first, or each with its own loss), as replicas (DDP) with ZeRO 1 to 3, tensor parallel with and without sequence
/// parallelism, model parallel, in a pipeline, with asynchronous updates. Each computes the same tokens with the same
/// number of threads: [parallel] and batch.micro of CONFIG are replaced. Prints memory by rank and category, planned
/// and measured, step time, bytes moved and bubble, and checks that the gradients agree up to rounding. A strategy that
/// cannot run is a row that says why.
///
/// Then the classic comparison: a small BERT (examples/bert_classic.toml) on 2 ranks, model parallel against a pipeline
/// of 4 micro-batches.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx bench strategies examples/quickstart.toml\n  \
    phalanx bench strategies examples/gpt2_mini.toml --svg strategies.svg --bert-steps 0\n  \
    phalanx bench strategies examples/quickstart.toml --nproc 4 --only ddp,zero-3,pipeline-1f1b\n  \
    phalanx bench strategies examples/quickstart.toml --json | jq '.ways[] | [.way, .step_s_median]'\n\n\
    Strategies: one-device, data-parallel, data-parallel-loss, ddp, zero-1, zero-2, zero-3, tensor, tensor-sequence,\n\
    model-parallel, pipeline-1f1b, pipeline-zb-h1, asynchronous.\n\
    Threads are this machine's cores over the ranks, or train.threads a rank; one device has those of all ranks.")]
pub struct BenchStrategiesArgs {
    /// Configuration (TOML)
    pub config: PathBuf,
    /// Sets one key of the configuration, as `model.layers=4`; may be repeated
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    pub set: Vec<String>,
    /// Ranks of every strategy except one device
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = whole::<usize>(1..=counts::JOB_RANKS))]
    pub nproc: usize,
    /// Steps that are timed
    #[arg(long, default_value_t = 5, value_name = "K", value_parser = whole::<usize>(1..=counts::TIMES))]
    pub steps: usize,
    /// Steps before the first that is timed
    #[arg(long, default_value_t = 1, value_name = "W", value_parser = whole::<usize>(0..=counts::TIMES))]
    pub warmup: usize,
    /// Only these strategies, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "STRATEGY,...")]
    pub only: Vec<String>,
    /// Writes memory and step times as a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Steps of each run of the classic comparison; 0 leaves it out. 250, or 0 with --only
    #[arg(long, value_name = "K", value_parser = whole::<usize>(0..=counts::TIMES))]
    pub bert_steps: Option<usize>,
    /// Print figures as JSON
    #[arg(long)]
    pub json: bool,
}
