//! The double of NCCL: what arrives between two devices, and what is reported or refused.
//!
//! The number of devices is given by the environment, which the emulator reads once, so each test runs itself again in a process of its own.

use std::process::Stdio;
use std::sync::Barrier;

use phalanx_cuda_emulator::driver::*;
use phalanx_cuda_emulator::nccl::*;

use crate::process::{command, finish};

/// Tells a test that it runs in its own process.
const INSIDE: &str = "PHALANX_EMULATOR_INSIDE";

/// `ncclFloat`, `ncclInt8` and `ncclFloat16`
const F32: i32 = 7;
const I8: i32 = 0;
const F16: i32 = 6;

/// Runs a test of this file again with two devices and several orders of streams, and `body` where that has happened.
fn with_two_cards(test: &str, body: impl Fn()) {
    with(test, &[], body);
}

/// The same with variables.
fn with(test: &str, variables: &[(&str, &str)], body: impl Fn()) {
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    for seed in ["0", "1", "2", "3"] {
        let child = command(std::env::current_exe().unwrap())
            .args(["--exact", &format!("nccl::{test}"), "--nocapture"])
            .env("PHALANX_EMULATOR_CARDS", "2")
            .env("PHALANX_EMULATOR_SEED", seed)
            .envs(variables.iter().copied())
            .env(INSIDE, "1")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let output = finish(child.unwrap());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "seed {seed}: {said}");
    }
}

macro_rules! unsafely {
    ($($body:tt)*) => {{
        // SAFETY: pointers are to values that live as long as the call.
        unsafe { $($body)* }
    }};
}

#[track_caller]
fn ok(status: Status) {
    assert_eq!(status, Status::SUCCESS, "{:?}", reports());
}

#[track_caller]
fn done(result: NcclResult) {
    assert_eq!(result, NcclResult::SUCCESS, "{:?}", reports());
}

fn reports() -> Vec<String> {
    let mut count = 0;
    unsafely!(phalanxEmulatorReports(&mut count));
    let report = |index| {
        let mut text = [0u8; 1000];
        unsafely!(phalanxEmulatorReport(index, text.as_mut_ptr().cast(), text.len()));
        String::from_utf8_lossy(&text).trim_end_matches('\0').to_string()
    };
    (0..count).map(report).collect()
}

/// One rank: a device with a stream and a communicator.
struct Rank {
    rank: usize,
    stream: usize,
    communicator: usize,
}

fn invitation() -> UniqueId {
    let mut id = UniqueId([0; 128]);
    done(unsafely!(ncclGetUniqueId(&mut id)));
    id
}

fn configuration() -> CommunicatorConfig {
    CommunicatorConfig {
        size: size_of::<CommunicatorConfig>(),
        magic: 0xcafe_beef,
        version: 21700,
        blocking: 0,
    }
}

/// Makes a device's context that of the thread.
fn enter(card: i32) {
    let mut context = 0;
    ok(unsafely!(cuInit(0)));
    ok(unsafely!(cuDevicePrimaryCtxRetain(&mut context, card)));
    ok(unsafely!(cuCtxSetCurrent(context)));
}

/// The result of joining, when it is known.
fn join(id: UniqueId, rank: usize, card: i32) -> (usize, NcclResult) {
    enter(card);
    let (mut communicator, mut config) = (0, configuration());
    let begun = unsafely!(ncclCommInitRankConfig(&mut communicator, 2, id, rank as i32, &mut config));
    assert_eq!(begun, NcclResult::IN_PROGRESS);
    loop {
        let mut state = NcclResult::SUCCESS;
        done(unsafely!(ncclCommGetAsyncError(communicator, &mut state)));
        if state != NcclResult::IN_PROGRESS {
            return (communicator, state);
        }
        std::thread::yield_now();
    }
}

/// Runs two ranks with devices of their own, as threads.
fn two_ranks(body: impl Fn(&Rank) + Sync) {
    let id = invitation();
    std::thread::scope(|scope| {
        let body = &body;
        for rank in 0..2 {
            scope.spawn(move || {
                let (communicator, state) = join(id, rank, rank as i32);
                done(state);
                let mut stream = 0;
                ok(unsafely!(cuStreamCreate(&mut stream, 1)));
                body(&Rank { rank, stream, communicator });
            });
        }
    });
}

impl Rank {
    fn peer(&self) -> i32 {
        1 - self.rank as i32
    }

    /// Memory with numbers, which is ready when this returns.
    fn numbers(&self, numbers: &[f32]) -> u64 {
        let mut address = 0;
        ok(unsafely!(cuMemAlloc_v2(&mut address, 4 * numbers.len())));
        ok(unsafely!(cuMemcpyHtoD_v2(address, numbers.as_ptr().cast(), 4 * numbers.len())));
        address
    }

