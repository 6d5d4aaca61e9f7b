//! The arguments that say how hosts find and reach each other.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::arguments::counts::{self, whole};

/// TCP connections between two ranks of different hosts, unless --streams says otherwise.
pub const STREAMS: usize = 2;

/// Options by which hosts find and reach each other; they have no effect on one host.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Several hosts")]
pub struct NetworkArgs {
    /// File with the job's secret (mode 0600), which host 0 makes for the time in which the hosts meet if it is not there; or
    /// the variable PHALANX_SECRET_FILE
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// Send what ranks of different hosts exchange as it is: neither encrypted nor protected against changes on the way, only for
    /// networks you trust. Hosts authenticate each other, and launchers encrypt what they say, all the same
    #[arg(long)]
    pub plaintext: bool,
    /// What carries bytes between the ranks of different hosts; mpi needs a build with it, and mpirun or srun. MPI's traffic is
    /// not encrypted
    #[arg(long, value_enum, value_name = "TRANSPORT", default_value_t = TransportChoice::Auto)]
    pub transport: TransportChoice,
    /// TCP connections between two ranks of different hosts; 2 by default
    #[arg(long, value_name = "N", value_parser = whole::<u16>(1..=counts::STREAMS))]
    pub streams: Option<u16>,
    /// Seconds in which all hosts have to come to the rendezvous
    #[arg(long, value_name = "S", default_value_t = 300, value_parser = whole::<u64>(1..=counts::DAY_S))]
    pub join_timeout: u64,
}

impl NetworkArgs {
    /// TCP connections between two ranks of different hosts.
    pub fn streams(&self) -> usize {
        self.streams.map_or(STREAMS, usize::from)
    }
}

/// Transport between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportChoice {
    /// MPI if mpirun or srun has started the ranks for the MPI that this build has, else TCP
    Auto,
    /// TCP, encrypted unless --plaintext is given
    Tcp,
    /// MPI
    Mpi,
}

impl TransportChoice {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            TransportChoice::Auto => "auto",
            TransportChoice::Tcp => "tcp",
            TransportChoice::Mpi => "mpi",
        }
    }
}
