//! A rank's share of its job: the control block, the memory that peers read, and the ways in which a job ends.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

use crate::error::{Blame, CollectiveError};
use crate::shared_memory::control::{Abort, Control};
use crate::shared_memory::memory::Memory;
use crate::shared_memory::rank_cell::Life;

/// A rank's share of the job, alive until its endpoint and its groups are dropped.
pub(crate) struct Host {
    pub(crate) control: Arc<Control>,
    pub(crate) memory: Memory,
    pub(crate) rank: usize,
    /// The world ranks of this host.
    pub(crate) ranks: Range<usize>,
    /// The thread that notes steps: while it waits, the rank makes no progress. Other threads may wait for messages
    /// that are not due yet. Unknown before the first note, when there is only one thread.
    main: OnceLock<ThreadId>,
}

impl Host {
    pub(crate) fn new(control: Arc<Control>, memory: Memory, rank: usize, ranks: Range<usize>) -> Arc<Host> {
        let cell = control.rank(rank);
        cell.sign();
        cell.life.store(Life::JOINED, Ordering::Release);
        Arc::new(Host { control, memory, rank, ranks, main: OnceLock::new() })
    }

    /// Notes the step that the calling thread, this rank's main thread, begins.
    pub(crate) fn note_step(&self, step: u64) {
        self.main.get_or_init(|| std::thread::current().id());
        let cell = self.control.rank(self.rank);
        cell.step.store(step + 1, Ordering::Relaxed);
        cell.sign();
        self.control.flight(self.rank).step(step);
    }

    /// The reason why the job has ended, if it has.
    pub(crate) fn aborted(&self) -> Result<(), CollectiveError> {
        if !self.control.is_aborted() {
            return Ok(());
        }
        match self.control.aborted() {
            Some(Abort { blame: Blame::Disagreement, reason, .. }) => {
                Err(CollectiveError::Disagreement { report: reason })
            }
            Some(Abort { blame: Blame::Link { peer }, rank, reason: report }) => {
                Err(CollectiveError::Cut { rank, peer: peer.into(), report })
            }
            Some(Abort { rank, reason, .. }) => Err(CollectiveError::Aborted { rank, reason }),
            None => Ok(()),
        }
    }

    /// Runs `wait`, in which this thread waits for a call of `channel`. If this is the main thread, other ranks can see
    /// that it waits.
    pub(crate) fn blocked_on<T>(&self, channel: usize, wait: impl FnOnce() -> T) -> T {
        if self.main.get().is_some_and(|main| *main != std::thread::current().id()) {
            return wait();
        }
        let cell = self.control.rank(self.rank);
        cell.block_on(Some(channel));
        let result = wait();
        cell.block_on(None);
        result
    }

    /// Ends the job with this rank as the cause.
    pub(crate) fn abort(&self, reason: &str) -> CollectiveError {
        self.control.abort(Abort { rank: self.rank, blame: Blame::Rank, reason: reason.to_string() });
        CollectiveError::Aborted { rank: self.rank, reason: reason.to_string() }
    }

    /// Ends the job because a call failed, and passes its reason to all ranks.
    pub(crate) fn abort_because(&self, error: &CollectiveError) {
        let (rank, blame, reason) = match error {
            CollectiveError::Disagreement { report } => (self.rank, Blame::Disagreement, report.clone()),
            CollectiveError::Cut { rank, peer, report } => {
                (*rank, Blame::Link { peer: *peer as u16 }, report.clone())
            }
            CollectiveError::Aborted { rank, reason } => (*rank, Blame::Rank, reason.clone()),
            CollectiveError::Missing { rank, .. }
            | CollectiveError::Stuck { rank, .. }
            | CollectiveError::Left { rank, .. }
            | CollectiveError::Disconnected { rank, .. }
            | CollectiveError::Unreadable { rank, .. } => (*rank, Blame::Rank, error.to_string()),
            CollectiveError::Device(_) | CollectiveError::NotShared { .. } => {
                (self.rank, Blame::Rank, error.to_string())
            }
        };
        self.control.abort(Abort { rank, blame, reason });
    }

    /// Called when a part of a rank is dropped: a rank that unwinds ends the job.
    pub(crate) fn abort_if_panicking(&self) {
        if std::thread::panicking() && !self.control.is_aborted() {
            let activity = self.control.last_activity(self.rank);
            let thread = std::thread::current().name().unwrap_or("without a name").to_string();
            let _ = self.abort(&format!("thread {thread} panicked; {activity}"));
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.control.rank(self.rank).life.store(Life::LEFT, Ordering::Release);
        self.control.wake_all();
    }
}
