//! Ranks as processes: this test binary starts itself, once per rank, with the launcher's descriptors.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_collectives::{CollectiveError, Endpoint, Group, HostJob, MetaGroup, join};
use phalanx_tensor::meta::Meta;
use phalanx_tensor::{Arena, Category, DType, Device, Tensor};
use support::{Sample, same_bits, sample, summed, tree, values};

const SCENARIO: &str = "PHALANX_TEST_SCENARIO";

/// The children of a test; killed with it, so that nothing is left behind.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start(job: &HostJob, scenario: &str, world: usize) -> Ranks {
    let fds = job.inherited_fds().iter().map(|fd| fd.to_string()).collect::<Vec<_>>().join(",");
    let child = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["one_rank", "--exact", "--nocapture", "--test-threads=1"])
            .env(SCENARIO, format!("{scenario} {rank} {world} {fds}"))
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        job.pass_to(&mut command);
        command.spawn().unwrap()
    };
    Ranks((0..world).map(child).collect())
}

/// Waits for the end of a child, for a minute at most; what it printed.
fn finish(child: &mut Child) -> String {
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(60), "a rank hangs");
        std::thread::yield_now();
    }
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

/// The process of one rank: a test that does nothing unless it was started by another.
#[test]
fn one_rank() {
    let Ok(line) = std::env::var(SCENARIO) else { return };
    let words: Vec<&str> = line.split(' ').collect();
    let [scenario, rank, world, fds] = words[..] else { panic!("{line}") };
    let fds: Vec<i32> = fds.split(',').map(|fd| fd.parse().unwrap()).collect();
    let (rank, world) = (rank.parse().unwrap(), world.parse().unwrap());
    let endpoint = join(fds[0], &fds[1..], rank, world).unwrap();
    match scenario {
        "sums" => planned(&endpoint, sums),
        "die" => planned(&endpoint, wait_for_the_dead),
        "disagree" => planned(&endpoint, disagree),
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
    recorder.begin("init");
    recorder.begin("step");
    body(&meta, &MetaGroup::new("data", endpoint.rank(), endpoint.world_size(), Arc::clone(&recorder)));
    let plan = phalanx_plan::memory::plan_memory(&recorder.take(endpoint.rank())).unwrap();
    let region = endpoint.arena(plan.arena_bytes as usize).unwrap();
    let arena = Arena::replaying(plan, region);
    let device = Device::new(Arc::new(Meta { threads: 1 }), Arc::clone(&arena));
    arena.begin("init");
    arena.end();
    arena.begin("step");
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
        let (y, x) = (y.wait().unwrap(), x.wait().unwrap());
        if real {
            same_bits(&values::<f32>(&x), &summed(world, count), "all_reduce of f32");
            same_bits(&values::<f64>(&y), &summed(world, count), "all_reduce of f64");
        }
    }
    for part in [1, 5000] {
        let whole = filled::<f32>(device, rank, part * world);
        let shard = filled::<f32>(device, 77, part);
        let (whole, shard) = g.reduce_scatter(whole, shard, true).wait().unwrap();
        let (shard, whole) = g.all_gather(shard, whole).wait().unwrap();
        if real {
            let whole_sum = summed::<f32>(world, part * world);
            let expected: Vec<f32> =
                (0..part * world).map(|i| f32::sample(77, i % part) + whole_sum[i]).collect();
            same_bits(&values::<f32>(&whole), &expected, "reduce_scatter and all_gather");
            same_bits(&values::<f32>(&shard), &expected[rank * part..(rank + 1) * part], "shard");
        }
        let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
        let ids = filled::<u32>(device, rank, part);
        let received = device.alloc(DType::U32, [part], Category::Communication, "received");
        let received = if rank == 0 {
            g.send(ids, next).wait().unwrap();
            g.recv(received, previous).wait().unwrap()
        } else {
            let received = g.recv(received, previous).wait().unwrap();
            g.send(ids, next).wait().unwrap();
            received
        };
        if real {
            same_bits(&values::<u32>(&received), &sample(previous, part), "message");
        }
    }
    g.barrier().wait().unwrap();
    if real {
        let first: Vec<f32> = (0..world).map(|r| f32::sample(r, 0)).collect();
        println!("sum of the first elements: {}", tree(&first));
    }
}

