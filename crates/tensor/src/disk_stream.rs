//! The disk stream of a device whose other work runs at the call: a queue of transfers and one thread.
//!
//! Transfers that share no bytes run beside each other, and may end in any order (`disk::transfers`). An event is the
//! number of transfers that were issued so far; it has happened when all of these are over. After the first failure, the
//! thread takes transfers out of its queue and runs none of them, so every event happens.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::backend::{DeviceError, DiskTransfer};
use crate::disk::DiskMemory;
use crate::threads::refused_thread;

#[derive(Default)]
struct State {
    queue: VecDeque<DiskTransfer<'static>>,
    issued: u64,
    /// Transfers that are over, from the first on without a gap.
    done: u64,
    /// Those that are over beyond a gap.
    ahead: BTreeSet<u64>,
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

/// Runs transfers; each sees the effects of those that were issued before it. When it is dropped, it runs what was issued
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
            move || Worker { shared, device, disk: None, running: HashMap::new(), taken: 0 }.work()
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
            // The worker catches the panics of storages; it has none of its own.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Nothing panics under this lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread of a stream.
struct Worker {
    shared: Arc<Shared>,
    device: &'static str,
    /// The disk memory of the transfers that run.
    disk: Option<Arc<DiskMemory>>,
    /// Transfers that run, by their number from 1.
    running: HashMap<u64, DiskTransfer<'static>>,
    /// Transfers that were taken out of the queue.
    taken: u64,
}

impl Worker {
    /// The worker's life: it ends when the stream is dropped and its queue is empty.
    fn work(mut self) {
        while let Some((transfers, has_failed)) = self.take() {
            let mut over = Vec::new();
            for transfer in transfers {
                self.taken += 1;
                let started = if has_failed { Ok(()) } else { transfer.start(self.taken) };
                if let Err(reason) = started {
                    over.push((self.taken, Some(self.failure(&transfer, reason))));
                } else if has_failed {
                    over.push((self.taken, None));
                } else {
                    self.running.insert(self.taken, transfer);
                }
            }
            if let Some(disk) = self.disk.as_ref().filter(|_| !self.running.is_empty()) {
                for ended in disk.progress() {
                    let transfer = self.running.remove(&ended.number).expect("a transfer that runs");
                    let failure = ended.result.err().map(|reason| self.failure(&transfer, reason));
                    transfer.note_time(ended.time);
                    over.push((ended.number, failure));
                }
            }
            self.note(over);
        }
    }

    /// The transfers to start now, of one disk memory, and whether one has failed. Blocks while there is nothing to do.
    fn take(&mut self) -> Option<(Vec<DiskTransfer<'static>>, bool)> {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        while state.queue.is_empty() && self.running.is_empty() {
            if state.is_closing {
                return None;
            }
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if self.running.is_empty() {
            self.disk = state.queue.front().map(|transfer| Arc::clone(&transfer.disk));
        }
        let disk = self.disk.as_ref().expect("of the first transfer");
        let others = state.queue.iter().take_while(|transfer| Arc::ptr_eq(&transfer.disk, disk)).count();
        let transfers = state.queue.drain(..others).collect();
        Some((transfers, state.failure.is_some()))
    }

    /// These transfers are over.
    fn note(&self, over: Vec<(u64, Option<DeviceError>)>) {
        if over.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        for (number, failure) in over {
            state.failure = state.failure.take().or(failure);
            state.ahead.insert(number);
        }
        while state.ahead.first() == Some(&(state.done + 1)) {
            state.ahead.pop_first();
            state.done += 1;
        }
        self.shared.progress.notify_all();
    }

    fn failure(&self, transfer: &DiskTransfer, reason: String) -> DeviceError {
        DeviceError { device: self.device, call: transfer.name, site: transfer.site, reason }
    }
}
