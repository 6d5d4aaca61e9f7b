//! The queue of one group's calls in one rank: they run one at a time, in the order of their submission.
//!
//! Either the owner thread takes the next call, which overlaps it with the submitter's computation, or
//! a caller who waits runs what is left of the queue up to its own call itself, without a hand-over.
//! Without overlap the submitter runs its call at once and there is no thread. One flag, `running`,
//! says that a thread executes a call; the others sleep. A call is bounded by the channel's deadline, and
//! so is every sleep here.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::call::Buffers;
use crate::error::CollectiveError;
use crate::mover::Mover;
use crate::pending::Progress;
use crate::shared_memory::channel::Channel;
use crate::shared_memory::host::Host;
use crate::shared_memory::participation::Patience;
use crate::shared_memory::transfer::Transfer;
use crate::statistics::Tally;

pub(crate) struct CallQueue {
    state: Mutex<State>,
    /// The owner thread sleeps here until there is work.
    work: Condvar,
    /// Waiting callers sleep here until a call is over.
    done: Condvar,
    channel: Mutex<Box<dyn Channel>>,
    host: Arc<Host>,
    /// The channel's number.
    index: usize,
    pub(crate) tally: Tally,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Queued>,
    submitted: u64,
    completed: u64,
    /// Somebody runs a call.
    running: bool,
    /// The owner thread sleeps.
    idle: bool,
    /// Callers asleep.
    waiters: usize,
    /// The group is gone: the owner thread ends after the queue.
    closed: bool,
    /// No call after `completed` will ever complete.
    failed: Option<CollectiveError>,
}

/// A call that waits for its turn.
pub(crate) struct Queued {
    pub(crate) transfer: Transfer,
    /// Moves the bytes, if devices do.
    pub(crate) mover: Option<Box<dyn Mover>>,
}

impl CallQueue {
    pub(crate) fn new(channel: Box<dyn Channel>) -> CallQueue {
        let membership = channel.membership();
        CallQueue {
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
            host: Arc::clone(&membership.host),
            index: membership.index,
            channel: Mutex::new(channel),
            tally: Tally::default(),
        }
    }

    /// Appends a call for the owner thread; returns its ticket.
    pub(crate) fn enqueue(&self, call: Queued) -> u64 {
        let mut state = self.lock();
        state.submitted += 1;
        if state.failed.is_none() {
            state.queue.push_back(call);
        }
        if state.idle && !state.running {
            self.work.notify_one();
        }
        state.submitted
    }

    /// Runs a call on this thread, after those in the queue.
    pub(crate) fn run(&self, call: Queued) -> u64 {
        let ticket = self.enqueue(call);
        // The wait for the ticket returns the error, if there is one.
        let _ = Progress::wait(self, ticket, &mut Buffers::default());
        ticket
    }

    /// Starts the thread that runs calls beside the submitter.
    pub(crate) fn own(self: &Arc<Self>, name: &str) -> std::io::Result<JoinHandle<()>> {
        let stream = Arc::clone(self);
        std::thread::Builder::new().name(name.to_string()).spawn(move || stream.serve())
    }

    /// No call from here on will complete.
    pub(crate) fn fail(&self, error: CollectiveError) {
        self.lock().failed.get_or_insert(error);
    }

    /// Lets the owner thread end when everything submitted is over.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.work.notify_one();
    }

    fn serve(&self) {
        let mut state = self.lock();
        loop {
            if !state.running && !state.queue.is_empty() {
                (state, _) = self.run_next(state, Patience::OWNER, Instant::now());
            } else if state.closed && state.queue.is_empty() {
                return;
            } else {
                state.idle = true;
                state = self.work.wait(state).expect("no panic under this lock");
                state.idle = false;
            }
        }
    }

    /// Runs the first call of the queue, which begins now, at `start`; the lock is free meanwhile. Also returns when it was over.
    fn run_next<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        patience: Patience,
        start: Instant,
    ) -> (MutexGuard<'a, State>, Instant) {
        let Queued { transfer, mut mover } = state.queue.pop_front().expect("the queue is not empty");
        state.running = true;
        drop(state);
        let mut channel = self.channel.lock().expect("a panic in a call is caught");
        // A panic in a call (a bug, or a tensor outside the arena) must not leave other ranks waiting for a thread that
        // has ended.
        let result = catch_unwind(AssertUnwindSafe(|| {
            let mover = mover.as_mut().map(|mover| &mut **mover as &mut dyn Mover);
            channel.execute(&transfer, mover, patience)
        }));
        let result = result.unwrap_or_else(|payload| {
            let reason = panic_text(&*payload);
            Err(self.host.abort(&format!("{reason}, in a collective at {}", transfer.site)))
        });
        drop(channel);
        let end = Instant::now();
        let mut state = self.lock();
        state.running = false;
        match result {
            Ok(sent_bytes) => {
                state.completed += 1;
                self.tally.completed(sent_bytes, end - start);
            }
            Err(error) => {
                state.queue.clear();
                state.failed = Some(error);
            }
        }
        if state.waiters > 0 {
            self.done.notify_all();
        }
        if state.idle && !state.queue.is_empty() {
            self.work.notify_one();
        }
        (state, end)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }
}

impl Progress for CallQueue {
    fn wait(&self, ticket: u64, _: &mut Buffers) -> Result<(), CollectiveError> {
        let mut state = self.lock();
        if state.completed >= ticket {
            return Ok(());
        }
        let start = Instant::now();
        let mut now = start;
        let result = self.host.blocked_on(self.index, || {
            loop {
                if state.completed >= ticket {
                    break Ok(());
                }
                if let Some(error) = &state.failed {
                    break Err(error.clone());
                }
                if !state.running && !state.queue.is_empty() {
                    (state, now) = self.run_next(state, Patience::CALLER, now);
                } else {
                    state.waiters += 1;
                    state = self.done.wait(state).expect("no panic under this lock");
                    state.waiters -= 1;
                    now = Instant::now();
                }
            }
        });
        self.tally.blocked(now - start);
        result
    }

    fn is_done(&self, ticket: u64) -> bool {
        let state = self.lock();
        state.completed >= ticket || state.failed.is_some()
    }

    fn blocked(&self, wait: &mut dyn FnMut()) {
        let start = Instant::now();
        self.host.blocked_on(self.index, wait);
        self.tally.blocked(start.elapsed());
    }

    fn give_up(&self) {
        self.host.abort_if_panicking();
    }
}

fn panic_text(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|t| t.to_string());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".to_string())
}
