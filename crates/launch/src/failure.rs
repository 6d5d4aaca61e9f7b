//! Why a job ended early.

use std::process::ExitStatus;

/// Why a job ended early.
#[derive(Debug)]
pub struct Failure {
    /// The rank that was the cause.
    pub rank: usize,
    /// Its error, or how its process ended.
    pub reason: String,
    /// Its last activity.
    pub activity: String,
    /// How its process ended; `None` if SIGKILL has not ended it.
    pub status: Option<ExitStatus>,
    /// Ranks whose processes SIGKILL has not ended.
    pub left: Vec<usize>,
}

impl Failure {
    pub(crate) fn new(rank: usize, reason: String, activity: String) -> Failure {
        Failure { rank, reason, activity, status: None, left: Vec::new() }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} failed: {}\nit was at: {}", self.rank, self.reason, self.activity)
    }
}

impl std::error::Error for Failure {}
