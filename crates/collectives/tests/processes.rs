//! Ranks as processes: this test binary starts itself, once per rank, with the launcher's descriptors.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "for who runs the test"
)]

use crate::support;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::support::{Sample, accumulated, same_bits, sample, summed, values};
use half::{bf16, f16};
use phalanx_collectives::pretended::NoKernels;
use phalanx_collectives::secure::Secret;
use phalanx_collectives::{
    CollectiveError, Endpoint, Group, HostJob, Hosts, MetaGroup, Network, Wire, join, take_sealed,
};
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Arena, Category, DType, Device, Tensor};

const SCENARIO: &str = "PHALANX_TEST_SCENARIO";

/// Maximum wait for output of a child.
const PATIENCE: Duration = Duration::from_secs(60);

/// A child process, which is killed when the test ends.
struct Rank {
    child: Child,
    /// Its output; ends when the child ends.
    lines: mpsc::Receiver<String>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Rank {
    /// Waits for a line with `word`; the test harness prints lines of its own.
    fn line_with(&self, word: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|e| panic!("no '{word}' from a rank: {e}"));
            if line.contains(word) {
                return line;
            }
        }
    }

    /// Waits for the end; the code.
    fn finish(&mut self) -> Option<i32> {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return self.child.wait().unwrap().code(),
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("a rank hangs"),
            }
        }
    }
}

fn start(job: &HostJob, scenario: &str, world: usize) -> Vec<Rank> {
    assert_eq!(job.ranks(), 0..world);
    start_host(job, scenario, None)
}

/// Starts the ranks of one host. `network`: the descriptor of what each of them needs to reach the others.
fn start_host(job: &HostJob, scenario: &str, network: Option<i32>) -> Vec<Rank> {
    let fds = job.inherited_fds().iter().map(|fd| fd.to_string()).collect::<Vec<_>>().join(",");
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let listener = job.pass_listener(rank, &mut command);
        let reach =
            network.zip(listener).map_or(String::new(), |(task, listener)| format!(" {task} {listener}"));
        command
            .args(["processes::one_rank", "--exact", "--nocapture", "--test-threads=1"])
            .env(SCENARIO, format!("{scenario} {rank} {fds}{reach}"))
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        job.pass_to(&mut command);
        let mut child = command.spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        // Ends with the child's output, or when the receiver is dropped.
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Rank { child, lines }
    };
    job.ranks().map(start).collect()
}

/// Hosts with these numbers of ranks, each with a launcher of its own: the jobs, and their ranks by world rank.
fn start_hosts(sizes: &[usize], scenario: &str) -> (Vec<HostJob>, Vec<Rank>) {
    let hosts = Hosts::new(sizes.to_vec());
    let mut jobs: Vec<HostJob> =
        (0..hosts.len()).map(|host| HostJob::on_host(&hosts, host).unwrap()).collect();
    let loopback = std::net::Ipv4Addr::LOCALHOST.into();
    let addresses: Vec<_> = jobs
        .iter_mut()
        .flat_map(|job| job.ranks().map(|rank| job.listen(rank, loopback).unwrap()).collect::<Vec<_>>())
        .collect();
    let secret = Secret::generate().unwrap();
    let ranks = jobs.iter_mut().enumerate().flat_map(|(host, job)| {
        let network = Network {
            hosts: hosts.clone(),
            host,
            job: [6; 16],
            epoch: 1,
            secret: secret.clone(),
            addresses: addresses.clone(),
            plaintext: false,
            streams: 2,
            wire: Wire::Tcp,
        };
        let task = job.hand_over(&serde_json::to_vec(&network).unwrap()).unwrap();
        start_host(job, scenario, Some(task))
    });
    let ranks = ranks.collect();
    (jobs, ranks)
}