#[test]
fn sums_through_arenas_have_the_same_bits() {
    for world in [2, 3, 5] {
        let job = HostJob::new(world).unwrap();
        let mut ranks = start(&job, "sums", world);
        for child in &mut ranks.0 {
            let text = finish(child);
            assert!(child.wait().unwrap().success(), "{text}");
            assert!(text.contains("sum of the first elements"), "{text}");
        }
        assert_eq!(job.aborted(), None);
        assert!(job.last_activity(0).contains("step 5, barrier"), "{}", job.last_activity(0));
        assert!(job.last_activity(0).contains("tests/processes.rs:"), "{}", job.last_activity(0));
    }
}

/// Rank 1 comes to the first barrier and never again; the others wait for it.
fn wait_for_the_dead(device: &Device, g: &dyn Group) {
    let x = filled::<f32>(device, g.rank(), 100);
    g.barrier().wait().unwrap();
    if device.is_meta() {
        return;
    }
    println!("ready");
    std::io::stdout().flush().unwrap();
    if g.rank() == 1 {
        // Until the parent kills this process, or is gone itself.
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
        let job = HostJob::new(world).unwrap();
        let mut ranks = start(&job, "die", world);
        for child in &mut ranks.0 {
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            // The test harness prints its own lines before.
            let ready = lines.find(|l| l.as_ref().is_ok_and(|l| l.contains("ready")));
            assert!(ready.is_some(), "a rank died early");
            // What the child prints from here on is looked at through the job.
            std::thread::spawn(move || lines.for_each(drop));
        }
        let killed = Instant::now();
        ranks.0[1].kill().unwrap();
        let status = ranks.0[1].wait().unwrap();
        job.abort(1, &format!("{status}; {}", job.last_activity(1)));
        for rank in (0..world).filter(|r| *r != 1) {
            while ranks.0[rank].try_wait().unwrap().is_none() {
                assert!(killed.elapsed() < Duration::from_secs(1), "rank {rank} still waits");
                std::thread::yield_now();
            }
            assert_eq!(ranks.0[rank].wait().unwrap().code(), Some(3));
        }
        let (rank, reason) = job.aborted().unwrap();
        assert_eq!(rank, 1);
        for word in ["signal: 9", "step 5, barrier", "tests/processes.rs:"] {
            assert!(reason.contains(word), "no '{word}' in {reason}");
        }
    }
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
        std::process::exit(0); // the tensors are lost, so the arena's books would not close
    }
}

#[test]
fn processes_that_disagree_name_both_sites() {
    let job = HostJob::new(2).unwrap();
    let mut ranks = start(&job, "disagree", 2);
    for child in &mut ranks.0 {
        let text = finish(child);
        assert_eq!(text.matches("tests/processes.rs:").count(), 2, "{text}");
        for word in ["rank 0: all_reduce of 64 f32", "rank 1: all_gather of 64 f32"] {
            assert!(text.contains(word), "no '{word}' in {text}");
        }
    }
}

#[test]
fn an_arena_larger_than_memory_is_an_error() {
    let job = HostJob::new(1).unwrap();
    let mut ranks = start(&job, "oversized", 1);
    let text = finish(&mut ranks.0[0]);
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
    let error = join(copies[0], &copies[1..2], 0, 1).err().expect("made for two ranks");
    assert!(error.to_string().contains("made for 2 ranks"), "{error}");
    assert!(join(0, &copies[2..], 0, 1).is_err());
    assert!(join(copies[0], &copies[1..2], 3, 1).is_err());
}
