//! Ranks that are processes, with cards of their own: they exchange data between the cards by NCCL where it is found, and through host
//! memory elsewhere, with the same losses; a rank that is killed or stopped is named.
//!
//! Cards are those of the emulator of the driver (`cargo xtask cuda-emulator`); without it, the tests say so and check nothing.
#![allow(clippy::print_stderr, reason = "a test that checks nothing says so")]

use crate::rig;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::rig::{Ended, Home, lives, ranks, signal};
use rustix::process::Signal;

const TRAIN: [&str; 14] = [
    "train",
    "small.toml",
    "--nproc",
    "2",
    "--set",
    "device.kind=cuda",
    "--set",
    "model.layers=1",
    "--set",
    "model.hidden=16",
    "--set",
    "batch.global=4",
    "--set",
    "parallel.zero=2",
];

/// Returns whether the driver that the dynamic loader finds is the emulator, with a compiler.
fn has_emulator(test: &str) -> bool {
    let cards = phalanx_cuda::usable_cards();
    let emulated = cards.is_ok_and(|cards| cards[0].name == "Phalanx CUDA emulator");
    let usable = emulated && std::env::var_os("PHALANX_NVRTC").is_some();
    if !usable {
        eprintln!(
            "{test}: skipped, because there is no emulator of the driver (`cargo xtask cuda-emulator` runs it with one)"
        );
    }
    usable
}

/// The program on so many cards of the emulator; compiled kernels are kept in the target folder.
fn on_cards(home: &Home, cards: usize, args: &[&str]) -> Command {
    let mut command = home.command(args);
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.env("PHALANX_EMULATOR_CARDS", cards.to_string());
    command
}

fn train(home: &Home, cards: usize, run: &str, more: &[&str]) -> Command {
    let few = ["--run", run, "--set", "train.steps=3", "--set", "train.eval_samples=4"];
    on_cards(home, cards, &[&TRAIN[..], &few, more].concat())
}

fn end(command: Command) -> Ended {
    rig::ended(command)
}

/// NCCL takes memory of a card when ranks first exchange data: before the first step, and what it takes is compared with the plan.
#[test]
fn what_nccl_takes_of_a_card_is_compared_with_the_plan_before_the_first_step() {
    if !has_emulator("what NCCL takes") {
        return;
    }
    let home = Home::new();
    let takes = |run: &str, megabytes: &str, of: &str| {
        let mut command = train(&home, 2, run, &[]);
        command.env("PHALANX_EMULATOR_NCCL_MB", megabytes).env("PHALANX_EMULATOR_MEMORY_MB", of);
        end(command)
    };
    let planned = takes("planned", "900", "1900").ok();
    assert!(!planned.stderr.contains("NCCL has taken"), "{}", planned.stderr);
    let more = takes("more", "1200", "1900").ok();
    for words in ["rank 0: NCCL has taken 12", "rank 1: NCCL has taken 12", "1033895936 were planned"] {
        assert!(more.stderr.contains(words), "no {words:?} in: {}", more.stderr);
    }
    assert_eq!(home.losses("planned"), home.losses("more"));
    let refused = takes("refused", "1700", "1900");
    refused.refused(&["after NCCL has connected it", "are still needed", "device.communication"]);
    let metrics = std::fs::read_to_string(home.path("refused/metrics.jsonl")).unwrap_or_default();
    assert!(!metrics.contains("loss"), "a step was made: {metrics}");
    // The first of several groups already takes too much: every rank ends with that, and not with the memory of the next.
    let four = TRAIN.map(|word| if word == "2" { "4" } else { word });
    let mut command =
        on_cards(&home, 4, &[&four[..], &["--run", "first", "--set", "parallel.tensor=2"]].concat());
    command.env("PHALANX_EMULATOR_NCCL_MB", "2700").env("PHALANX_EMULATOR_MEMORY_MB", "2900");
    let refused = end(command);
    assert!(!refused.stderr.contains("panicked"), "{}", refused.stderr);
    refused.refused(&["after NCCL has connected it", "are still needed"]);
}

