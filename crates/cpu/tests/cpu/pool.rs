//! The fork-join pool.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use phalanx_cpu::pool::Pool;

const SPINS: [Duration; 2] = [Duration::ZERO, Duration::from_micros(50)];

#[test]
fn every_task_runs_once() {
    for threads in 1..=4 {
        for spin in SPINS {
            let pool = Pool::new(threads, spin).unwrap();
            for tasks in [0, 1, 2, 3, 5, 64, 1000] {
                for _ in 0..50 {
                    let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                    pool.run(tasks, &|i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }
}

#[test]
fn a_panic_comes_back_and_the_pool_lives_on() {
    for threads in 1..=3 {
        let pool = Pool::new(threads, SPINS[1]).unwrap();
        let done = AtomicUsize::new(0);
        let run = std::panic::AssertUnwindSafe(|| {
            pool.run(100, &|i| {
                assert!(i != 37, "task 37");
                done.fetch_add(1, Ordering::Relaxed);
            });
        });
        let payload = std::panic::catch_unwind(run).expect_err("the panic of a task");
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"task 37"));
        if threads > 1 {
            assert_eq!(done.load(Ordering::Relaxed), 99);
        }
        // Tasks that wait for each other need a thread each.
        let (started, limit) = (AtomicUsize::new(0), Instant::now() + Duration::from_secs(20));
        pool.run(threads, &|_| {
            started.fetch_add(1, Ordering::SeqCst);
            while started.load(Ordering::SeqCst) < threads {
                assert!(Instant::now() < limit, "only one thread computes");
                std::thread::yield_now();
            }
        });
    }
}

#[test]
fn runs_may_nest_and_overlap() {
    let pool = Pool::new(3, SPINS[1]).unwrap();
    let sum = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..200 {
                    pool.run(4, &|_| {
                        pool.run(5, &|i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                    });
                }
            });
        }
    });
    assert_eq!(sum.load(Ordering::Relaxed), 3 * 200 * 4 * 10);
}

#[test]
fn workers_sleep_and_wake() {
    let pool = Pool::new(4, Duration::from_micros(5)).unwrap();
    for _ in 0..30 {
        std::thread::sleep(Duration::from_millis(1));
        let sum = AtomicUsize::new(0);
        pool.run(8, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 28);
    }
}

/// A thread finds in its caches what it wrote in earlier runs. Tasks that wait for each other need a thread each.
#[test]
fn each_thread_has_the_same_share_of_every_run() {
    const THREADS: usize = 3;
    let pool = Pool::new(THREADS, SPINS[1]).unwrap();
    let by: [Mutex<Option<ThreadId>>; THREADS] = Default::default();
    for run in 0..200 {
        let all_run = Barrier::new(THREADS);
        pool.run(THREADS, &|i| {
            all_run.wait();
            let own = std::thread::current().id();
            let first = *by[i].lock().unwrap().get_or_insert(own);
            assert_eq!(first, own, "task {i} of run {run} has changed its thread");
        });
    }
}
