//! Ranks that stand still: the launcher names the right one and ends the job within the timeout, whoever it is.

use crate::rig;
use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::rig::{Ended, Home, lives, ranks, signal, wait};
use rustix::process::Signal;

/// A run that never reaches its end, whose ranks wait two seconds for each other.
const ENDLESS: [&str; 10] = [
    "train",
    "small.toml",
    "--run",
    "r",
    "--set",
    "train.steps=1000000",
    "--set",
    "train.save_every=0",
    "--set",
    "run.stall_timeout_s=2",
];

/// Beyond the timeout: half a second in which ranks may name each other first, a quarter between two looks, a second for
/// ranks to leave, and what a busy machine adds.
const WITHIN: Duration = Duration::from_secs(8);

fn start(home: &Home, more: &[&str]) -> (Child, Vec<(usize, i32)>) {
    let child = home.start(&[&ENDLESS[..], more].concat());
    home.wait_for_step("r", 3);
    let started = ranks(child.id());
    (child, started)
}

fn pid_of(started: &[(usize, i32)], rank: usize) -> i32 {
    started.iter().find(|(number, _)| *number == rank).unwrap().1
}

fn end_of(child: Child) -> Ended {
    rig::finish(child)
}

#[test]
fn when_all_ranks_are_stopped_the_launcher_names_them() {
    let home = Home::new();
    let (child, started) = start(&home, &["--nproc", "2"]);
    started.iter().for_each(|(_, pid)| signal(*pid, Signal::STOP));
    let stopped = Instant::now();
    let ended = end_of(child);
    assert!(stopped.elapsed() < WITHIN, "{:?}", stopped.elapsed());
    let ended = ended.refused(&["is stalled", "no sign of life", "stall_timeout_s = 2", "step "]);
    for (rank, pid) in started {
        assert!(ended.stderr.contains(&format!("process {pid} is stopped")), "{}", ended.stderr);
        assert!(ended.stderr.contains(&format!("rank {rank}")), "{}", ended.stderr);
        assert!(!lives(pid));
    }
}

/// Each trial stops one rank of a mesh with several axes, in which most ranks do not wait for it directly.
#[test]
fn a_stopped_rank_of_a_mesh_is_named_and_so_is_what_the_others_wait_for() {
    for ([pipeline, data, tensor], stopped) in [([2, 2, 1], 3), ([1, 2, 2], 0), ([2, 1, 2], 2)] {
        let home = Home::new();
        let sets = [
            format!("parallel.pipeline={pipeline}"),
            format!("parallel.data={data}"),
            format!("parallel.tensor={tensor}"),
            "parallel.micro_batches=2".to_string(),
        ];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let (child, started) = start(&home, &sets);
        assert_eq!(started.len(), pipeline * data * tensor);
        signal(pid_of(&started, stopped), Signal::STOP);
        let at = Instant::now();
        let ended = end_of(child);
        assert!(at.elapsed() < WITHIN, "{:?}", at.elapsed());
        let name = format!("rank {stopped} failed");
        let ended = ended.refused(&[&name, "is stopped"]);
        for rank in (0..started.len()).filter(|rank| *rank != stopped) {
            let waits = format!("rank {rank} waits ");
            assert!(ended.stderr.contains(&waits) || ended.stderr.contains("is stalled"), "{}", ended.stderr);
        }
        assert!(started.iter().all(|(_, pid)| !lives(*pid)));
    }
}

#[test]
fn a_signal_to_the_launcher_lets_stopped_ranks_finish_their_step_and_save() {
    let home = Home::new();
    let (child, started) = start(&home, &["--nproc", "2", "--set", "run.stall_timeout_s=60"]);
    started.iter().for_each(|(_, pid)| signal(*pid, Signal::STOP));
    signal(child.id() as i32, Signal::TERM);
    let ended = end_of(child);
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    assert_eq!(Some(home.newest("r")), home.metrics("r").last().unwrap()["step"].as_u64());
    assert!(started.iter().all(|(_, pid)| !lives(*pid)));
}

