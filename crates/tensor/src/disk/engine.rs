//! Engines that run the requests of transfers: one after the other, or on threads. (With io_uring: `ring`.)

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::{DiskStorage, Mapping};
use crate::threads::panic_text;

/// Threads that read and write if there is no io_uring. A few hide the time between two requests.
const THREADS: usize = 4;

/// Bytes between a storage and memory.
#[derive(Clone, Copy)]
pub(super) struct Request {
    /// Its number among those in flight.
    pub(super) id: usize,
    /// The number of the storage.
    pub(super) store: usize,
    pub(super) writes: bool,
    pub(super) offset: u64,
    /// An exposed address. The memory is valid until the request is over, and nobody else uses it in a way that conflicts.
    pub(super) memory: usize,
    pub(super) bytes: usize,
}

/// Runs requests, in any order.
pub(super) trait Engine: Send {
    /// Takes a request; it may start later, in `complete`.
    fn submit(&mut self, request: Request);

    /// Blocks until a request is over: its number, and the bytes that it has transferred. Some request was submitted.
    fn complete(&mut self) -> (usize, Result<usize>);

    /// Requests will use this memory.
    fn use_memory(&mut self, _: Vec<Mapping>) {}

    /// Bytes of this memory that are registered with the system.
    fn registered_bytes(&self) -> u64 {
        0
    }
}

/// Runs requests one after the other, on the thread that waits for them.
pub(super) struct Inline {
    storage: Arc<dyn DiskStorage>,
    queue: VecDeque<Request>,
}

impl Inline {
    pub(super) fn new(storage: Arc<dyn DiskStorage>) -> Inline {
        Inline { storage, queue: VecDeque::new() }
    }
}

impl Engine for Inline {
    fn submit(&mut self, request: Request) {
        self.queue.push_back(request);
    }

    fn complete(&mut self) -> (usize, Result<usize>) {
        let request = self.queue.pop_front().expect("a request was submitted");
        (request.id, run(&*self.storage, request))
    }
}

/// Runs requests on a few threads, which start at the first request.
pub(super) struct Threads {
    files: Vec<Arc<File>>,
    /// Requests that are not over, while the threads run.
    running: Option<Running>,
    /// Requests for the caller's thread, if the system starts no other.
    waiting: VecDeque<Request>,
    starts: bool,
}

struct Running {
    requests: Sender<Request>,
    results: Receiver<(usize, Result<usize>)>,
    workers: Vec<JoinHandle<()>>,
}

impl Threads {
    pub(super) fn new(files: &[Arc<File>]) -> Threads {
        Threads { files: files.to_vec(), running: None, waiting: VecDeque::new(), starts: true }
    }

    fn start(&mut self) {
        let ((requests, queue), (results, received)) = (channel::<Request>(), channel());
        let queue = Arc::new(Mutex::new(queue));
        let mut workers = Vec::new();
        for number in 0..THREADS {
            let (files, queue, results) = (self.files.clone(), Arc::clone(&queue), results.clone());
            let work = move || {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(request) = next else { return };
                    if results.send((request.id, run(&*files[request.store], request))).is_err() {
                        return;
                    }
                }
            };
            let started = std::thread::Builder::new().name(format!("disk-{number}")).spawn(work);
            workers.extend(started.ok());
        }
        if !workers.is_empty() {
            self.running = Some(Running { requests, results: received, workers });
        }
    }
}

impl Engine for Threads {
    fn submit(&mut self, request: Request) {
        if std::mem::take(&mut self.starts) {
            self.start();
        }
        match &self.running {
            Some(running) => running.requests.send(request).expect("the threads end with their sender"),
            None => self.waiting.push_back(request),
        }
    }

    fn complete(&mut self) -> (usize, Result<usize>) {
        if let Some(running) = &self.running {
            return running.results.recv().expect("the threads end with their sender");
        }
        let request = self.waiting.pop_front().expect("a request was submitted");
        (request.id, run(&*self.files[request.store], request))
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(Running { requests, results, workers }) = self.running.take() {
            drop((requests, results));
            // A worker catches the panics of a storage; it has none of its own.
            workers.into_iter().for_each(|worker| drop(worker.join()));
        }
    }
}

/// Runs a request now. A panic would leave those who wait for it waiting: it is an error like others.
fn run(storage: &dyn DiskStorage, request: Request) -> Result<usize> {
    let Request { writes, offset, memory, bytes, .. } = request;
    let memory = std::ptr::with_exposed_provenance_mut::<u8>(memory);
    let transfer = || match writes {
        // SAFETY: whoever made the request keeps the memory valid, and lets nobody write it meanwhile.
        true => storage.write_at(unsafe { std::slice::from_raw_parts(memory, bytes) }, offset),
        // SAFETY: whoever made the request keeps the memory valid, and lets nobody else use it meanwhile.
        false => storage.read_at(unsafe { std::slice::from_raw_parts_mut(memory, bytes) }, offset),
    };
    let done = catch_unwind(AssertUnwindSafe(transfer));
    done.unwrap_or_else(|panic| Err(Error::other(panic_text("the transfer", &*panic))))
}
