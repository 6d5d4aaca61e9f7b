//! Waits of the host, and the failures that they return.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use phalanx_plan::trace::Site;
use phalanx_tensor::DeviceError;

use super::{Cuda, State};

impl Cuda {
    /// Blocks until entry `number` of a stream of the card is over.
    pub(super) fn wait_for(&self, queue: usize, number: u64) -> Result<(), DeviceError> {
        let mut state = self.lock();
        let result = self.context.enter().and_then(|()| state.streams.synchronize(queue, number));
        if result.is_err() {
            // The first cause, where a call between cards has failed.
            state.failure = state.failure.take().or_else(|| self.link_failure());
            self.keep(&mut state, result, "synchronize", Site::caller());
        }
        if state.failure.is_none() {
            state.failure = state.faults.found();
        }
        self.check(state)
    }

    /// Returns the first failure, if there was one; nothing that was issued runs any more then.
    pub(super) fn check(&self, mut state: MutexGuard<'_, State>) -> Result<(), DeviceError> {
        if state.failure.is_none() {
            state.failure = self.host.check().err().or_else(|| self.link_failure());
        }
        let Some(failure) = state.failure.clone() else { return Ok(()) };
        self.has_failed.store(true, Ordering::Release);
        // First, because streams that wait for the host go on when its operations are left out.
        self.host.fail(&failure);
        // What was issued before runs to its end: nobody may free its memory meanwhile.
        let _ = state.streams.drain();
        self.host.end();
        Err(failure)
    }
}
