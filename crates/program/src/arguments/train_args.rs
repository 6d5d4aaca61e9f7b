//! The arguments of `train`, which `launch` has, too.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::arguments::counts::{self, whole};
use crate::arguments::network_args::NetworkArgs;
use crate::arguments::overrides::Overrides;

/// Trains a model on text
///
/// Plans the run and shows the plan, then trains: one rank in this process, or N ranks as processes of
/// this machine. Ctrl-C finishes the step, saves a checkpoint and prints how to resume (exit code 130); a
/// second Ctrl-C ends the run at once. SIGTERM and SIGHUP do the same, SIGUSR1,
/// SIGUSR2 and SIGXCPU the first. Exit code 0 means that the last step was reached.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx train examples/quickstart.toml\n  \
    phalanx train examples/quickstart.toml --data my-texts/ --run runs/mine\n  \
    phalanx train examples/quickstart.toml --nproc 4 --set parallel.zero=3 --set train.steps=200\n  \
    phalanx train --run runs/quickstart --resume\n  \
    phalanx train --run runs/quickstart --resume --unset memory.placement --set train.steps=400\n  \
    phalanx train examples/quickstart.toml --deepspeed ds_config.json\n  \
    phalanx train examples/quickstart.toml --json | jq .loss\n  \
    srun -n 8 phalanx train my.toml                   one process per rank: srun, mpirun or torchrun\n\n\
    For several hosts see phalanx launch --help. Started by srun, mpirun or torchrun, each process is the rank that their\n\
    variables say.\n\
    The run folder holds config.toml (resolved), plan.json, memory.json, metrics.jsonl and checkpoints/.\n\
    One process at a time works in it.\n\
    On --resume the configuration is the stored one with what CONFIG, --set and --unset change since; the mesh,\n\
    its schedule, ZeRO stage, chunks, threads and micro-batches may change freely.\n\n\
    mfu is model FLOPs utilisation: the share of the peak, measured at the start, that the model's matrix\n\
    products achieve; hfu counts those that checkpointing computes again, too.")]
pub struct TrainArgs {
    /// Configuration (TOML); may be left out with --resume --run
    #[arg(required_unless_present = "resume")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub overrides: Overrides,
    /// Text files, JSON files or folders, instead of data.text
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// Run folder; runs/NAME-of-the-configuration when left out
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,
    /// Resume from the newest checkpoint of the run folder
    #[arg(long)]
    pub resume: bool,
    /// Print errors only
    #[arg(long)]
    pub quiet: bool,
    /// Print the lines of metrics.jsonl as they are written, and one at the end
    #[arg(long, conflicts_with = "quiet")]
    pub json: bool,
    /// Do not bind each rank to cores of its own
    #[arg(long)]
    pub no_pin: bool,
    /// When a rank or a host fails, start all ranks again from the newest checkpoint, so many times
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<usize>(0..=counts::TIMES))]
    pub max_restarts: usize,
    /// With --max-restarts: go on with fewer ranks if need be, down to this many
    #[arg(long, value_name = "N", requires = "max_restarts", value_parser = whole::<usize>(1..=counts::RANKS))]
    pub min_nproc: Option<usize>,
    #[command(flatten)]
    pub network: NetworkArgs,
    /// Run ranks as threads of this process (for tests)
    #[arg(long, hide = true)]
    pub threads_as_ranks: bool,
}

impl TrainArgs {
    /// Output of the run.
    pub fn show(&self) -> Show {
        match (self.quiet, self.json) {
            (true, _) => Show::Nothing,
            (false, true) => Show::Json,
            (false, false) => Show::Progress,
        }
    }
}

/// Output of a training run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Show {
    /// Plan, progress and summary, for users.
    Progress,
    /// The lines of `metrics.jsonl` on standard output, and one line at the end: for scripts.
    Json,
    /// Errors only.
    Nothing,
}