    fn read(&self, address: u64, count: usize) -> Vec<f32> {
        let mut numbers = vec![0f32; count];
        ok(unsafely!(cuStreamSynchronize(self.stream)));
        ok(unsafely!(cuMemcpyDtoH_v2(numbers.as_mut_ptr().cast(), address, 4 * count)));
        numbers
    }

    fn send(&self, from: u64, count: usize, element: i32) -> NcclResult {
        unsafely!(ncclSend(from, count, element, self.peer(), self.communicator, self.stream))
    }

    fn receive(&self, to: u64, count: usize, element: i32) -> NcclResult {
        unsafely!(ncclRecv(to, count, element, self.peer(), self.communicator, self.stream))
    }

    fn group(&self, calls: impl FnOnce()) -> NcclResult {
        done(unsafely!(ncclGroupStart()));
        calls();
        unsafely!(ncclGroupEnd())
    }
}

#[test]
fn bytes_arrive_in_the_order_of_streams() {
    with_two_cards("bytes_arrive_in_the_order_of_streams", || {
        two_ranks(|r| {
            let own = r.rank as f32;
            let (x, whole) = (r.numbers(&[own, own + 10.0]), r.numbers(&[-1.0; 4]));
            done(unsafely!(ncclAllGather(x, whole, 2, F32, r.communicator, r.stream)));
            assert_eq!(r.read(whole, 4), [0.0, 10.0, 1.0, 11.0]);
            done(unsafely!(ncclBroadcast(x, x, 2, F32, 1, r.communicator, r.stream)));
            assert_eq!(r.read(x, 2), [1.0, 11.0]);
            let (from, to) = (r.numbers(&[own, own + 1.0, own + 2.0]), r.numbers(&[-1.0; 3]));
            for _ in 0..3 {
                done(r.group(|| {
                    done(r.send(from, 3, F32));
                    done(r.receive(to, 3, F32));
                }));
            }
            let other = 1.0 - own;
            assert_eq!(r.read(to, 3), [other, other + 1.0, other + 2.0]);
            done(unsafely!(ncclCommFinalize(r.communicator)));
            done(unsafely!(ncclCommDestroy(r.communicator)));
        });
        assert!(reports().is_empty(), "{:?}", reports());
    });
}

#[test]
fn messages_of_other_lengths_or_types_are_reported() {
    with_two_cards("messages_of_other_lengths_or_types_are_reported", || {
        // As many bytes of another type, and fewer elements.
        for (count, element, words) in [(2, F16, "of type 6"), (1, F32, "of 1 elements")] {
            ok(unsafely!(phalanxEmulatorReset(0)));
            two_ranks(|r| {
                let x = r.numbers(&[1.0, 2.0]);
                if r.rank == 0 {
                    done(r.send(x, count, element));
                } else {
                    done(r.receive(x, 2, F32));
                }
                // One of them fails with the report, whoever is first; both end.
                let _ = unsafely!(cuStreamSynchronize(r.stream));
            });
            let found = reports();
            assert!(
                found
                    .iter()
                    .any(|report| report.contains("communication that does not match")
                        && report.contains(words)),
                "{found:?}"
            );
        }
    });
}

#[test]
fn a_buffer_that_is_used_before_the_exchange_is_over_is_reported() {
    with_two_cards("a_buffer_that_is_used_before_the_exchange_is_over_is_reported", || {
        let both = Barrier::new(2);
        two_ranks(|r| {
            let (from, to) = (r.numbers(&[1.0; 64]), r.numbers(&[0.0; 64]));
            both.wait();
            done(r.group(|| {
                done(r.send(from, 64, F32));
                done(r.receive(to, 64, F32));
            }));
            // What is reported of one rank fails the calls that the other still makes.
            both.wait();
            if r.rank == 0 {
                // Another stream, and nothing that orders it behind the exchange.
                let mut other = 0;
                let _ = unsafely!(cuStreamCreate(&mut other, 1));
                let _ = unsafely!(cuMemsetD32Async(to, 0, 64, other));
                let _ = unsafely!(cuStreamSynchronize(other));
            }
            let _ = unsafely!(cuStreamSynchronize(r.stream));
            both.wait();
        });
        let found = reports();
        assert!(found.iter().any(|report| report.contains("operations without an order")), "{found:?}");
    });
}

