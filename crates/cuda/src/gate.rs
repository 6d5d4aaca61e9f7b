//! Keeps loads of kernels and calls between cards apart.
//!
//! Loading a kernel may wait for everything that runs on the card, also for a call that waits for another rank, which may itself load a
//! kernel: both would wait forever. So kernels are loaded only while no call runs on a link.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Keeps loads of kernels and calls between cards apart.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    /// Calls between cards that run.
    calls: usize,
    is_loading: bool,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads kernels with `load`, while no call runs. A call that runs needs nothing of this rank any more but that its work goes on.
    pub(crate) fn load<T>(&self, load: impl FnOnce() -> T) -> T {
        let free = self.changed.wait_while(self.lock(), |state| state.calls > 0 || state.is_loading);
        free.unwrap_or_else(PoisonError::into_inner).is_loading = true;
        let _loading = Loading(self);
        load()
    }

    /// A call begins.
    pub(crate) fn begin_call(&self) {
        let free = self.changed.wait_while(self.lock(), |state| state.is_loading);
        free.unwrap_or_else(PoisonError::into_inner).calls += 1;
    }

    /// A call is over, or was ended.
    pub(crate) fn end_call(&self) {
        self.lock().calls -= 1;
        self.changed.notify_all();
    }
}

/// A load in progress.
struct Loading<'a>(&'a Gate);

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.0.lock().is_loading = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn kernels_are_loaded_while_no_call_runs() {
        let gate = Gate::default();
        gate.begin_call();
        let (loaded, has_ended) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                gate.load(|| {
                    assert!(has_ended.load(Ordering::SeqCst), "a call runs");
                    loaded.store(true, Ordering::SeqCst);
                });
            });
            // Another call may begin while the load waits, so that calls that need each other all run.
            gate.begin_call();
            gate.end_call();
            std::thread::sleep(Duration::from_millis(20));
            assert!(!loaded.load(Ordering::SeqCst));
            has_ended.store(true, Ordering::SeqCst);
            gate.end_call();
        });
        assert!(loaded.load(Ordering::SeqCst));
    }
}
