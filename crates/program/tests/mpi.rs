//! Training under a real mpirun. On this machine there is one host, so each process, or pair of them, is given the variables
//! of a host of its own. Skipped where the program was built without MPI, or no mpirun of it is installed.

use crate::started;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::rig::{Home, lives, ranks, signal};
use crate::started::{Ended, MpiRun, end};
use rustix::process::Signal;

/// A second for ranks to leave, and what a busy machine adds.
const WITHIN: Duration = Duration::from_secs(10);

/// The mpirun of the MPI with which the program was built. It is asked: `--transport mpi` without mpirun says what is missing.
fn mpirun(home: &Home) -> Option<MpiRun> {
    let said = home.run(&["train", "small.toml", "--run", "none", "--transport", "mpi"]).stderr;
    assert!(said.contains("mpirun") || said.contains("--features mpi"), "{said}");
    MpiRun::of(match said.contains("--features mpi") {
        true => Err(said.trim().to_string()),
        false => Ok(if said.contains("Open MPI") { "Open MPI" } else { "MPICH" }.to_string()),
    })
}

/// Starts `world` processes of `train`, of which `local` pretend to be on one host each.
fn start(home: &Home, mpirun: MpiRun, (world, local): (usize, usize), args: &[&str]) -> Child {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let [local_rank, local_size] = match mpirun.is_open_mpi {
        true => ["OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
        false => ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    };
    let mut command: Command = mpirun.command();
    for rank in 0..world {
        if rank > 0 {
            command.arg(":");
        }
        command.args(["-n", "1", "env", &format!("{local_rank}={}", rank % local)]);
        command.args([format!("{local_size}={local}"), format!("PHALANX_RENDEZVOUS=127.0.0.1:{port}")]);
        command.arg(env!("CARGO_BIN_EXE_phalanx")).arg("train").args(args);
    }
    command.current_dir(home.path("")).env("PHALANX_SECRET_FILE", "secret");
    started::start(&mut command)
}

/// The tensors of a run's checkpoints.
fn tensors(home: &Home, run: &str) -> Vec<(String, Vec<u8>)> {
    let files = home.snapshot(run).into_iter();
    let files = files.filter(|(path, _)| path.extension().is_some_and(|end| end == "safetensors"));
    let run = home.path(run);
    files.map(|(path, bytes)| (path.strip_prefix(&run).unwrap().display().to_string(), bytes)).collect()
}

#[test]
fn checkpoints_over_mpi_have_the_bytes_of_one_host() {
    let home = Home::new();
    let Some(mpirun) = mpirun(&home) else { return };
    for (world, local) in [(2, 1), (4, 1), (4, 2)] {
        let (one, over) = (format!("one-{world}"), format!("mpi-{world}-{local}"));
        let more = ["--set", "parallel.zero=3", "--set", "precision.compute=\"bf16\""];
        let train =
            |run: &str, first: &[&str]| [&["small.toml", "--run", run], first, &more].concat().join(" ");
        let words = train(&one, &["--nproc", &world.to_string()]);
        if local == 1 {
            home.run(&[&["train"], &Vec::from_iter(words.split(' '))[..]].concat()).ok();
        }
        let words = train(&over, &[]);
        let Ended { code, stdout, stderr } =
            end(start(&home, mpirun, (world, local), &Vec::from_iter(words.split(' '))));
        assert_eq!(code, Some(0), "{stdout}\n{stderr}");
        assert!(stderr.contains("phalanx does not encrypt"), "{stderr}");
        assert_eq!(home.losses(&one), home.losses(&over), "{over}");
        let (expected, found) = (tensors(&home, &one), tensors(&home, &over));
        assert!(expected.len() >= 2 && expected == found, "{over}: {} files", found.len());
    }
    assert!(!home.path("secret").exists());
}

#[test]
fn tcp_and_restarts_are_said() {
    let home = Home::new();
    let Some(mpirun) = mpirun(&home) else { return };
    let words = ["small.toml", "--run", "tcp", "--transport", "tcp"];
    let ended = end(start(&home, mpirun, (2, 1), &words));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("between hosts: TCP"), "{}", ended.stderr);
    let words = ["small.toml", "--run", "r", "--transport", "mpi", "--max-restarts", "1"];
    let ended = end(start(&home, mpirun, (2, 1), &words));
    assert!(ended.code != Some(0) && ended.stderr.contains("--max-restarts"), "{}", ended.stderr);
    assert!(!home.path("r").exists());
}

#[test]
fn a_killed_rank_is_named() {
    let home = Home::new();
    let Some(mpirun) = mpirun(&home) else { return };
    let words = ["small.toml", "--run", "r", "--set", "train.steps=1000000", "--set", "train.save_every=0"];
    let child = start(&home, mpirun, (2, 1), &words);
    home.wait_for_step("r", 3);
    let found: Vec<(usize, i32)> = launchers(&home).into_iter().flat_map(ranks).collect();
    let victim = found.iter().find(|(rank, _)| *rank == 1).expect("rank 1 runs").1;
    signal(victim, Signal::KILL);
    let at = Instant::now();
    let ended = end(child);
    assert!(at.elapsed() < WITHIN, "{:?}", at.elapsed());
    assert_ne!(ended.code, Some(0));
    for word in ["rank 1", "killed by signal 9", "it was at: step "] {
        assert!(ended.stderr.contains(word), "no {word:?} in {}", ended.stderr);
    }
    let start = Instant::now();
    while found.iter().any(|(_, pid)| lives(*pid)) {
        assert!(start.elapsed() < Duration::from_secs(2), "a rank that lives on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The launchers that run in the folder of this test.
fn launchers(home: &Home) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap();
    let numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let here = std::fs::canonicalize(home.path("")).unwrap();
    numbers
        .filter(|pid| std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == here))
        .collect()
}
