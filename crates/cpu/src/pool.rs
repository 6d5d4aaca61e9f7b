//! A fork-join pool: one `run` costs about a microsecond while the workers still spin.
//!
//! Each thread has a share of the tasks: the same part of each run, so that it finds what it wrote in earlier runs in the
//! caches of its core. A thread that has done its own share takes tasks of the others.
//!
//! Protocol. One 64-bit ticket for each share holds the number of the run (high half) and how many of its tasks
//! nobody has claimed (low half). The caller writes the job, then publishes the tickets, and then the number of the run; whoever
//! lowers the low half of a ticket by a compare-and-swap owns one task. The job cannot change while a claimed task is not
//! done, because the caller leaves `run` only when `done` has counted all tasks; so a worker reads the
//! job after it has claimed, never before. Idle workers spin for a while until the number of the run changes, then sleep on a
//! condition variable; `sleepers` tells the caller whether waking is needed at all.
//!
//! Which thread runs which task is left to chance in the end: tasks must not care, and results never depend on
//! the number of threads.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_tensor::refused_thread;

/// The threads of one rank: its caller and `threads - 1` workers.
pub struct Pool {
    shared: Arc<Shared>,
    /// Locked during a run that uses the workers.
    turn: Mutex<u32>,
    workers: Vec<JoinHandle<()>>,
}

/// The job of the current run.
#[derive(Clone, Copy)]
struct Job {
    task: *const (dyn Fn(usize) + Sync),
    tasks: u32,
}

/// On a cache line of its own, because the caller and all workers write it.
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// The number of the run whose tickets were published last.
    latest: Line<AtomicU32>,
    /// The ticket of each thread's share; the caller's is the first.
    tickets: Box<[Line<AtomicU64>]>,
    done: Line<AtomicU32>,
    job: UnsafeCell<Job>,
    sleepers: AtomicUsize,
    caller_sleeps: AtomicBool,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    bed: Mutex<()>,
    work: Condvar,
    finished: Condvar,
    spin: Duration,
}

// SAFETY: `job` is written only by the caller that holds `turn`, before it publishes a ticket with
// tasks left and after the previous run's tasks are all done; it is read only by owners of a claimed
// task. The pointer in it is to a `Sync` closure that outlives the run. All else is atomics and locks.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

