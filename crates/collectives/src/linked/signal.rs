//! Progress of a call between devices, for the thread that waits for it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Progress of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum CallStage {
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
    stage: Mutex<CallStage>,
    changed: Condvar,
}

impl Signal {
    /// Nothing panics under this lock.
    fn lock(&self) -> MutexGuard<'_, CallStage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, stage: CallStage) {
        *self.lock() = stage;
        self.changed.notify_all();
    }

    /// Blocks until the call has started, which the deadline of its group bounds.
    pub(super) fn wait_for_start(&self) -> CallStage {
        let started = self.changed.wait_while(self.lock(), |stage| *stage == CallStage::Queued);
        *started.unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks a started call's waiter for a moment, or until it is over.
    pub(super) fn wait_a_moment(&self, moment: Duration) -> CallStage {
        let waited =
            self.changed.wait_timeout_while(self.lock(), moment, |stage| *stage == CallStage::Started);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
