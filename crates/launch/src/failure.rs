//! Why a job ended early.

use std::process::ExitStatus;

use phalanx_collectives::{Blame, FlightEvent};

/// Why a job ended early.
#[derive(Debug)]
pub struct Failure {
    /// The rank that was the cause; of a host that was lost, its first rank.
    pub rank: usize,
    /// The rank, and its host if there are several: `rank 2 on host 1 (node2)`.
    pub place: Box<str>,
    /// Its error, or how its process ended.
    pub reason: String,
    /// Its last activity.
    pub activity: Box<str>,
    /// Exit status of its process; `None` if SIGKILL has not ended it, or if it ran on another host.
    pub status: Option<ExitStatus>,
    /// Ranks whose processes SIGKILL has not ended.
    pub left: Box<[usize]>,
    /// Number of ranks of the job.
    pub world_size: usize,
    /// For each rank of this host, what it did last.
    pub flights: Box<[(usize, Vec<FlightEvent>)]>,
    /// Cause of the failure beside the rank.
    pub(crate) blame: Blame,
    /// True if the launcher of the rank's host reports it, which knows best.
    pub(crate) is_first_hand: bool,
    /// True if another launcher has reported it.
    pub(crate) is_remote: bool,
    /// True if the whole host of the rank was lost.
    pub(crate) host_lost: bool,
}

impl Failure {
    pub(crate) fn new(rank: usize, reason: String, activity: String) -> Failure {
        Failure {
            rank,
            place: format!("rank {rank}").into(),
            reason,
            activity: activity.into(),
            status: None,
            left: Box::default(),
            world_size: 0,
            flights: Box::default(),
            blame: Blame::Rank,
            is_first_hand: true,
            is_remote: false,
            host_lost: false,
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} failed: {}\nit was at: {}", self.place, self.reason, self.activity)
    }
}

impl std::error::Error for Failure {}
