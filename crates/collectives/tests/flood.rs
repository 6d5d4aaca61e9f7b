//! Connections of strangers while ranks of two hosts train: bounded memory, descriptors and threads, and right sums.

use std::io::Write;
use std::net::TcpStream;
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{Layout, host, ranks_on, same_bits, sample, summed, tensor, values};
use phalanx_collectives::Options;
use phalanx_testing::hostile::Random;
use phalanx_testing::process;

/// Strangers that are connected at the same time, and rounds of them.
const AT_ONCE: usize = 350;
const ROUNDS: usize = 4;
/// A rank keeps at most so many strangers.
const GUESTS_MAX: usize = 128;

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// With it, a process runs this test alone: it counts the threads and descriptors of all.
const ALONE: &str = "PHALANX_TEST_ALONE";

#[test]
fn a_thousand_strangers_neither_stop_nor_fill_a_rank() {
    if std::env::var_os(ALONE).is_none() {
        let mut alone = process::command(std::env::current_exe().unwrap());
        let name = "flood::a_thousand_strangers_neither_stop_nor_fill_a_rank";
        alone.args(["--exact", name]).env(ALONE, "1").stdout(Stdio::piped()).stderr(Stdio::piped());
        let ended = process::finish(alone.spawn().unwrap());
        let said = String::from_utf8_lossy(&ended.stdout);
        assert!(ended.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let (target, over) = (Mutex::new(None), AtomicBool::new(false));
    let flood = || {
        let address = loop {
            if let Some(address) = *target.lock().unwrap() {
                break address;
            }
            std::thread::yield_now();
        };
        let (threads, descriptors) = (entries("/proc/self/task"), entries("/proc/self/fd"));
        for round in 0..ROUNDS {
            let mut random = Random::of_case("strangers", round);
            let strangers: Vec<TcpStream> = (0..AT_ONCE)
                .map(|_| {
                    let mut stranger = TcpStream::connect(address).unwrap();
                    let length = random.below(200);
                    // One in three says nothing; the rank may hang up on the others before they have spoken.
                    if random.below(3) > 0 {
                        let _ = stranger.write_all(&random.bytes(length));
                    }
                    stranger
                })
                .collect();
            let open = entries("/proc/self/fd");
            assert!(
                open <= descriptors + strangers.len() + GUESTS_MAX + 8,
                "{open} descriptors after {descriptors}"
            );
            assert_eq!(entries("/proc/self/task"), threads, "threads in round {round}");
        }
        over.store(true, Ordering::Release);
    };
    std::thread::scope(|scope| {
        let flooding = scope.spawn(flood);
        let results =
            ranks_on(Layout::Hosts(&[1, 1]), &Options { overlap: false, ..Options::default() }, |endpoint| {
                let group = endpoint.group("data");
                group.barrier().wait().unwrap();
                if endpoint.rank() == 0 {
                    *target.lock().unwrap() = endpoint.address();
                }
                // Rank 0 says when both stop, so that both make as many calls.
                for round in 0.. {
                    let going = !over.load(Ordering::Acquire) && !flooding.is_finished();
                    let own = [if endpoint.rank() == 0 && going { 1.0f32 } else { 0.0 }];
                    let going = values::<f32>(&group.all_reduce(tensor(&host(), &own)).wait().unwrap())[0];
                    let x = tensor(&host(), &sample::<f32>(endpoint.rank(), 50_000));
                    same_bits(
                        &values::<f32>(&group.all_reduce(x).wait().unwrap()),
                        &summed(2, 50_000),
                        "sum",
                    );
                    if going == 0.0 {
                        return round;
                    }
                }
                0
            });
        assert!(results.into_iter().all(|rounds| rounds.unwrap() > 0));
        flooding.join().unwrap();
    });
}
