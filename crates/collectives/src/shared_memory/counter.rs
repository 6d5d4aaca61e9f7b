//! A counter on which other threads sleep, and a record that is written once: the two things through which ranks wait for
//! each other.
//!
//! Both are generic over the word in memory, so that `counter_model` can try every order of their steps.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;

/// A word in memory that threads of several processes share, and on which they can sleep.
pub(crate) trait SharedWord {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    /// Adds, wrapping, sequentially consistent.
    fn add(&self, value: u32);
    /// Replaces `old` by `new`; whether it was `old`.
    fn replace(&self, old: u32, new: u32) -> bool;
    /// Called between a store and a load, or an addition and a load, that are all sequentially consistent. It exists for
    /// `loom`, which takes such accesses for those that acquire and release, and needs a fence.
    fn model_fence() {}
    /// Sleeps if the word is `seen`, until it is woken or `limit` has passed; may also return early.
    fn sleep(&self, seen: u32, limit: Duration);
    /// Wakes all threads that sleep on the word.
    fn wake(&self);
}

impl SharedWord for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }
    fn add(&self, value: u32) {
        self.fetch_add(value, Ordering::SeqCst);
    }
    fn replace(&self, old: u32, new: u32) -> bool {
        self.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
    fn sleep(&self, seen: u32, limit: Duration) {
        let limit = futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Whether woken, timed out, interrupted or already changed: the caller checks the word again.
        let _ = futex::wait(self, futex::Flags::empty(), seen, Some(&limit));
    }
    fn wake(&self) {
        let _ = futex::wake(self, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// A counter that one thread advances and others wait for.
#[repr(C)]
pub(crate) struct Counter<W = AtomicU32> {
    value: W,
    /// Threads asleep on the value.
    sleepers: W,
}

impl Counter {
    /// The word that holds the value, for the copy of it on other hosts.
    pub(crate) fn word(&self) -> &AtomicU32 {
        &self.value
    }
}

impl<W: SharedWord> Counter<W> {
    /// A counter whose words are zero.
    #[cfg(test)]
    pub(crate) fn new(value: W, sleepers: W) -> Counter<W> {
        Counter { value, sleepers }
    }

    /// The value; what its owner wrote to memory before it advanced the counter to this value can be read now.
    pub(crate) fn value(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Advances the counter to `value` and wakes the threads that sleep on it.
    pub(crate) fn publish(&self, value: u32) {
        // Sequentially consistent, like the sleeper's two steps: either the sleeper sees the new value, or this thread
        // sees the sleeper.
        self.value.store(value, Ordering::SeqCst);
        W::model_fence();
        self.wake_sleepers();
    }

    /// Wakes the threads that sleep on the counter, so that they look around.
    pub(crate) fn wake_sleepers(&self) {
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            self.value.wake();
        }
    }

    /// Sleeps while the counter is at `seen`, for `limit` at most, or until it is woken.
    pub(crate) fn sleep(&self, seen: u32, limit: Duration) {
        self.sleepers.add(1);
        W::model_fence();
        if self.value.load(Ordering::SeqCst) == seen {
            self.value.sleep(seen, limit);
        }
        self.sleepers.add(u32::MAX);
    }
}

/// The state of a record that any of several threads may write, the first of them alone.
#[repr(C)]
pub(crate) struct WrittenOnce<W = AtomicU32> {
    /// 0: not written; [`WrittenOnce::BEGUN`]; [`WrittenOnce::COMPLETE`].
    state: W,
}

impl<W: SharedWord> WrittenOnce<W> {
    const BEGUN: u32 = 1;
    const COMPLETE: u32 = 2;

    /// A record that is not written, from a word that is zero.
    #[cfg(test)]
    pub(crate) fn new(state: W) -> WrittenOnce<W> {
        WrittenOnce { state }
    }

    /// Runs `write`, which writes the record, unless another thread has begun to.
    pub(crate) fn write(&self, write: impl FnOnce()) {
        if self.state.replace(0, Self::BEGUN) {
            write();
            self.state.store(Self::COMPLETE, Ordering::SeqCst);
            self.state.wake();
        }
    }

    /// Returns whether a thread has begun to write the record.
    pub(crate) fn has_begun(&self) -> bool {
        self.state.load(Ordering::Relaxed) != 0
    }

    /// Returns whether the record can be read.
    pub(crate) fn is_complete(&self) -> bool {
        self.state.load(Ordering::Acquire) == Self::COMPLETE
    }

    /// Sleeps until the record is written, for `limit` at most; may return early.
    pub(crate) fn sleep(&self, limit: Duration) {
        self.state.sleep(0, limit);
    }
}
