//! Streams: a queue and a worker thread each, events between them, and the first failure.
//!
//! An event is the number of entries (calls and waits) that were issued to a stream so far; it has happened when as
//! many are over. All queues are under one lock, which nobody holds while a call runs. After the first failure the
//! workers take entries out of their queues and run none of them, so every event happens and nobody waits for ever.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_tensor::backend::{DiskTransfer, StreamEvent, Timer};
use phalanx_tensor::operations::Operation;
use phalanx_tensor::{Access, DeviceError, Kernels, panic_text, refused_thread};
use phalanx_trace::Stream;

use crate::delays::delay;
use crate::failures::{Failure, Requests};
use crate::races::{Caller, Race, Races, STREAM_NAMES, STREAMS, index};
use crate::{Error, NAME, Options};

/// A call that was issued: what runs it, and what it does to which memory.
pub(crate) struct Work {
    pub(crate) run: Run,
    /// The ranges that it reads and writes, in the addresses of tensors.
    pub(crate) uses: Vec<(Range<usize>, Access)>,
    /// Why the device does not run it.
    pub(crate) refused: Option<String>,
}

/// What a worker needs to run a call.
pub(crate) struct Run {
    pub(crate) body: Body,
    pub(crate) by: Caller,
    /// How long its bytes take between the memories.
    pub(crate) between_memories: Duration,
    pub(crate) is_copy: bool,
    pub(crate) failure: Option<Failure>,
}

/// The work of a call.
#[expect(clippy::large_enum_variant, reason = "a run is queued in a box")]
pub(crate) enum Body {
    Kernel {
        /// Its operands lie in memory that the worker can access.
        operation: Operation<'static>,
        timer: Option<Timer>,
        /// Host bytes that the operation reads.
        uploaded: Vec<u64>,
    },
    Transfer(DiskTransfer<'static>),
}

/// An entry of a queue.
enum Entry {
    Run(Box<Run>),
    Wait(StreamEvent),
}

#[derive(Default)]
struct Queue {
    entries: VecDeque<Entry>,
    issued: u64,
    done: u64,
    /// The worker waits for an entry.
    is_idle: bool,
    /// What the worker waits for, at an entry `Wait`.
    blocked_on: Option<StreamEvent>,
}

struct State {
    queues: [Queue; STREAMS],
    races: Option<Races>,
    requests: Requests,
    /// The first failure.
    failure: Option<DeviceError>,
    is_closing: bool,
    /// What the host's threads wait for.
    host_waits: Vec<StreamEvent>,
}

/// A thread is woken only for what it waits for: a run issues many thousand calls, and a wake costs more than most of them.
struct Shared {
    state: Mutex<State>,
    /// For each stream: its worker is woken by an entry, or by the event that it waits for.
    workers: [Condvar; STREAMS],
    /// Wakes the host: an event that one of its threads waits for has happened.
    host: Condvar,
    /// `state.failure` is set. Read without the lock before each call.
    has_failed: AtomicBool,
    kernels: Arc<dyn Kernels>,
    options: Options,
}

/// The streams of a device and their threads.
pub(crate) struct Streams {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Streams {
    pub(crate) fn start(kernels: Arc<dyn Kernels>, options: Options) -> Result<Streams, Error> {
        let state = State {
            queues: Default::default(),
            races: options.check_races.then(Races::new),
            requests: Requests::default(),
            failure: None,
            is_closing: false,
            host_waits: Vec::new(),
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            workers: Default::default(),
            host: Condvar::new(),
            has_failed: AtomicBool::new(false),
            kernels,
            options,
        });
        // Made first: if a thread cannot be started, dropping the streams ends those that were.
        let mut streams = Streams { shared, workers: Vec::new() };
        for (stream, name) in STREAM_NAMES.into_iter().enumerate() {
            let shared = Arc::clone(&streams.shared);
            let builder = std::thread::Builder::new().name(name.to_string());
            let worker = builder.spawn(move || shared.work(stream));
            let whose = || format!("the thread of stream {name} of the simulated device");
            streams.workers.push(worker.map_err(|error| Error::Thread(refused_thread(&whose(), &error)))?);
        }
        Ok(streams)
    }

    pub(crate) fn plan_failure(&self, call: u64, failure: Failure) {
        self.shared.lock().requests.add(call, failure);
    }

    pub(crate) fn calls(&self) -> u64 {
        self.shared.lock().requests.calls()
    }

    /// Issues a call to a stream.
    pub(crate) fn issue(&self, stream: Stream, work: Work) {
        let Work { mut run, uses, refused } = work;
        let stream = index(stream);
        let mut state = self.shared.lock();
        run.failure = state.requests.next(run.is_copy);
        let by = run.by;
        let number = state.push(stream, Entry::Run(Box::new(run)));
        if let Some(reason) = refused {
            self.shared.fail(&mut state, by, reason);
        }
        if let Some(races) = &mut state.races {
            races.issue(stream, number);
            let found: Vec<Race> = uses
                .into_iter()
                .filter_map(|(range, access)| races.access(stream, range, access, by))
                .collect();
            if let Some(race) = found.first() {
                self.shared.fail(&mut state, by, race.to_string());
            }
        }
        self.shared.wake_idle(state, stream);
    }

    pub(crate) fn record(&self, stream: Stream) -> StreamEvent {
        let mut state = self.shared.lock();
        let number = state.queues[index(stream)].issued;
        if let Some(races) = &mut state.races {
            races.record(index(stream), number);
        }
        StreamEvent { stream, number }
    }

    pub(crate) fn wait(&self, stream: Stream, event: StreamEvent) {
        let mut state = self.shared.lock();
        let event = state.issued(event);
        let (stream, of) = (index(stream), index(event.stream));
        if let Some(races) = &mut state.races {
            races.wait(stream, of, event.number);
        }
        state.push(stream, Entry::Wait(event));
        self.shared.wake_idle(state, stream);
    }

