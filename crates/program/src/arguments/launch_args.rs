//! The arguments of `launch`.

use std::path::PathBuf;

use clap::Args;

use crate::arguments::counts::{self, whole};
use crate::arguments::train_args::TrainArgs;

/// Trains a model on several hosts
///
/// Run it once on every host, with the number of hosts, the number of this host (from 0), and an address of host 0 at which
/// the launchers meet; or once with --hostfile, which starts the launchers of all hosts over ssh. Host 0 plans the run and
/// writes the run folder, which all hosts must see under the same path. --nproc is the number of ranks of this host.
///
/// The launchers and ranks of a job know each other by a secret. Host 0 makes it in --secret-file if the file is not there; the
/// other hosts need the same file. Traffic between hosts is encrypted and authenticated.
///
/// If a rank or a host fails, every launcher says within a second which one, how, and what it was doing, and ends its ranks.
/// Ctrl-C on any host finishes the step on all of them and saves.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    On two hosts that share /shared, with 4 ranks each:\n    \
    node1$ phalanx launch --nnodes 2 --node-rank 0 --rendezvous node1:29400 --nproc 4 \\\n             \
             --secret-file /shared/job.secret my.toml --run /shared/runs/mine\n    \
    node2$ phalanx launch --nnodes 2 --node-rank 1 --rendezvous node1:29400 --nproc 4 \\\n             \
             --secret-file /shared/job.secret my.toml --run /shared/runs/mine\n\n  \
    The same over ssh, with a hostfile of lines `node1 slots=4`:\n    \
    phalanx launch --hostfile hosts.txt my.toml --run /shared/runs/mine\n    \
    phalanx launch --hostfile hosts.txt --exclude node2:3 my.toml --run /shared/runs/mine\n\n  \
    To try it on one machine, which plays two hosts of two ranks:\n    \
    phalanx launch --hosts 2 --nproc 2 examples/quickstart.toml\n\n\
    A run is continued with the same command and --resume. docs/launch.md has the whole story.")]
pub struct LaunchArgs {
    #[command(flatten)]
    pub train: TrainArgs,
    /// Number of hosts
    #[arg(long, value_name = "M", requires_all = ["node_rank", "rendezvous"], value_parser = whole::<usize>(1..=counts::JOB_RANKS))]
    pub nnodes: Option<usize>,
    /// Number of this host, from 0
    #[arg(long, value_name = "R", requires = "nnodes", value_parser = whole::<usize>(0..=counts::JOB_RANKS - 1))]
    pub node_rank: Option<usize>,
    /// Where host 0 listens, and the others find it
    #[arg(long, value_name = "HOST:PORT")]
    pub rendezvous: Option<String>,
    /// Start the launchers of all hosts in this file over ssh; its lines are `host slots=n`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["nnodes", "secret_file"])]
    pub hostfile: Option<PathBuf>,
    /// With --hostfile: only these hosts, or some of their slots, as node1@node2:0,2
    #[arg(long, value_name = "HOSTS", default_value = "", requires = "hostfile")]
    pub include: String,
    /// With --hostfile: not these hosts, or not some of their slots
    #[arg(long, value_name = "HOSTS", default_value = "", requires = "hostfile")]
    pub exclude: String,
    /// Play so many hosts on this machine, each with --nproc ranks
    #[arg(long, value_name = "M", conflicts_with_all = ["nnodes", "hostfile", "secret_file", "rendezvous"], value_parser = whole::<usize>(1..=counts::JOB_RANKS))]
    pub hosts: Option<usize>,
    /// Read the secret from standard input, and end with it (set by --hostfile and --hosts)
    #[arg(long, hide = true, requires = "nnodes", conflicts_with = "secret_file")]
    pub from_stdin: bool,
}