/// The process of one rank: a test that does nothing unless it was started by another.
#[test]
fn one_rank() {
    let Ok(line) = std::env::var(SCENARIO) else { return };
    let words: Vec<&str> = line.split(' ').collect();
    let [scenario, rank, fds, ref network @ ..] = words[..] else { panic!("{line}") };
    let fds: Vec<i32> = fds.split(',').map(|fd| fd.parse().unwrap()).collect();
    let rank = rank.parse().unwrap();
    let network = network.first_chunk::<2>().map(|words| {
        let [task, listener] = words.map(|word| word.parse().unwrap());
        let task = take_sealed(task).unwrap();
        (serde_json::from_slice::<Network>(&task.read(0..task.bytes()).unwrap()).unwrap(), listener)
    });
    let endpoint = join(fds[0], &fds[1..], rank, network).unwrap();
    match scenario {
        "sums" => planned(&endpoint, sums),
        "die" => planned(&endpoint, wait_for_the_dead),
        "disagree" => planned(&endpoint, disagree),
        "leave" => {
            if rank == 0 {
                endpoint.finish();
            }
            // Ends with exit code 0 either way.
        }
        "oversized" => {
            let error = endpoint.arena(1 << 60).err().expect("nobody has that much");
            println!("said: {error}");
        }
        other => panic!("no scenario {other}"),
    }
}

/// Runs `body` in an arena that a dry run of it planned.
fn planned(endpoint: &Endpoint, body: fn(&Device, &dyn Group)) {
    let meta = Device::meta(1);
    let recorder = Arc::clone(meta.recorder().unwrap());
    recorder.begin(PhaseName::Init);
    recorder.begin(PhaseName::Step);
    body(&meta, &MetaGroup::new("data", endpoint.rank(), endpoint.world_size(), Arc::clone(&recorder)));
    let plan = phalanx_plan::memory::plan_memory(&recorder.take(endpoint.rank())).unwrap();
    let region = endpoint.arena(plan.arena_bytes as usize).unwrap();
    let arena = Arena::replaying(plan, region);
    let device = Device::new(Arc::new(NoKernels), Arc::clone(&arena));
    arena.begin(PhaseName::Init);
    arena.end();
    arena.begin(PhaseName::Step);
    endpoint.note(5);
    body(&device, &*endpoint.group("data"));
    arena.end();
}

/// Sample values in the arena; only the shape on the recording device.
fn filled<T: Sample>(device: &Device, seed: usize, elements: usize) -> Tensor {
    let mut tensor = device.alloc(T::DTYPE, [elements], Category::Communication, "sample");
    if !device.is_meta() {
        tensor.view_mut().into_slice::<T>().copy_from_slice(&sample(seed, elements));
    }
    tensor
}

fn sums(device: &Device, g: &dyn Group) {
    let (rank, world) = (g.rank(), g.world_size());
    let real = !device.is_meta();
    for count in [1, 1000, 300_001] {
        let x = g.all_reduce(filled::<f32>(device, rank, count));
        let y = g.all_reduce(filled::<f64>(device, rank, count));
        let z = g.all_reduce(filled::<bf16>(device, rank, count));
        let (z, y, x) = (z.wait().unwrap(), y.wait().unwrap(), x.wait().unwrap());
        if real {
            same_bits(&values::<f32>(&x), &summed(world, count), "all_reduce of f32");
            same_bits(&values::<f64>(&y), &summed(world, count), "all_reduce of f64");
            same_bits(&values::<bf16>(&z), &summed(world, count), "all_reduce of bf16");
        }
    }
    for part in [1, 5000] {
        shards::<f32>(device, g, part);
        shards::<f16>(device, g, part);
        let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
        let ids = filled::<u32>(device, rank, part);
        let received = device.alloc(DType::U32, [part], Category::Communication, "received");
        let received = if rank == 0 {
            g.send(ids, next, 1).wait().unwrap();
            g.recv(received, previous, 1).wait().unwrap()
        } else {
            let received = g.recv(received, previous, 1).wait().unwrap();
            g.send(ids, next, 1).wait().unwrap();
            received
        };
        if real {
            same_bits(&values::<u32>(&received), &sample(previous, part), "message");
        }
    }
    g.barrier().wait().unwrap();
    if real {
        println!("all sums are right");
    }
}