/// Batch systems warn by these signals, and the limit of CPU time by one that comes every second: none of them ends a run at once.
#[test]
fn a_warning_saves_and_ends_the_run_also_when_it_is_repeated() {
    for (name, warning) in [("SIGUSR1", Signal::USR1), ("SIGUSR2", Signal::USR2), ("SIGXCPU", Signal::XCPU)] {
        for ranks in ["1", "2"] {
            let home = Home::new();
            let child = home.start(&[&ENDLESS[..], &["--nproc", ranks]].concat());
            home.wait_for_step("r", 3);
            (0..3).for_each(|_| signal(child.id() as i32, warning));
            let ended = end_of(child);
            assert_eq!(ended.code, Some(130), "{name}, {ranks}: {}", ended.stderr);
            assert!(ended.stderr.contains(name), "{}", ended.stderr);
            assert_eq!(Some(home.newest("r")), home.metrics("r").last().unwrap()["step"].as_u64());
        }
    }
    // The limit of each rank is its own.
    let home = Home::new();
    let args = [&ENDLESS[..], &["--nproc", "2", "--set", "device.kind=cpu"]].concat();
    let child = home.start_command(home.shell("ulimit -S -t 1", &args, ""));
    let ended = end_of(child);
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    assert!(ended.stderr.contains("SIGXCPU, the limit of CPU time"), "{}", ended.stderr);
    assert!(home.newest("r") > 0);
}

#[test]
fn a_warning_that_was_ignored_at_the_start_stays_ignored() {
    let home = Home::new();
    let args = [&ENDLESS[..], &["--nproc", "2"]].concat();
    let child = home.start_command(home.shell("trap '' USR1 XCPU", &args, ""));
    home.wait_for_step("r", 3);
    [Signal::USR1, Signal::XCPU].into_iter().for_each(|ignored| signal(child.id() as i32, ignored));
    let reached = home.metrics("r").last().unwrap()["step"].as_u64().unwrap();
    home.wait_for_step("r", reached + 20);
    signal(child.id() as i32, Signal::TERM);
    assert_eq!(end_of(child).code, Some(130));
}