#[test]
fn ranks_with_cards_of_their_own_exchange_data_between_them_to_the_bit() {
    if !has_emulator("ranks with cards") {
        return;
    }
    let home = Home::new();
    let between = end(train(&home, 2, "between", &[])).ok();
    assert!(
        between.stderr.contains("ranks exchange data between cards by NCCL 2.27.5"),
        "{}",
        between.stderr
    );
    let config = String::from_utf8(home.read("between/config.toml")).unwrap();
    assert!(config.contains("communication = \"nccl\""), "{config}");
    let plan = home.json("between/plan.json");
    assert_eq!(plan["beside_plan"]["nccl_bytes_about"], 986 << 20);
    rig::assert_as_planned(&plan, &home.json("between/memory.json"));
    let host = ["--set", "device.communication=host"];
    let through = end(train(&home, 2, "through", &host)).ok();
    assert!(through.stderr.contains("ranks exchange data through host memory"), "{}", through.stderr);
    assert_eq!(home.losses("between"), home.losses("through"));
    // One card: two ranks cannot.
    let shared = end(train(&home, 1, "shared", &[])).ok();
    assert!(shared.stderr.contains("through host memory (2 ranks share 1 card"), "{}", shared.stderr);
    assert_eq!(home.losses("between"), home.losses("shared"));
    let nccl = ["--set", "device.communication=nccl"];
    end(train(&home, 1, "refused", &nccl))
        .refused(&["device.communication = \"nccl\"", "2 ranks share 1 card"]);
    // What was decided for the cards of then is decided anew.
    let more = ["train", "--run", "between", "--resume", "--set", "train.steps=4"];
    let resumed = end(on_cards(&home, 1, &more)).ok();
    assert!(resumed.stderr.contains("through host memory (2 ranks share"), "{}", resumed.stderr);
}

#[test]
fn without_the_library_ranks_exchange_data_through_host_memory() {
    if !has_emulator("without the library") {
        return;
    }
    let home = Home::new();
    let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let driver =
        std::env::split_paths(&folders).map(|folder| folder.join("libcuda.so")).find(|path| path.exists());
    let Some(driver) = driver else {
        return eprintln!("without the library: skipped: where is the emulator?");
    };
    std::fs::create_dir(home.path("driver")).unwrap();
    std::os::unix::fs::symlink(driver.canonicalize().unwrap(), home.path("driver/libcuda.so")).unwrap();
    let without = |run: &str, more: &[&str]| {
        let mut command = train(&home, 2, run, more);
        command.env("LD_LIBRARY_PATH", home.path("driver"));
        end(command)
    };
    let ended = without("host", &[]).ok();
    for words in ["ranks exchange data through host memory (there is no NCCL", "PHALANX_NCCL"] {
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
    }
    without("refused", &["--set", "device.communication=nccl"])
        .refused(&["there is no NCCL", "leave it out"]);
    let mut elsewhere = train(&home, 2, "nowhere", &[]);
    elsewhere.env("PHALANX_NCCL", "/nonexistent");
    end(elsewhere).refused(&["there is no NCCL 2.18 or newer at /nonexistent", "PHALANX_NCCL"]);
}

/// A run without an end, some steps after its start.
fn endless(home: &Home) -> (Child, Vec<(usize, i32)>) {
    let more = ["--run", "r", "--set", "train.steps=1000000", "--set", "run.stall_timeout_s=3", "--quiet"];
    let mut command = on_cards(home, 2, &[&TRAIN[..], &more].concat());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    home.wait_for_step("r", 3);
    let started = ranks(child.id());
    (child, started)
}

#[test]
fn a_rank_that_is_killed_or_stopped_is_named() {
    if !has_emulator("a rank that is killed") {
        return;
    }
    for (with, words, within) in [
        (Signal::KILL, "SIGKILL", Duration::from_secs(5)),
        (Signal::STOP, "is stopped", Duration::from_secs(12)),
    ] {
        let home = Home::new();
        let (child, started) = endless(&home);
        let pid = started.iter().find(|(rank, _)| *rank == 1).unwrap().1;
        let since = Instant::now();
        signal(pid, with);
        let ended = rig::finish(child);
        assert!(since.elapsed() < within, "{:?}", since.elapsed());
        ended.refused(&["rank 1 failed", words]);
        assert!(started.iter().all(|(_, pid)| !lives(*pid)));
    }
}