/// Reduce_scatter, accumulating, and all_gather.
fn shards<T: Sample>(device: &Device, g: &dyn Group, part: usize) {
    let (rank, world) = (g.rank(), g.world_size());
    let whole = filled::<T>(device, rank, part * world);
    let shard = filled::<T>(device, 77, part);
    let (whole, shard) = g.reduce_scatter(whole, shard, true).wait().unwrap();
    let (shard, whole) = g.all_gather(shard, whole).wait().unwrap();
    if !device.is_meta() {
        let expected = accumulated::<T>(77, world, part);
        same_bits(&values::<T>(&whole), &expected, "reduce_scatter and all_gather");
        same_bits(&values::<T>(&shard), &expected[rank * part..(rank + 1) * part], "shard");
    }
}

#[test]
fn sums_through_arenas_have_the_same_bits() {
    for world in [2, 3, 5] {
        let job = HostJob::new(world).unwrap();
        for mut rank in start(&job, "sums", world) {
            rank.line_with("all sums are right");
            assert_eq!(rank.finish(), Some(0));
        }
        assert_eq!(job.aborted(), None);
        assert!(job.last_activity(0).contains("step 5, barrier"), "{}", job.last_activity(0));
        assert!(job.last_activity(0).contains("tests/processes.rs:"), "{}", job.last_activity(0));
    }
}

#[test]
fn sums_of_several_hosts_have_the_same_bits() {
    for sizes in [&[1, 1][..], &[2, 1], &[2, 3]] {
        let (jobs, ranks) = start_hosts(sizes, "sums");
        for mut rank in ranks {
            rank.line_with("all sums are right");
            assert_eq!(rank.finish(), Some(0));
        }
        assert!(jobs.iter().all(|job| job.aborted().is_none()));
        let record = jobs[1].flight_record(sizes[0]);
        let has = |text: &str| record.iter().any(|event| event.event.contains(text));
        assert!(
            has("step 5")
                && has("begin all_reduce of 300001 f32 (call 7 of group data) at ")
                && has("end barrier")
        );
        assert!(record.windows(2).all(|pair| pair[0].at_us <= pair[1].at_us));
    }
}

/// Rank 1 makes the first barrier and nothing more; the others wait for it.
fn wait_for_the_dead(device: &Device, g: &dyn Group) {
    let x = filled::<f32>(device, g.rank(), 100);
    g.barrier().wait().unwrap();
    if device.is_meta() {
        return;
    }
    println!("ready");
    std::io::stdout().flush().unwrap();
    if g.rank() == 1 {
        // Until the parent kills this process or ends.
        let _ = std::io::stdin().read(&mut [0]);
        return;
    }
    let error = g.all_reduce(x).wait().expect_err("rank 1 was killed");
    println!("error: {error}");
    std::process::exit(3);
}

#[test]
fn a_killed_rank_frees_the_others_within_a_second() {
    for world in [2, 3] {
        support::within_a_second("freeing the others", || kill_one(world));
    }
}

fn kill_one(world: usize) -> Duration {
    let job = HostJob::new(world).unwrap();
    let mut ranks = start(&job, "die", world);
    ranks.iter().for_each(|rank| drop(rank.line_with("ready")));
    let killed = Instant::now();
    ranks[1].child.kill().unwrap();
    let status = ranks[1].child.wait().unwrap();
    job.abort(1, &format!("{status}; {}", job.last_activity(1)));
    let mut texts = Vec::new();
    for rank in [0].into_iter().chain(2..world) {
        texts.push(ranks[rank].line_with("error: "));
        assert_eq!(ranks[rank].finish(), Some(3));
    }
    let time = killed.elapsed();
    let record = job.flight_record(1);
    let last = &record.last().expect("rank 1 has done something").event;
    assert!(last.starts_with("end barrier of 0 u32 (call 1 of group data)"), "{last}");
    for text in texts {
        for word in ["because of rank 1", "signal: 9", "step 5, barrier", "tests/processes.rs:"] {
            assert!(text.contains(word), "no '{word}' in {text}");
        }
    }
    time
}

/// A rank of another host is killed: its launcher says so, and the launcher of the survivors passes it on.
#[test]
fn a_rank_that_is_killed_on_another_host_frees_the_others_within_a_second() {
    for sizes in [&[1, 1][..], &[1, 2]] {
        support::within_a_second("freeing the others", || kill_on_another_host(sizes));
    }
}