/// The step is saved, and what was evaluated is thrown away; the resumed run evaluates first, to the same number.
#[test]
fn an_evaluation_ends_on_a_signal_and_the_resumed_run_makes_up_for_it() {
    let home = Home::new();
    let text = String::from_utf8(home.read("text.txt")).unwrap();
    home.write("long.txt", text.repeat(4));
    let long = [
        "--set",
        "data.text=[\"long.txt\"]",
        "--set",
        "data.validation=0.9",
        "--set",
        "train.eval_samples=1000000",
    ];
    let train = |run: &str, ranks: &str, steps: &str| {
        let args = ["train", "small.toml", "--quiet", "--run", run, "--nproc", ranks, "--set", steps];
        [&args.map(String::from)[..], &long.map(String::from)].concat()
    };
    let words = |args: &[String]| -> Vec<&'static str> {
        args.iter().map(|arg| &*Box::leak(arg.clone().into_boxed_str())).collect()
    };
    let each = ["--set", "train.eval_every=1", "--set", "train.save_every=0"];
    let started = Instant::now();
    home.run(&[&words(&train("one", "1", "train.steps=2"))[..], &each].concat()).ok();
    let whole = started.elapsed();
    for ranks in ["1", "2"] {
        let run = format!("r{ranks}");
        let child = home.start(&[&words(&train(&run, ranks, "train.steps=2"))[..], &each].concat());
        home.wait_for_step(&run, 1);
        signal(child.id() as i32, Signal::TERM);
        let asked = Instant::now();
        let ended = end_of(child);
        assert_eq!(ended.code, Some(130), "{}", ended.stderr);
        assert!(asked.elapsed() < whole / 2, "{:?} of {whole:?}", asked.elapsed());
        let lines = home.metrics(&run);
        assert_eq!((lines.len(), home.newest(&run)), (1, 1), "{lines:?}");
        assert!(lines[0].get("loss").is_some());
        let resumed = home.start(&["train", "--run", &run, "--resume", "--quiet"]);
        wait("the last step", || home.metrics(&run).len() == 3);
        // Now in the evaluation of the last step, which is saved.
        signal(resumed.id() as i32, Signal::TERM);
        let ended = end_of(resumed);
        assert_eq!(ended.code, Some(130), "{}", ended.stderr);
        assert!(
            ended.stderr.contains("stopped in the evaluation after step 2, the last one"),
            "{}",
            ended.stderr
        );
        home.run(&["train", "--run", &run, "--resume", "--quiet"]).ok();
        let values = |run: &str| -> Vec<String> {
            let keys = ["step", "loss", "val_loss"];
            let text = |line: &serde_json::Value| {
                keys.map(|key| line.get(key).map_or(String::new(), ToString::to_string)).join(" ")
            };
            home.metrics(run).iter().map(text).collect()
        };
        let kinds = |run: &str| {
            values(run).iter().map(|line| line.split(' ').next().unwrap().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(kinds("one"), kinds(&run));
        if ranks == "1" {
            assert_eq!(values("one"), values(&run));
        }
    }
}

/// Like Ctrl-Z and `fg`: launcher and ranks stop together for longer than the timeout, and continue together.
#[test]
fn a_job_that_was_stopped_as_a_whole_goes_on() {
    let home = Home::new();
    let (child, started) = start(&home, &["--nproc", "2", "--set", "run.stall_timeout_s=1"]);
    let all: Vec<i32> = started.iter().map(|(_, pid)| *pid).chain([child.id() as i32]).collect();
    all.iter().for_each(|pid| signal(*pid, Signal::STOP));
    std::thread::sleep(Duration::from_millis(2600));
    let reached = home.metrics("r").last().unwrap()["step"].as_u64().unwrap();
    all.iter().rev().for_each(|pid| signal(*pid, Signal::CONT));
    home.wait_for_step("r", reached + 20);
    signal(child.id() as i32, Signal::TERM);
    let ended = end_of(child);
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
}

/// A full pipe.
fn full_pipe() -> (OwnedFd, OwnedFd) {
    use rustix::pipe::{PipeFlags, pipe_with};
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let flags = rustix::fs::fcntl_getfl(&write).unwrap();
    rustix::fs::fcntl_setfl(&write, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&write, &[b'.'; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&write, flags).unwrap();
    (read, write)
}

/// The messages of a run whose rank 0 writes its progress to a pipe that nobody reads until the ranks have ended.
fn unread(home: &Home, more: &[&str], meanwhile: impl FnOnce(&Child)) -> String {
    let (read, write) = full_pipe();
    // On the processor, and without checkpoints that are removed: of both, nothing is said before the ranks start.
    let processor = ["--nproc", "2", "--set", "device.kind=cpu", "--set", "train.keep=all"];
    let mut command = home.command(&[&ENDLESS[..], &processor, more].concat());
    let child = command.stdout(Stdio::null()).stderr(Stdio::from(write)).spawn().unwrap();
    // The command holds a copy of the end that is written to.
    drop(command);
    let mut started = Vec::new();
    wait("the ranks to start", || {
        started = ranks(child.id());
        started.len() == 2
    });
    meanwhile(&child);
    wait("the ranks to end", || started.iter().all(|(_, pid)| !lives(*pid)));
    let mut text = Vec::new();
    std::io::Read::read_to_end(&mut std::fs::File::from(read), &mut text).unwrap();
    let text = String::from_utf8_lossy(&text).trim_start_matches('.').to_string();
    assert_eq!(end_of(child).code, Some(1), "{text}");
    text
}

/// The run does not hang, and the waiting rank is not blamed.
#[test]
fn a_rank_whose_output_nobody_reads_is_named_with_the_reason() {
    let text = unread(&Home::new(), &[], |_| ());
    assert!(text.contains("rank 0 failed") && text.contains("standard error to be read"), "{text}");
}

/// A rank that cannot take a signal has five seconds, and not the whole timeout.
#[test]
fn a_signal_ends_a_job_that_cannot_finish_its_step() {
    let home = Home::new();
    let start = Instant::now();
    let text = unread(&home, &["--set", "run.stall_timeout_s=50"], |child| {
        home.wait_for_step("r", 1);
        signal(child.id() as i32, Signal::TERM);
    });
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    assert!(text.contains("rank 0 failed") && text.contains("standard error to be read"), "{text}");
    assert!(text.contains("a signal has asked the run to end"), "{text}");
}
