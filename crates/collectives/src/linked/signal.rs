//! Progress of a call between devices, for the thread that waits for it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Progress of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not all ranks are known to make it.
    #[default]
    Queued,
    /// Its steps are issued, or are being issued.
    Started,
    /// It is over, has failed, or will never start.
    Over,
}

/// The stage of one call.
#[derive(Default)]
pub(super) struct Signal {
    stage: Mutex<Stage>,
    changed: Condvar,
}

impl Signal {
    /// Nothing panics under this lock.
    fn lock(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, stage: Stage) {
        *self.lock() = stage;
        self.changed.notify_all();
    }

    /// Blocks until the call has started, which the deadline of its group bounds.
    pub(super) fn wait_for_start(&self) -> Stage {
        let started = self.changed.wait_while(self.lock(), |stage| *stage == Stage::Queued);
        *started.unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks a started call's waiter for a moment, or until it is over.
    pub(super) fn wait_a_moment(&self, moment: Duration) -> Stage {
        let waited = self.changed.wait_timeout_while(self.lock(), moment, |stage| *stage == Stage::Started);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
