//! Queues of work with a thread each, and events between them: the streams of devices whose work runs on the host.
//!
//! An event is the number of entries (jobs and waits) that were issued to a queue so far; it has happened when as many are
//! over. All queues are under one lock, which nobody holds while a job runs. After the first failure the threads take
//! entries out of their queues and run none of them, so every event happens and nobody waits for ever.
//!
//! The simulated accelerator has a queue for each stream; a card has one, for the operations of the host.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::events::DeviceError;
use crate::threads::{panic_text, refused_thread};

/// A job of a queue.
pub trait Job: Send + 'static {
    /// Runs it, on the thread of its queue. `at` is its place.
    ///
    /// # Errors
    /// Why it failed.
    fn run(&mut self, at: QueueEvent, failed: &HasFailed) -> Result<(), String>;

    /// Error with which its failure is reported.
    fn failure(&self, reason: String) -> DeviceError;

    /// Called when it is over, whether it ran, failed or was left out after a failure: before its event has happened.
    fn over(&mut self, _at: QueueEvent) {}
}

/// The end of the first `number` entries of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueEvent {
    /// The queue, from 0.
    pub queue: usize,
    /// Number of entries.
    pub number: u64,
}

/// True if anything has failed. Read without a lock.
#[derive(Debug, Default)]
pub struct HasFailed(AtomicBool);

impl HasFailed {
    /// Returns whether anything has failed.
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// An entry of a queue.
enum Entry<J> {
    Run(Box<J>),
    Wait(QueueEvent),
}

struct Queue<J> {
    entries: VecDeque<Entry<J>>,
    issued: u64,
    done: u64,
    /// The thread waits for an entry.
    is_idle: bool,
    /// Event for which the thread waits, at an entry `Wait`.
    blocked_on: Option<QueueEvent>,
}

struct State<J> {
    queues: Vec<Queue<J>>,
    /// The first failure.
    failure: Option<DeviceError>,
    is_closing: bool,
    /// Events for which the host's threads wait.
    host_waits: Vec<QueueEvent>,
}

/// A thread is woken only for the event that it waits for: a run issues many thousand jobs, and a wake costs more than most of
/// them.
struct Shared<J> {
    state: Mutex<State<J>>,
    /// For each queue: its thread is woken by an entry, or by the event that it waits for.
    workers: Vec<Condvar>,
    /// Wakes the host: an event that one of its threads waits for has happened.
    host: Condvar,
    has_failed: HasFailed,
}

/// Queues and their threads. When they are dropped, they run what was issued to them, and end their threads.
pub struct Queues<J: Job> {
    shared: Arc<Shared<J>>,
    workers: Vec<JoinHandle<()>>,
}

impl<J: Job> Queues<J> {
    /// Starts a thread for each name. `owner` is whose they are, for the error.
    ///
    /// # Errors
    /// When the system starts no further thread; those that were started are ended.
    pub fn start(names: &[&str], owner: &str) -> std::io::Result<Queues<J>> {
        let queue = |_: &&str| Queue {
            entries: VecDeque::new(),
            issued: 0,
            done: 0,
            is_idle: false,
            blocked_on: None,
        };
        let state = State {
            queues: names.iter().map(queue).collect(),
            failure: None,
            is_closing: false,
            host_waits: Vec::new(),
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            workers: names.iter().map(|_| Condvar::new()).collect(),
            host: Condvar::new(),
            has_failed: HasFailed::default(),
        });
        // Made first: if a thread cannot be started, dropping the queues ends those that were.
        let mut queues = Queues { shared, workers: Vec::new() };
        for (queue, name) in names.iter().enumerate() {
            let shared = Arc::clone(&queues.shared);
            let builder = std::thread::Builder::new().name((*name).to_string());
            let worker = builder.spawn(move || shared.work(queue));
            let whose = || format!("the thread of stream {name} of {owner}");
            queues.workers.push(worker.map_err(|error| refused_thread(&whose(), &error))?);
        }
        Ok(queues)
    }

    /// Issues a job to a queue; the event of its end.
    pub fn issue(&self, queue: usize, job: J) -> QueueEvent {
        self.push(queue, Entry::Run(Box::new(job)))
    }

    /// Makes entries that are issued to `queue` from here on run after `event`; returns the event of the wait itself. An event
    /// beyond the last entry of its queue is the end of that entry.
    pub fn wait(&self, queue: usize, event: QueueEvent) -> QueueEvent {
        let event = self.shared.lock().issued(event);
        self.push(queue, Entry::Wait(event))
    }

