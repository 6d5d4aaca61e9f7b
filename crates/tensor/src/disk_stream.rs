//! The disk stream of a device whose other work runs at the call: a queue of transfers and one thread.
//!
//! An event is the number of transfers that were issued so far; it has happened when as many are over. After the
//! first failure the thread takes transfers out of its queue and runs none of them, so every event happens.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::backend::{DeviceError, DiskTransfer};
use crate::threads::{panic_text, refused_thread};

#[derive(Default)]
struct State {
    queue: VecDeque<DiskTransfer<'static>>,
    issued: u64,
    done: u64,
    /// The first failure.
    failure: Option<DeviceError>,
    is_closing: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// A transfer was issued, or the stream closes.
    work: Condvar,
    /// A transfer is over.
    progress: Condvar,
}

/// Runs transfers one after another, in the order in which they are issued. When it is dropped, it runs what was issued
/// to it and ends its thread.
pub(crate) struct DiskStream {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

impl DiskStream {
    /// Starts the thread; `device` is the name of the device, for errors.
    pub(crate) fn start(device: &'static str) -> std::io::Result<DiskStream> {
        let shared = Arc::new(Shared::default());
        let builder = std::thread::Builder::new().name("disk".to_string());
        let worker = builder.spawn({
            let shared = Arc::clone(&shared);
            move || shared.work(device)
        });
        let worker = worker.map_err(|error| refused_thread("the thread of the disk stream", &error))?;
        Ok(DiskStream { shared, worker: Some(worker) })
    }

    pub(crate) fn issue(&self, transfer: DiskTransfer<'static>) {
        let mut state = self.shared.lock();
        state.queue.push_back(transfer);
        state.issued += 1;
        self.shared.work.notify_one();
    }

    /// Number of transfers that were issued so far.
    pub(crate) fn issued(&self) -> u64 {
        self.shared.lock().issued
    }

    /// Blocks until `number` transfers are over. A number that was not reached yet is the last.
    pub(crate) fn wait(&self, number: u64) {
        let mut state = self.shared.lock();
        let number = number.min(state.issued);
        while state.done < number {
            state = self.shared.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The first failure so far.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        self.shared.lock().failure.clone().map_or(Ok(()), Err)
    }
}

impl Drop for DiskStream {
    fn drop(&mut self) {
        self.shared.lock().is_closing = true;
        self.shared.work.notify_one();
        if let Some(worker) = self.worker.take() {
            // The worker catches the panics of transfers; it has none of its own.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Nothing panics under this lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The worker's life: it ends when the stream is dropped and its queue is empty.
    fn work(&self, device: &'static str) {
        let mut state = self.lock();
        loop {
            let Some(transfer) = state.queue.pop_front() else {
                if state.is_closing {
                    return;
                }
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let has_failed = state.failure.is_some();
            drop(state);
            let failure = if has_failed { None } else { run(transfer, device).err() };
            state = self.lock();
            state.failure = state.failure.take().or(failure);
            state.done += 1;
            self.progress.notify_all();
        }
    }
}

/// Runs a transfer. A panic would leave those who wait for it waiting: it is a failure like others.
fn run(transfer: DiskTransfer, device: &'static str) -> Result<(), DeviceError> {
    let (call, site) = (transfer.name, transfer.site);
    let done = catch_unwind(AssertUnwindSafe(|| transfer.execute()));
    let done = done.unwrap_or_else(|panic| Err(panic_text("the transfer", &*panic)));
    done.map_err(|reason| DeviceError { device, call, site, reason })
}
