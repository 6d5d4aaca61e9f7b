//! Tries every order in which ranks can step through counters and records (`loom`), on a model of the system's sleep:
//! no wake-up is lost, no descriptor is overwritten while a peer reads it, no half-written reason is read.
//!
//! The model never wakes a sleeper because time has passed, so a lost wake-up is a deadlock, which `loom` reports.

use std::sync::atomic::Ordering;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use crate::shared_memory::counter::{Counter, SharedWord, WrittenOnce};

/// A word whose sleepers wait for a condition, as those of a futex do: comparing and falling asleep is one step.
struct ModelWord {
    value: AtomicU32,
    queue: Mutex<()>,
    woken: Condvar,
}

impl ModelWord {
    fn zero() -> ModelWord {
        ModelWord { value: AtomicU32::new(0), queue: Mutex::new(()), woken: Condvar::new() }
    }
}

impl SharedWord for ModelWord {
    fn load(&self, order: Ordering) -> u32 {
        self.value.load(order)
    }
    fn store(&self, value: u32, order: Ordering) {
        self.value.store(value, order);
    }
    fn add(&self, value: u32) {
        self.value.fetch_add(value, Ordering::SeqCst);
    }
    fn replace(&self, old: u32, new: u32) -> bool {
        self.value.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
    fn model_fence() {
        fence(Ordering::SeqCst);
    }
    fn sleep(&self, seen: u32, _: Duration) {
        let queue = self.queue.lock().unwrap();
        if self.value.load(Ordering::SeqCst) == seen {
            drop(self.woken.wait(queue).unwrap());
        }
    }
    fn wake(&self) {
        let _queue = self.queue.lock().unwrap();
        self.woken.notify_all();
    }
}

fn counter() -> Counter<ModelWord> {
    Counter::new(ModelWord::zero(), ModelWord::zero())
}

/// Waits until the counter has reached `until`.
fn wait(counter: &Counter<ModelWord>, until: u32) {
    loop {
        let seen = counter.value();
        if seen >= until {
            return;
        }
        counter.sleep(seen, Duration::MAX);
    }
}

/// Memory of one rank that others may read: `loom` reports an access that is not ordered after a write.
type Shared = UnsafeCell<u32>;

fn write(shared: &Shared, value: u32) {
    // SAFETY: `loom` checks that no other access is concurrent; that is what these tests are about.
    shared.with_mut(|place| unsafe { *place = value });
}

fn read(shared: &Shared) -> u32 {
    // SAFETY: as above.
    shared.with(|place| unsafe { *place })
}

/// Data that one rank shares in a channel.
struct Slot {
    counter: Counter<ModelWord>,
    descriptors: [Shared; 2],
    buffer: Shared,
}

// SAFETY: the cells are checked by `loom`.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

fn slots() -> Arc<[Slot; 2]> {
    let slot = || {
        let cell = || UnsafeCell::new(0);
        Slot { counter: counter(), descriptors: [cell(), cell()], buffer: cell() }
    };
    Arc::new([slot(), slot()])
}

/// Calls 1 to `calls` of one of two ranks, as `Meeting` runs them: meet, read the peer's buffer, leave. A `barrier` has no
/// buffers and no second step.
fn calls(slots: &[Slot; 2], rank: usize, calls: u32, barrier: bool) {
    let (own, peer) = (&slots[rank], &slots[1 - rank]);
    let mut ticks = 0;
    for call in 1..=calls {
        if !barrier {
            write(&own.buffer, call);
        }
        write(&own.descriptors[call as usize % 2], call);
        ticks += 1;
        own.counter.publish(ticks);
        wait(&peer.counter, ticks);
        assert_eq!(read(&peer.descriptors[call as usize % 2]), call);
        if !barrier {
            assert_eq!(read(&peer.buffer), call);
            ticks += 1;
            own.counter.publish(ticks);
            wait(&peer.counter, ticks);
        }
    }
}

fn two_ranks(number: u32, barrier: bool) {
    let mut model = loom::model::Builder::new();
    // Three take 18 s: the nightly lane asks for them by loom's own variable, LOOM_MAX_PREEMPTIONS.
    model.preemption_bound.get_or_insert(2);
    model.check(move || {
        let slots = slots();
        let other = Arc::clone(&slots);
        let second = thread::spawn(move || calls(&other, 1, number, barrier));
        calls(&slots, 0, number, barrier);
        second.join().unwrap();
    });
}

#[test]
fn a_sleeper_is_always_woken() {
    loom::model(|| {
        let shared = Arc::new(counter());
        let other = Arc::clone(&shared);
        let sleeper = thread::spawn(move || wait(&other, 2));
        shared.publish(1);
        shared.publish(2);
        sleeper.join().unwrap();
    });
}

#[test]
fn buffers_and_descriptors_are_read_before_they_are_written_again() {
    two_ranks(2, false);
}

/// Calls of one step show that two descriptors in turn are enough.
#[test]
fn two_descriptors_are_enough() {
    two_ranks(3, true);
}

/// Whoever waits for the end of the job is woken by it. (A rank that sleeps on a counter is woken, too, unless the job
/// ends between its look around and its sleep; therefore it sleeps in slices.)
#[test]
fn the_end_of_the_job_wakes_those_who_wait_for_it() {
    loom::model(|| {
        let shared = Arc::new(WrittenOnce::new(ModelWord::zero()));
        let other = Arc::clone(&shared);
        let sleeper = thread::spawn(move || {
            while !other.has_begun() {
                other.sleep(Duration::MAX);
            }
        });
        shared.write(|| {});
        sleeper.join().unwrap();
    });
}

/// One of two ranks that end the job writes the reason, and whoever sees it complete reads all of it.
#[test]
fn one_reason_is_written_and_read_whole() {
    struct Record(WrittenOnce<ModelWord>, [Shared; 2]);
    // SAFETY: the cells are checked by `loom`.
    unsafe impl Sync for Record {}
    // SAFETY: as above.
    unsafe impl Send for Record {}
    loom::model(|| {
        let cell = || UnsafeCell::new(0);
        let record = Arc::new(Record(WrittenOnce::new(ModelWord::zero()), [cell(), cell()]));
        let end = |record: &Record, cause| {
            record.0.write(|| record.1.iter().for_each(|word| write(word, cause)));
        };
        let other = Arc::clone(&record);
        let second = thread::spawn(move || end(&other, 2));
        end(&record, 1);
        if record.0.is_complete() {
            let [first, last] = record.1.each_ref().map(read);
            assert!(first == last && (1..=2).contains(&first));
        }
        second.join().unwrap();
        assert!(record.0.is_complete());
    });
}