    fn push(&self, queue: usize, entry: Entry<J>) -> QueueEvent {
        let mut state = self.shared.lock();
        let own = &mut state.queues[queue];
        own.entries.push_back(entry);
        own.issued += 1;
        let (number, was_idle) = (own.issued, std::mem::take(&mut own.is_idle));
        drop(state);
        if was_idle {
            self.shared.workers[queue].notify_one();
        }
        QueueEvent { queue, number }
    }

    /// The end of everything that was issued to a queue so far.
    pub fn record(&self, queue: usize) -> QueueEvent {
        QueueEvent { queue, number: self.shared.lock().queues[queue].issued }
    }

    /// The event, with the number of the last entry that was issued where it is beyond that: a later one would never happen.
    pub fn issued(&self, event: QueueEvent) -> QueueEvent {
        self.shared.lock().issued(event)
    }

    /// Returns whether an event has happened.
    pub fn has_happened(&self, event: QueueEvent) -> bool {
        let state = self.shared.lock();
        state.has_happened(state.issued(event))
    }

    /// Blocks until an event has happened.
    ///
    /// # Errors
    /// The first failure of any queue so far.
    pub fn synchronize(&self, event: QueueEvent) -> Result<(), DeviceError> {
        let mut state = self.shared.lock();
        let event = state.issued(event);
        if !state.has_happened(event) {
            state.host_waits.push(event);
            while !state.has_happened(event) {
                state = self.shared.host.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let mine = state.host_waits.iter().position(|waited| *waited == event);
            mine.map(|index| state.host_waits.swap_remove(index));
        }
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// The first failure so far.
    ///
    /// # Errors
    /// That failure.
    pub fn check(&self) -> Result<(), DeviceError> {
        if !self.has_failed() {
            return Ok(());
        }
        self.shared.lock().failure.clone().map_or(Ok(()), Err)
    }

    /// Returns whether anything has failed.
    pub fn has_failed(&self) -> bool {
        self.shared.has_failed.get()
    }

    /// Keeps a failure, if it is the first: no job that has not begun runs after it.
    pub fn fail(&self, failure: DeviceError) {
        self.shared.fail(&mut self.shared.lock(), failure);
    }
}

impl<J: Job> Drop for Queues<J> {
    fn drop(&mut self) {
        self.shared.lock().is_closing = true;
        self.shared.workers.iter().for_each(Condvar::notify_all);
        for worker in self.workers.drain(..) {
            // A thread catches the panics of its jobs; it has none of its own.
            let _ = worker.join();
        }
    }
}

impl<J> State<J> {
    fn issued(&self, event: QueueEvent) -> QueueEvent {
        QueueEvent { number: event.number.min(self.queues[event.queue].issued), ..event }
    }

    fn has_happened(&self, event: QueueEvent) -> bool {
        self.queues[event.queue].done >= event.number
    }
}

impl<J: Job> Shared<J> {
    /// Nothing panics under this lock.
    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, state: &mut State<J>, failure: DeviceError) {
        state.failure.get_or_insert(failure);
        self.has_failed.0.store(true, Ordering::Release);
    }

    /// Wakes those that wait for an event that has happened.
    fn wake_waiting(&self, state: &mut State<J>) {
        for queue in 0..state.queues.len() {
            let event = state.queues[queue].blocked_on;
            if event.is_some_and(|event| state.has_happened(event)) {
                state.queues[queue].blocked_on = None;
                self.workers[queue].notify_one();
            }
        }
        if state.host_waits.iter().any(|event| state.has_happened(*event)) {
            self.host.notify_all();
        }
    }

    /// A thread's life: it ends when the queues are dropped and its own is empty.
    fn work(&self, queue: usize) {
        let mut state = self.lock();
        loop {
            let number = state.queues[queue].done + 1;
            match state.queues[queue].entries.pop_front() {
                None if state.is_closing => return,
                None => {
                    state.queues[queue].is_idle = true;
                    state = self.workers[queue].wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                Some(Entry::Wait(event)) => {
                    while !state.has_happened(event) {
                        state.queues[queue].blocked_on = Some(event);
                        state = self.workers[queue].wait(state).unwrap_or_else(PoisonError::into_inner);
                    }
                    state.queues[queue].blocked_on = None;
                }
                Some(Entry::Run(job)) => {
                    drop(state);
                    self.run(*job, QueueEvent { queue, number });
                    state = self.lock();
                }
            }
            state.queues[queue].done = number;
            self.wake_waiting(&mut state);
        }
    }

    /// Runs one job, unless anything has failed.
    fn run(&self, mut job: J, at: QueueEvent) {
        if !self.has_failed.get() {
            let done = catch_unwind(AssertUnwindSafe(|| job.run(at, &self.has_failed)));
            if let Err(reason) = done.unwrap_or_else(|panic| Err(panic_text("the kernel", &*panic))) {
                self.fail(&mut self.lock(), job.failure(reason));
            }
        }
        job.over(at);
    }
}
