//! Cost of connections by strangers: two ranks of two pretended hosts do steps (10 ms of arithmetic, and an all_reduce of 1 MiB
//! over encrypted TCP), while a thread makes a thousand connections a second: to another port of this process, or to the door of
//! rank 0. The turns alternate. A third of the connections close at once, a third send bytes that are no handshake, a third send
//! nothing.
//!
//! `cargo run --release -p phalanx-collectives --example flood`
#![allow(clippy::print_stdout, reason = "an example, for a terminal")]

use std::collections::VecDeque;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use phalanx_collectives::pretended::{NoKernels, hosts_of_threads};
use phalanx_collectives::{Endpoint, Options};
use phalanx_tensor::{Arena, Category, DType, Device};

/// Connections in a second.
const RATE: f64 = 1000.0;
/// Connections that the flood holds open, and those that the other port holds, as many as the door.
const HELD: [usize; 2] = [200, 128];
/// Time of one turn.
const TURN: Duration = Duration::from_millis(1000);
/// Turns of each kind.
const TURNS: usize = 10;
/// Arithmetic of a step.
const COMPUTE: Duration = Duration::from_millis(10);
/// Elements of the all_reduce.
const ELEMENTS: usize = 1 << 18;

/// Targets of the flood.
const KINDS: [&str; 3] = ["nowhere", "to another port", "to the door"];
static KIND: AtomicUsize = AtomicUsize::new(0);
static OVER: AtomicBool = AtomicBool::new(false);
static MADE: AtomicUsize = AtomicUsize::new(0);

/// Measurements of all turns of a kind.
#[derive(Default)]
struct Taken {
    steps_ms: Vec<f64>,
    connections: usize,
    processor_ms: [f64; 3],
}

fn main() -> std::io::Result<()> {
    let other = TcpListener::bind(("127.0.0.1", 0))?;
    let (endpoints, _launchers) = hosts_of_threads(&[1, 1], false, 1)?;
    let targets = [other.local_addr()?, endpoints[0].address().expect("a job of two hosts")];
    std::thread::Builder::new().name("other-port".into()).spawn(move || {
        let mut held = VecDeque::new();
        while let Ok((socket, _)) = other.accept() {
            held.push_back(socket);
            held.drain(..held.len().saturating_sub(HELD[1]));
        }
    })?;
    std::thread::Builder::new().name("strangers".into()).spawn(move || flood(targets))?;
    let taken = std::thread::scope(|scope| {
        let ranks: Vec<_> =
            endpoints.into_iter().map(|endpoint| scope.spawn(move || steps(endpoint))).collect();
        let mut taken = ranks.into_iter().map(|rank| rank.join().expect("a rank does its steps"));
        let first = taken.next().expect("two ranks");
        taken.for_each(drop);
        first
    });
    OVER.store(true, Ordering::Release);
    for (kind, Taken { mut steps_ms, connections, processor_ms }) in KINDS.iter().zip(taken) {
        steps_ms.sort_by(f64::total_cmp);
        let (count, mean) = (steps_ms.len(), steps_ms.iter().sum::<f64>() / steps_ms.len() as f64);
        print!("{kind}: {count} steps, median {:.3} ms, mean {mean:.3} ms", steps_ms[count / 2]);
        for (thread, ms) in THREADS.iter().zip(processor_ms) {
            print!("; {thread} {:.1} us a connection", 1e3 * ms / connections.max(1) as f64);
        }
        println!("; {connections} connections");
    }
    let peak = std::fs::read_to_string("/proc/self/status")?;
    println!("{}", peak.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default());
    Ok(())
}

/// The steps of one rank, by kind of turns.
fn steps(endpoint: Endpoint) -> [Taken; 3] {
    let device = Device::new(Arc::new(NoKernels), Arena::heap());
    let endpoint = endpoint.with_options(Options { overlap: false, ..Options::default() });
    let (group, leads) = (endpoint.group("data"), endpoint.rank() == 0);
    let mut whole = device.alloc(DType::F32, [ELEMENTS], Category::Communication, "gradients");
    let mut going = device.alloc(DType::F32, [1], Category::Communication, "going");
    whole.view_mut().into_slice::<f32>().fill(0.0);
    let mut all: [Taken; 3] = Default::default();
    // The first round warms up.
    for turn in 0..3 * (TURNS + 1) {
        let taken = &mut all[turn % 3];
        if leads {
            KIND.store(turn % 3, Ordering::Release);
        }
        let (start, made, processor) = (Instant::now(), MADE.load(Ordering::Relaxed), processor_ms());
        let mut steps_ms = Vec::new();
        loop {
            let step = Instant::now();
            compute();
            whole = group.all_reduce(whole).wait().expect("a sum");
            steps_ms.push(step.elapsed().as_secs_f64() * 1e3);
            // Rank 0 says when the turn is over.
            going.view_mut().into_slice::<f32>()[0] = f32::from(u8::from(leads && start.elapsed() < TURN));
            going = group.all_reduce(going).wait().expect("a sum");
            if going.view().as_slice::<f32>()[0] == 0.0 {
                break;
            }
        }
        if turn >= 3 {
            taken.steps_ms.extend(steps_ms);
            taken.connections += MADE.load(Ordering::Relaxed) - made;
            let now = processor_ms();
            (0..3).for_each(|at| taken.processor_ms[at] += now[at] - processor[at]);
        }
    }
    all
}

fn compute() {
    let start = Instant::now();
    let mut x = 1.0f64;
    while start.elapsed() < COMPUTE {
        (0..1000).for_each(|_| x = std::hint::black_box(x * 1.000_000_1));
    }
}

fn flood(targets: [SocketAddr; 2]) {
    let mut held = VecDeque::new();
    let (mut last, mut due) = (Instant::now(), 0.0);
    while !OVER.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(2));
        due += last.elapsed().as_secs_f64() * RATE;
        last = Instant::now();
        while due >= 1.0 {
            due -= 1.0;
            let Some(at) = KIND.load(Ordering::Acquire).checked_sub(1) else { continue };
            let Ok(mut stranger) = TcpStream::connect(targets[at]) else { continue };
            match MADE.fetch_add(1, Ordering::Relaxed) % 3 {
                0 => {}
                1 => drop(stranger.write_all(&[0x55; 100])),
                _ => held.push_back(stranger),
            }
            held.drain(..held.len().saturating_sub(HELD[0]));
        }
    }
}

/// The threads that strangers keep busy.
const THREADS: [&str; 3] = ["connections", "other-port", "strangers"];

/// Milliseconds of processor time of each of them.
fn processor_ms() -> [f64; 3] {
    THREADS.map(|name| {
        let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let of = |folder: std::path::PathBuf| {
            let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap_or_default();
            let nanos: f64 = read("schedstat").split(' ').next()?.parse().ok()?;
            (read("comm").trim() == name).then_some(nanos / 1e6)
        };
        threads.filter_map(|thread| of(thread.path())).sum()
    })
}