#[test]
fn wrong_uses_are_refused() {
    with_two_cards("wrong_uses_are_refused", || {
        // Two ranks on one device.
        let id = invitation();
        let joined = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || join(id, rank, 0).1)).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(joined, [NcclResult::INVALID_USAGE; 2]);
        enter(0);
        let (mut communicator, id) = (0, invitation());
        let refused = |ranks, rank, change: fn(&mut CommunicatorConfig), communicator: &mut usize| {
            let mut config = configuration();
            change(&mut config);
            unsafely!(ncclCommInitRankConfig(communicator, ranks, id, rank, &mut config))
        };
        for (ranks, rank, change) in [
            (2, 2, (|_| ()) as fn(&mut CommunicatorConfig)),
            (0, 0, |_| ()),
            (1, 0, |c| c.magic = 0),
            (1, 0, |c| c.size = 4),
        ] {
            let result = refused(ranks, rank, change, &mut communicator);
            assert_eq!(result, NcclResult::INVALID_ARGUMENT);
        }
        assert_eq!(unsafely!(ncclGroupEnd()), NcclResult::INVALID_USAGE);
        two_ranks(|r| {
            let x = r.numbers(&[0.0; 4]);
            let send = |address, element, peer, communicator| {
                unsafely!(ncclSend(address, 1, element, peer, communicator, r.stream))
            };
            assert_eq!(send(x, F32, 2, r.communicator), NcclResult::INVALID_ARGUMENT);
            assert_eq!(send(x, 99, r.peer(), r.communicator), NcclResult::INVALID_ARGUMENT);
            assert_eq!(send(0, I8, r.peer(), r.communicator), NcclResult::INVALID_ARGUMENT);
            assert_eq!(send(x, F32, r.peer(), 12345), NcclResult::INVALID_ARGUMENT);
            // The communicator of another device.
            enter(r.peer());
            assert_eq!(send(x, F32, r.peer(), r.communicator), NcclResult::INVALID_USAGE);
        });
    });
}

/// A receive for which nothing is ever sent waits, until its communicator is ended.
#[test]
fn an_exchange_without_its_other_half_ends_with_its_communicator() {
    with_two_cards("an_exchange_without_its_other_half_ends_with_its_communicator", || {
        two_ranks(|r| {
            let x = r.numbers(&[7.0; 8]);
            if r.rank == 0 {
                done(r.receive(x, 8, F32));
                for _ in 0..50 {
                    assert_eq!(unsafely!(cuStreamQuery(r.stream)), Status::NOT_READY);
                }
                done(unsafely!(ncclCommAbort(r.communicator)));
            }
            assert_eq!(r.read(x, 8), [7.0; 8]);
        });
        assert!(reports().is_empty(), "{:?}", reports());
    });
}

fn free_memory() -> usize {
    let (mut free, mut total) = (0, 0);
    ok(unsafely!(cuMemGetInfo_v2(&mut free, &mut total)));
    free
}

#[test]
fn a_connection_takes_memory_when_it_is_first_used() {
    with("a_connection_takes_memory_when_it_is_first_used", &[("PHALANX_EMULATOR_NCCL_MB", "64")], || {
        two_ranks(|r| {
            let x = r.numbers(&[7.0; 8]);
            let before = free_memory();
            for _ in 0..2 {
                done(if r.rank == 0 { r.receive(x, 8, F32) } else { r.send(x, 8, F32) });
                assert_eq!(before - free_memory(), 64 << 20);
            }
            ok(unsafely!(cuStreamSynchronize(r.stream)));
            done(unsafely!(ncclCommAbort(r.communicator)));
            assert_eq!(free_memory(), before);
        });
    });
}

/// What stands behind a receive for which nothing is sent yet, in another stream.
fn work_beside_a_receive(is_held: bool) {
    let both = Barrier::new(2);
    two_ranks(|r| {
        let (x, y) = (r.numbers(&[7.0; 8]), r.numbers(&[0.0; 8]));
        if r.rank == 0 {
            let mut other = 0;
            ok(unsafely!(cuStreamCreate(&mut other, 1)));
            done(r.receive(x, 8, F32));
            ok(unsafely!(cuMemsetD32Async(y, 0, 8, other)));
            let is_done = (0..50).any(|_| unsafely!(cuStreamQuery(other)) == Status::SUCCESS);
            assert_eq!(is_done, !is_held);
            both.wait();
            ok(unsafely!(cuStreamSynchronize(other)));
        } else {
            both.wait();
            done(r.send(x, 8, F32));
        }
        ok(unsafely!(cuStreamSynchronize(r.stream)));
    });
}

#[test]
fn streams_of_one_queue_wait_for_each_other() {
    let one = [("PHALANX_EMULATOR_QUEUES", "on"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")];
    with("streams_of_one_queue_wait_for_each_other", &one, || work_beside_a_receive(true));
}

#[test]
fn streams_of_two_queues_do_not() {
    let two = [("PHALANX_EMULATOR_QUEUES", "on"), ("CUDA_DEVICE_MAX_CONNECTIONS", "2")];
    with("streams_of_two_queues_do_not", &two, || work_beside_a_receive(false));
}
