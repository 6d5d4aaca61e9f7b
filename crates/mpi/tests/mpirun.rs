//! Every operation over MPI, bit for bit as in shared memory: this test binary starts itself under mpirun, one process per
//! rank, each of which plays a host of its own. Skipped where the build has no MPI.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "ranks report to the test that has started them"
)]

mod started;
#[path = "../../collectives/tests/support/mod.rs"]
#[allow(dead_code, reason = "one part of it serves here")]
mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use phalanx_collectives::pretended::lone_rank;
use phalanx_collectives::{Carrier, CollectiveError, Endpoint, Options};
use phalanx_mpi::{LONGEST_MESSAGE, MpiJob};
use started::MpiRun;
use support::table::{copies, messages, sums};
use support::{host, same_bits, sample, summed, tensor, values, zeros};

const SCENARIO: &str = "PHALANX_TEST_SCENARIO";

/// A folder in which ranks wait for each other.
const FOLDER: &str = "PHALANX_TEST_FOLDER";

/// So short that most buffers are cut.
const SHORT: usize = 4096;

/// The process of one rank: a test that does nothing unless mpirun has started it.
#[test]
fn one_rank() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    let number = |names: [&str; 2]| -> usize {
        names.iter().find_map(|name| std::env::var(name).ok()).unwrap().parse().unwrap()
    };
    let rank = number(["OMPI_COMM_WORLD_RANK", "PMI_RANK"]);
    let world = number(["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]);
    if scenario == "another rank" {
        let error = phalanx_mpi::start(world - 1 - rank, world + 1, SHORT).err().unwrap();
        println!("\nrank {rank}: {error}");
        std::process::exit(0);
    }
    let longest = if scenario == "cut" { SHORT } else { LONGEST_MESSAGE };
    let job = Arc::new(phalanx_mpi::start(rank, world, longest).unwrap());
    match scenario.as_str() {
        "sums and copies" => each_endpoint(&job, rank, world, sums_and_copies),
        "cut" => each_endpoint(&job, rank, world, cut),
        "sub-groups" => each_endpoint(&job, rank, world, sub_groups),
        "mismatch" => {
            println!("\nrank {rank}: {}", mismatch(&endpoint(&job, rank, world, false)));
            // mpirun ends all when the first has ended.
            wait_for_all(rank, world);
            std::process::exit(0);
        }
        _ => panic!("{scenario}"),
    }
    job.finish();
    println!("\nrank {rank}: done");
}

/// Says that this rank has printed its line, and waits until all have, for a few seconds.
fn wait_for_all(rank: usize, world: usize) {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    std::fs::write(folder.join(rank.to_string()), "").unwrap();
    let start = Instant::now();
    let all_have = || (0..world).all(|rank| folder.join(rank.to_string()).exists());
    while !all_have() && start.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The endpoint of a rank, of which nobody else knows what it does: nothing may be given up soon.
fn endpoint(job: &Arc<MpiJob>, rank: usize, world: usize, overlap: bool) -> Endpoint {
    let options = Options { overlap, deadline: Duration::from_secs(100), ..Options::default() };
    lone_rank(rank, world, Arc::clone(job) as Arc<dyn Carrier>).unwrap().with_options(options)
}

/// With and without overlap.
fn each_endpoint(job: &Arc<MpiJob>, rank: usize, world: usize, body: impl Fn(&Endpoint)) {
    for overlap in [false, true] {
        body(&endpoint(job, rank, world, overlap));
    }
}

fn sums_and_copies(endpoint: &Endpoint) {
    let group = endpoint.group("data");
    sums::<f32>(&*group);
    sums::<f64>(&*group);
    sums::<bf16>(&*group);
    sums::<f16>(&*group);
    copies::<f32>(&*group);
    copies::<bf16>(&*group);
    copies::<u32>(&*group);
    messages(&*group);
}

fn cut(endpoint: &Endpoint) {
    let group = endpoint.group("data");
    sums::<f32>(&*group);
    sums::<bf16>(&*group);
    copies::<f32>(&*group);
    messages(&*group);
}

/// Groups of neighbours, of every other rank, and of all, in use at the same time.
fn sub_groups(endpoint: &Endpoint) {
    let (rank, world, device) = (endpoint.rank(), endpoint.world_size(), host());
    let neighbours = Vec::from_iter((0..world).filter(|other| other / 2 == rank / 2));
    let every_other = Vec::from_iter((0..world).filter(|other| other % 2 == rank % 2));
    let groups = [
        endpoint.sub_group("tensor", &neighbours),
        endpoint.sub_group_beside("data", &every_other),
        endpoint.group("world"),
    ];
    for count in [1, 1000, 200_001] {
        let own = |group: usize| tensor(&device, &sample::<f32>(groups[group].rank(), count));
        let pending: Vec<_> = (0..groups.len()).map(|group| groups[group].all_reduce(own(group))).collect();
        for (group, pending) in groups.iter().zip(pending) {
            let x = pending.wait().unwrap();
            same_bits(&values::<f32>(&x), &summed(group.world_size(), count), group.name());
        }
    }
}

/// Rank 1 makes another call than the others: the error of this rank.
fn mismatch(endpoint: &Endpoint) -> String {
    let (group, x) = (endpoint.group("data"), zeros(&host(), phalanx_tensor::DType::F32, 1000));
    group.barrier().wait().unwrap();
    let ended = match endpoint.rank() {
        1 => group.broadcast(x, 0).wait().map(drop),
        _ => group.all_reduce(x).wait().map(drop),
    };
    let error = ended.expect_err("the ranks disagree");
    assert!(matches!(error, CollectiveError::Disagreement { .. }), "{error}");
    error.to_string()
}

/// The lines of the ranks of a scenario that have printed one, in their order; None where there is no MPI.
fn lines(scenario: &str, world: usize) -> Option<Vec<Option<String>>> {
    let mpirun = MpiRun::of(phalanx_mpi::library())?;
    let mut command = mpirun.command();
    command.args(["-n", &world.to_string()]).arg(std::env::current_exe().unwrap());
    command.args(["one_rank", "--exact", "--nocapture", "--test-threads=1"]).env(SCENARIO, scenario);
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mpirun-{}-{scenario}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let ended = started::end(started::start(command.env(FOLDER, &folder)));
    std::fs::remove_dir_all(&folder).unwrap();
    let line = |rank: usize| {
        let head = format!("rank {rank}: ");
        ended.stdout.lines().find(|line| line.starts_with(&head)).map(str::to_string)
    };
    let all: Vec<_> = (0..world).map(line).collect();
    if all.contains(&None) {
        println!("{scenario}: not all ranks in\n{}\n{}", ended.stdout, ended.stderr);
    }
    Some(all)
}

/// The same, of all ranks.
fn ranks(scenario: &str, world: usize) -> Option<Vec<String>> {
    let line =
        |(rank, line): (usize, Option<String>)| line.unwrap_or_else(|| panic!("{scenario}: no rank {rank}"));
    Some(lines(scenario, world)?.into_iter().enumerate().map(line).collect())
}

#[track_caller]
fn all_done(scenario: &str, world: usize) {
    let done = |(rank, line): (usize, &String)| *line == format!("rank {rank}: done");
    assert!(ranks(scenario, world).is_none_or(|lines| lines.iter().enumerate().all(done)));
}

#[test]
fn operations_have_the_bits_of_shared_memory() {
    for world in [2, 3, 4] {
        all_done("sums and copies", world);
    }
}

#[test]
fn long_buffers_are_cut() {
    for world in [2, 3] {
        all_done("cut", world);
    }
}

#[test]
fn groups_have_communicators_of_their_own() {
    all_done("sub-groups", 4);
}

/// Two ranks disagree, and both say so. A third one may wait for a rank that has given up: where there is a launcher, it tells the others
/// (`program/tests/mpi.rs`).
#[test]
fn a_mismatch_is_named_by_the_ranks_that_see_it() {
    let Some(lines) = lines("mismatch", 3) else { return };
    let others = [0, 2].iter().filter(|rank| lines[**rank].is_some()).count();
    assert!(lines[1].is_some() && others > 0, "{lines:?}");
    for line in lines.into_iter().flatten() {
        for word in ["rank 1: broadcast with root 0 of 1000 f32", "all_reduce of 1000 f32", "group data"] {
            assert!(line.contains(word), "no {word:?} in {line}");
        }
        assert_eq!(line.matches("tests/mpirun.rs:").count(), 2, "{line}");
    }
}

#[test]
fn a_process_that_mpi_knows_as_another_rank_is_refused() {
    for (rank, line) in ranks("another rank", 2).into_iter().flatten().enumerate() {
        assert!(line.contains(&format!("this is rank {rank} of 2")), "{line}");
        assert!(line.contains(&format!("the launcher says rank {} of 3", 1 - rank)), "{line}");
        assert!(line.contains("--transport tcp"), "{line}");
    }
}