    /// Blocks until an event has happened.
    pub(crate) fn synchronize(&self, event: StreamEvent) -> Result<(), DeviceError> {
        let mut state = self.shared.lock();
        let event = state.issued(event);
        if let Some(races) = &mut state.races {
            races.synchronize(index(event.stream), event.number);
        }
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

    /// The host reads bytes that a call is given.
    pub(crate) fn host_reads(&self, range: &Range<usize>, by: Caller) {
        // The failure is kept, for the next synchronisation.
        let _ = self.check_host_access(range, Access::Read, by);
    }

    pub(crate) fn check_host_access(
        &self,
        range: &Range<usize>,
        access: Access,
        by: Caller,
    ) -> Result<(), DeviceError> {
        let mut state = self.shared.lock();
        let race = state.races.as_ref().and_then(|races| races.host_access(range, access));
        if let Some(race) = race {
            self.shared.fail(&mut state, by, race.to_string());
        }
        state.failure.clone().map_or(Ok(()), Err)
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.shared.lock().is_closing = true;
        self.shared.workers.iter().for_each(Condvar::notify_all);
        for worker in self.workers.drain(..) {
            // A worker catches the panics of kernels; it has none of its own.
            let _ = worker.join();
        }
    }
}

impl State {
    /// Appends an entry to a stream; its number, from 1.
    fn push(&mut self, stream: usize, entry: Entry) -> u64 {
        let queue = &mut self.queues[stream];
        queue.entries.push_back(entry);
        queue.issued += 1;
        queue.issued
    }

    /// The event, at most the last entry that was issued: a later one would never happen.
    fn issued(&self, event: StreamEvent) -> StreamEvent {
        StreamEvent { number: event.number.min(self.queues[index(event.stream)].issued), ..event }
    }

    fn has_happened(&self, event: StreamEvent) -> bool {
        self.queues[index(event.stream)].done >= event.number
    }
}

impl Shared {
    /// Nothing panics under this lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the failure of a call, if it is the first.
    fn fail(&self, state: &mut State, by: Caller, reason: String) {
        let Caller { call, site } = by;
        state.failure.get_or_insert(DeviceError { device: NAME, call, site, reason });
        self.has_failed.store(true, Ordering::Release);
    }

    /// Wakes the worker of a stream to which an entry was issued, if it waits for one.
    fn wake_idle(&self, mut state: MutexGuard<'_, State>, stream: usize) {
        let was_idle = std::mem::take(&mut state.queues[stream].is_idle);
        drop(state);
        if was_idle {
            self.workers[stream].notify_one();
        }
    }

    /// Wakes those that wait for an event that has happened.
    fn wake_waiting(&self, state: &mut State) {
        for stream in 0..STREAMS {
            let event = state.queues[stream].blocked_on;
            if event.is_some_and(|event| state.has_happened(event)) {
                state.queues[stream].blocked_on = None;
                self.workers[stream].notify_one();
            }
        }
        if state.host_waits.iter().any(|event| state.has_happened(*event)) {
            self.host.notify_all();
        }
    }

    /// A worker's life: it ends when the device is dropped and its queue is empty.
    fn work(&self, stream: usize) {
        let mut state = self.lock();
        loop {
            let number = state.queues[stream].done + 1;
            match state.queues[stream].entries.pop_front() {
                None if state.is_closing => return,
                None => {
                    state.queues[stream].is_idle = true;
                    state = self.workers[stream].wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                Some(Entry::Wait(event)) => {
                    while !state.has_happened(event) {
                        state.queues[stream].blocked_on = Some(event);
                        state = self.workers[stream].wait(state).unwrap_or_else(PoisonError::into_inner);
                    }
                    state.queues[stream].blocked_on = None;
                }
                Some(Entry::Run(run)) => {
                    drop(state);
                    self.run(*run, stream, number);
                    state = self.lock();
                }
            }
            state.queues[stream].done = number;
            self.wake_waiting(&mut state);
        }
    }

    /// Runs one call after its delay, unless the device has failed.
    fn run(&self, run: Run, stream: usize, number: u64) {
        let Run { body, by, between_memories, failure, .. } = run;
        let Options { seed, max_delay, delayed_share, .. } = self.options;
        let has_failed = || self.has_failed.load(Ordering::Acquire);
        if has_failed() {
            return;
        }
        sleep(delay(seed, stream, number, max_delay, delayed_share));
        if has_failed() {
            return;
        }
        if let Some(reason) = failure.and_then(Failure::reason) {
            return self.fail(&mut self.lock(), by, reason.to_string());
        }
        let start = Instant::now();
        let slow = if let Some(Failure::SlowCopy(longer)) = failure { longer } else { Duration::ZERO };
        sleep(between_memories.saturating_add(slow));
        let done = catch_unwind(AssertUnwindSafe(|| self.execute(body, start)));
        if let Err(reason) = done.unwrap_or_else(|panic| Err(panic_text("the kernel", &*panic))) {
            self.fail(&mut self.lock(), by, reason);
        }
    }

    /// `start` is when its copy between memories began.
    fn execute(&self, body: Body, start: Instant) -> Result<(), String> {
        match body {
            Body::Transfer(transfer) => transfer.execute(),
            Body::Kernel { operation, timer, uploaded } => {
                self.kernels.execute(operation);
                if let Some(timer) = timer {
                    timer.add(start.elapsed());
                }
                drop(uploaded);
                Ok(())
            }
        }
    }
}

fn sleep(time: Duration) {
    if !time.is_zero() {
        std::thread::sleep(time);
    }
}