fn nothing(_: usize) {}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds these locks; panics of tasks are caught before.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// A pool of `threads` threads in all, whose workers spin for `spin` before they sleep.
    ///
    /// # Errors
    /// When the system starts fewer threads; threads that were already started are ended.
    pub fn new(threads: usize, spin: Duration) -> std::io::Result<Pool> {
        assert!(threads >= 1, "a pool has at least the calling thread");
        let shared = Arc::new(Shared {
            latest: Line(AtomicU32::new(0)),
            tickets: (0..threads).map(|_| Line(AtomicU64::new(0))).collect(),
            done: Line(AtomicU32::new(0)),
            job: UnsafeCell::new(Job { task: &nothing, tasks: 0 }),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            bed: Mutex::new(()),
            work: Condvar::new(),
            finished: Condvar::new(),
            spin,
        });
        // Created first: if a thread cannot be started, dropping the pool ends the others.
        let mut pool = Pool { shared, turn: Mutex::new(0), workers: Vec::new() };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("cpu-{index}"));
            let worker = builder.spawn(move || shared.work(index));
            let whose = || format!("compute thread {index} of {threads}");
            pool.workers.push(worker.map_err(|error| refused_thread(&whose(), &error))?);
        }
        Ok(pool)
    }

    /// Threads in all, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task` with each of `0..tasks`, on all threads, and returns when all are done. A panic of a task is raised
    /// again here, after the others are done.
    ///
    /// If the workers are busy (with another thread's run, or because this is a run inside a task), the caller does all
    /// the work.
    pub fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let turn = || match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            // A task of an earlier run has panicked; that run is over.
            Err(TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if tasks > 1
            && !self.workers.is_empty()
            && let Some(mut turn) = turn()
        {
            self.shared.run(&mut turn, tasks, task, self.workers.len());
        } else {
            (0..tasks).for_each(task);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _bed = locked(&self.shared.bed);
            self.shared.work.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks and has none of its own.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn run(&self, turn: &mut u32, tasks: usize, task: &(dyn Fn(usize) + Sync), workers: usize) {
        *turn = turn.wrapping_add(1);
        let count = u32::try_from(tasks).expect("fewer than 2^32 tasks");
        // SAFETY: only the lifetime changes; `run` does not return before every call is done.
        let task = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(
                task,
            )
        };
        // SAFETY: this thread holds the turn and no task of an earlier run is left (see `Shared`).
        unsafe { *self.job.get() = Job { task, tasks: count } };
        self.done.0.store(0, Ordering::Relaxed);
        for (share, ticket) in self.tickets.iter().enumerate() {
            let (first, end) = self.share(share, count);
            ticket.0.store(u64::from(*turn) << 32 | u64::from(end - first), Ordering::Release);
        }
        // A worker that goes to sleep first counts itself and then reads the number of the run. This thread does it in the
        // opposite order, so at least one of the two sees the other.
        self.latest.0.store(*turn, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            let _bed = locked(&self.bed);
            if tasks > workers {
                self.work.notify_all();
            } else {
                (1..tasks).for_each(|_| self.work.notify_one());
            }
        }
        self.work_off(0, *turn);
        self.wait_until_done(count);
        if let Some(payload) = locked(&self.panic).take() {
            resume_unwind(payload);
        }
    }

    /// First and end of the tasks of a share, of `tasks` in all. The caller, who begins first, has one in any case.
    fn share(&self, share: usize, tasks: u32) -> (u32, u32) {
        let shares = self.tickets.len() as u64;
        let edge = |share: usize| (u64::from(tasks) * share as u64).div_ceil(shares) as u32;
        (edge(share), edge(share + 1))
    }

    /// Runs tasks of `run` until none is left: those of the thread's own share first, then those of the shares behind it.
    fn work_off(&self, own: usize, run: u32) {
        let shares = self.tickets.len();
        (0..shares).for_each(|next| while self.claim_and_call((own + next) % shares, run) {});
    }

    /// Runs one task of a share, if one is left. Tasks of a later run are left alone: the thread begins that one with its own.
    fn claim_and_call(&self, share: usize, run: u32) -> bool {
        let line = &self.tickets[share].0;
        let mut ticket = line.load(Ordering::Acquire);
        loop {
            let left = ticket as u32;
            if left == 0 || (ticket >> 32) as u32 != run {
                return false;
            }
            match line.compare_exchange_weak(ticket, ticket - 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    // SAFETY: the claimed task keeps the run open, so the job is stable and its closure
                    // alive until `done` is raised below.
                    let Job { task, tasks } = unsafe { *self.job.get() };
                    let (_, end) = self.share(share, tasks);
                    let index = (end - left) as usize;
                    // SAFETY: as above.
                    let call = AssertUnwindSafe(|| unsafe { (*task)(index) });
                    if let Err(payload) = catch_unwind(call) {
                        locked(&self.panic).get_or_insert(payload);
                    }
                    if self.done.0.fetch_add(1, Ordering::SeqCst) + 1 == tasks
                        && self.caller_sleeps.load(Ordering::SeqCst)
                    {
                        let _bed = locked(&self.bed);
                        self.finished.notify_all();
                    }
                    return true;
                }
                Err(now) => ticket = now,
            }
        }
    }

    fn wait_until_done(&self, count: u32) {
        let is_done = || self.done.0.load(Ordering::SeqCst) == count;
        if spin_until(self.spin, &is_done) {
            return;
        }
        let mut bed = locked(&self.bed);
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while !is_done() {
            bed = self.finished.wait(bed).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }

    /// Loop of worker `own` until the pool is dropped.
    fn work(&self, own: usize) {
        let mut seen = 0;
        while !self.stop.load(Ordering::SeqCst) {
            let has_work =
                || self.latest.0.load(Ordering::SeqCst) != seen || self.stop.load(Ordering::SeqCst);
            if !spin_until(self.spin, &has_work) {
                let mut bed = locked(&self.bed);
                self.sleepers.fetch_add(1, Ordering::SeqCst);
                while !has_work() {
                    bed = self.work.wait(bed).unwrap_or_else(PoisonError::into_inner);
                }
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
            }
            // Read before the tickets: a run that is published meanwhile has another number.
            seen = self.latest.0.load(Ordering::SeqCst);
            self.work_off(own, seen);
        }
    }
}

/// Spins until `ready` is true, for `limit` at most. Returns whether it became true.
fn spin_until(limit: Duration, ready: &dyn Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() >= limit {
            return ready();
        }
    }
}
