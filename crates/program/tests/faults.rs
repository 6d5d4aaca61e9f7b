//! Ranks and launchers that are killed or interrupted: named, saved, resumed, nothing left behind.

use crate::rig;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::rig::{Home, lives, ranks, shares_without_a_name, signal, wait};
use rustix::process::Signal;

/// A run that never reaches its end.
const ENDLESS: [&str; 8] =
    ["train", "small.toml", "--run", "r", "--set", "train.steps=1000000", "--set", "train.save_every=10"];

fn start(home: &Home, more: &[&str]) -> Child {
    home.start(&[&ENDLESS[..], more].concat())
}

#[test]
fn a_killed_launcher_takes_its_ranks_along_and_the_run_goes_on_to_the_bit() {
    let home = Home::new();
    for (nproc, run_ranks) in [("2", 2), ("1", 0)] {
        let _ = std::fs::remove_dir_all(home.path("r"));
        let mut launcher = start(&home, &["--nproc", nproc, "--quiet"]);
        home.wait_for_step("r", 25);
        let started = ranks(launcher.id());
        assert_eq!(started.len(), run_ranks);
        started.iter().for_each(|(_, pid)| shares_without_a_name(*pid));
        launcher.kill().unwrap();
        launcher.wait().unwrap();
        wait("the ranks to end", || started.iter().all(|(_, pid)| !lives(*pid)));
        let saved = home.newest("r");
        assert!(saved >= 10, "{saved}");
        let steps = format!("train.steps={}", saved + 15);
        home.run(&["train", "--run", "r", "--resume", "--set", &steps, "--quiet"]).ok();
        let whole = format!("whole-{nproc}");
        home.run(&["train", "small.toml", "--run", &whole, "--nproc", nproc, "--set", &steps, "--quiet"])
            .ok();
        assert_eq!(home.losses("r"), home.losses(&whole));
        assert_eq!(home.losses("r").len() as u64, saved + 15);
    }
}

#[test]
fn interrupted_runs_finish_their_step_and_save() {
    let home = Home::new();
    for (nproc, with) in [("1", Signal::INT), ("2", Signal::INT), ("2", Signal::TERM)] {
        let _ = std::fs::remove_dir_all(home.path("r"));
        let child = start(&home, &["--nproc", nproc, "--set", "train.save_every=0"]);
        home.wait_for_step("r", 5);
        let pids: Vec<i32> = ranks(child.id()).into_iter().map(|(_, pid)| pid).collect();
        // One rank is the program itself.
        assert_eq!(pids.len(), if nproc == "1" { 0 } else { 2 });
        signal(child.id() as i32, with);
        let ended = rig::finish(child);
        assert_eq!(ended.code, Some(130), "{}", ended.stderr);
        let saved = home.newest("r");
        let last = home.metrics("r").last().unwrap()["step"].as_u64().unwrap();
        assert_eq!(saved, last);
        let words = format!("stopped after step {saved}");
        assert!(ended.stderr.contains(&words) && ended.stderr.contains("--resume"), "{}", ended.stderr);
        assert!(pids.iter().all(|pid| !lives(*pid)));
    }
}

#[test]
fn a_rank_that_is_interrupted_alone_stops_the_run_in_good_order() {
    let home = Home::new();
    let child = start(&home, &["--nproc", "2", "--set", "train.save_every=0", "--quiet"]);
    home.wait_for_step("r", 5);
    let started = ranks(child.id());
    signal(started.iter().find(|(rank, _)| *rank == 1).unwrap().1, Signal::TERM);
    let ended = rig::finish(child);
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    assert_eq!(Some(home.newest("r")), home.metrics("r").last().unwrap()["step"].as_u64());
}

#[test]
fn a_killed_rank_is_named_within_two_seconds() {
    let home = Home::new();
    for rank in [1, 0] {
        let _ = std::fs::remove_dir_all(home.path("r"));
        let child = start(&home, &["--nproc", "2"]);
        home.wait_for_step("r", 15);
        let started = ranks(child.id());
        assert_eq!(started.len(), 2);
        let killed = Instant::now();
        signal(started.iter().find(|(number, _)| *number == rank).unwrap().1, Signal::KILL);
        let ended = rig::finish(child);
        assert!(killed.elapsed() < Duration::from_secs(3), "{:?}", killed.elapsed());
        let name = format!("rank {rank} failed");
        ended.refused(&[&name, "SIGKILL", "memory", "step ", "--resume", "checkpoints/step-"]);
        assert!(started.iter().all(|(_, pid)| !lives(*pid)));
        assert!(home.newest("r") >= 10);
    }
}

#[test]
fn an_error_of_one_rank_is_told_once() {
    let home = Home::new();
    // Diverging weights: every rank sees the same loss.
    let wild =
        ["--set", "optimizer.lr=1e30", "--set", "optimizer.clip=0", "--set", "optimizer.weight_decay=0"];
    for nproc in ["1", "2"] {
        let run = format!("wild-{nproc}");
        let args = ["train", "small.toml", "--nproc", nproc, "--run", &run];
        let ended = home.run(&[&args[..], &wild[..]].concat());
        let ended = ended.refused(&["training diverged", "optimizer.lr", "loss"]);
        assert_eq!(ended.stderr.matches("training diverged").count(), 1, "{}", ended.stderr);
    }
}

#[test]
fn a_save_that_fails_ends_the_run_and_names_the_file() {
    let home = Home::new();
    for nproc in ["1", "2"] {
        let run = format!("full-{nproc}");
        let args = ["train", "small.toml", "--nproc", nproc, "--run", &run, "--quiet"];
        let endless = ["--set", "train.steps=1000000", "--set", "train.save_every=0"];
        let child = home.start(&[&args[..], &endless[..]].concat());
        home.wait_for_step(&run, 4);
        home.write(&format!("{run}/checkpoints"), "a file stands here");
        // The signal requests a save.
        signal(child.id() as i32, Signal::INT);
        let ended = rig::finish(child);
        ended.refused(&["checkpoints", "step(s) were done"]);
        // A run does not start if it could not save.
        std::fs::remove_file(home.path(&run).join("metrics.jsonl")).unwrap();
        home.run(&args).refused(&["checkpoints", "a part of this path is a file"]);
    }
}

#[test]
fn numbers_with_which_no_run_can_go_on_are_not_saved() {
    let home = Home::new();
    for nproc in ["1", "2"] {
        let args = ["train", "small.toml", "--nproc", nproc, "--run", nproc, "--set", "train.save_every=1"];
        // Gradients are finite, but the updated parameters are not.
        let ended = home.run(&[&args[..], &["--set", "optimizer.lr=1e39"]].concat());
        ended.refused(&["parameters of transformer.", "is no longer finite", "nothing was saved"]);
        assert!(home.checkpoints(nproc).is_empty());
    }
}
