//! Runs on several hosts: one launcher per host, of which that of host 0 leads. It prepares and plans the run, sends the task
//! and the plans of all ranks to the others ([`protocol`]), writes the run folder and reports the end ([`team`]). Each
//! launcher starts the ranks of its own host and watches them; the others follow what the leader says ([`member`]).
//!
//! Another launcher (srun, mpirun, torchrun) may have started a process for each rank: then the first process of each host is its launcher,
//! and the others start their own rank for it (`commands::train_joined`).
//!
//! Ranks of several hosts exchange bytes over TCP, or through MPI if mpirun has started them ([`transport`]).
//!
//! [`phalanx_launch`] defines how launchers find and trust each other, and how they tell each other of failures.

mod meet;
mod member;
mod protocol;
pub mod shares;
mod supervise;
mod team;
mod transport;

pub use meet::{HostPlace, SecretSource, meet};
pub use member::{How, follow};
pub use supervise::{LostHost, lead_from_stdin, supervise};
pub use team::{Between, Team, is_token};
pub use transport::{Transport, choose, without_launcher};
