//! Ranks as processes: starts those of one host, watches them, and ends the job on all hosts together.
//!
//! A launcher makes the memory that the ranks share (a [`HostJob`](phalanx_collectives::HostJob)), starts one process for
//! each rank, which inherits this memory as descriptors, and holds a pidfd of each ([`RankProcesses`]). It waits for
//! events: a process ends, the caller asks the ranks to stop, or it is time to search for ranks that stand still
//! ([`StallDetector`]). When a rank dies, ends before its work is done, reports an error or stalls, the launcher aborts the
//! job in the name of the rank that was the cause, gives the others a second to end, kills those that are left, and
//! returns the [`Failure`]. The system kills the ranks when the launcher dies ([`begin_rank`]).
//!
//! Several hosts have a launcher each. They meet and prove that they know the job's secret, and then tell each other what
//! their ranks do and how the job ends ([`ControlPlane`]). Ranks that another launcher has started are found in variables
//! ([`foreign`]); their processes find each other with [`LocalGroup`].
//!
//! The program and the library start their ranks with this crate. What differs between them, they say with [`Hooks`].
#![forbid(unsafe_code)]

mod control;
mod exit_status;
mod failure;
mod foreign;
mod hooks;
mod hostfile;
mod local;
mod peers;
mod processes;
mod rank;
mod stall;
mod stalled;
mod waiting;
mod watch;

pub use control::{
    ControlPlane, Event, FailureReport, HostInfo, Introduction, Meeting, Message, Met, Parting, connect,
    create_secret, from_digits, read_secret, to_digits,
};
pub use failure::Failure;
pub use foreign::{
    CHOICE as LAUNCHER_CHOICE, EnvironmentError, Foreign, ForeignLauncher, ForeignRank, RENDEZVOUS, Starter,
    Variables, expand_nodes, foreign, host_and_port,
};
pub use hooks::Hooks;
pub use hostfile::{HostSlots, filter_hosts, parse_hostfile};
pub use local::{LocalGroup, LocalHello, LocalLeader, LocalMember};
pub use peers::{lost_host, receive_program};
pub use processes::{RankProcesses, own_program};
pub use rank::begin_rank;
pub use stall::{Observation, StallDetector};
pub use waiting::tell_while;