fn kill_on_another_host(sizes: &[usize]) -> Duration {
    let (jobs, mut ranks) = start_hosts(sizes, "die");
    ranks.iter().for_each(|rank| drop(rank.line_with("ready")));
    let killed = Instant::now();
    ranks[1].child.kill().unwrap();
    let status = ranks[1].child.wait().unwrap();
    jobs[1].abort(1, &format!("{status}; {}", jobs[1].last_activity(1)));
    let (rank, reason, blame) = jobs[1].aborted().unwrap();
    // As long as the launchers need to tell each other; meanwhile the survivors have seen the connection break.
    std::thread::sleep(Duration::from_millis(50));
    jobs[0].abort_as(rank, &reason, blame);
    let survivors: Vec<usize> = (0..ranks.len()).filter(|rank| *rank != 1).collect();
    let mut texts = Vec::new();
    for rank in survivors {
        texts.push(ranks[rank].line_with("error: "));
        assert_eq!(ranks[rank].finish(), Some(3));
    }
    let time = killed.elapsed();
    for text in texts {
        for word in ["because of rank 1", "signal: 9", "step 5, barrier", "tests/processes.rs:"] {
            assert!(text.contains(word), "no '{word}' in {text}");
        }
    }
    time
}

/// Different calls in two programs: both sites reach both processes as text.
fn disagree(device: &Device, g: &dyn Group) {
    let x = filled::<f32>(device, g.rank(), 64);
    let result = if g.rank() == 0 {
        g.all_reduce(x).wait().map(drop)
    } else {
        g.all_gather_in_place(x).wait().map(drop)
    };
    if !device.is_meta() {
        let Err(error @ CollectiveError::Disagreement { .. }) = result else { panic!("{result:?}") };
        println!("said: {error}");
        std::process::exit(0); // the tensors are lost, so the arena's checks would fail
    }
}

#[test]
fn processes_that_disagree_name_both_sites() {
    let job = HostJob::new(2).unwrap();
    for mut rank in start(&job, "disagree", 2) {
        let text = rank.line_with("said: ");
        assert_eq!(text.matches("tests/processes.rs:").count(), 2, "{text}");
        for word in ["rank 0: all_reduce of 64 f32", "rank 1: all_gather of 64 f32"] {
            assert!(text.contains(word), "no '{word}' in {text}");
        }
        assert_eq!(rank.finish(), Some(0));
    }
}

/// Both end with exit code 0; only one has reported that its work is done.
#[test]
fn a_rank_that_leaves_is_told_from_one_that_is_done() {
    let mut job = HostJob::new(2).unwrap();
    job.hand_over(b"a task").unwrap();
    for mut rank in start(&job, "leave", 2) {
        assert_eq!(rank.finish(), Some(0));
    }
    assert!(job.is_done(0) && !job.is_done(1));
    let [done, left] = [0, 1].map(|rank| job.last_activity(rank));
    assert!(done.contains("its work is done") && left.contains("then left"), "{done}; {left}");
    assert!(job.silent_for(1).is_some());
}

#[test]
fn an_arena_larger_than_memory_is_an_error() {
    let job = HostJob::new(1).unwrap();
    let text = start(&job, "oversized", 1)[0].line_with("said: ");
    assert!(text.contains("are available"), "{text}");
}

#[test]
fn descriptors_of_another_world_are_refused() {
    let job = HostJob::new(2).unwrap();
    let copies: Vec<i32> = {
        use std::os::fd::{BorrowedFd, IntoRawFd};
        // SAFETY: open as long as the job, which outlives this block.
        let copy =
            |fd: &i32| unsafe { BorrowedFd::borrow_raw(*fd) }.try_clone_to_owned().unwrap().into_raw_fd();
        job.inherited_fds().iter().map(copy).collect()
    };
    let error = join(copies[0], &copies[1..2], 0, None).err().expect("made for two ranks");
    assert!(error.to_string().contains("made for 2 ranks"), "{error}");
    let error = join(0, &copies[2..], 0, None).err().expect("standard input is not a control block");
    assert!(error.to_string().contains("descriptor 0 is not one of a job"), "{error}");
    let error = join(copies[0], &copies[1..2], 3, None).err().expect("there is one rank");
    assert!(error.to_string().contains("rank 3 of 1 ranks"), "{error}");
}
