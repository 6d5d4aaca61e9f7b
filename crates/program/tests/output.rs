//! Standard output and standard error that nobody reads, that are full or closed: the exit code tells whether the
//! work was done, a training run goes on, and nothing panics.

use crate::rig;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, pipe};
use std::process::{Child, Stdio};

use crate::rig::{Ended, Home, lives, ranks, signal, wait};
use rustix::process::Signal;

const GONE: &str = "standard output is gone";

/// A device to which nothing can be written.
fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// A pipe with a closed reader.
fn unread() -> Stdio {
    pipe().unwrap().1.into()
}

/// Every command that prints, after a run in `r` and a token file `t.bin` were made.
const COMMANDS: [&[&str]; 14] = [
    &["plan", "small.toml"],
    &["plan", "small.toml", "--json"],
    &["plan", "--schedule"],
    &["plan", "--schedule", "zb-v", "--json"],
    &["sample", "r", "--prompt", "chunk", "--tokens", "5"],
    &["sample", "r", "--prompt", "chunk", "--tokens", "5", "--json"],
    &["inspect", "r"],
    &["keys"],
    &["keys", "--schema"],
    &["inspect", "r/checkpoints/step-8", "--json"],
    &["inspect", "t.bin"],
    &["tokenize", "text.txt", "--out", "t.bin", "--force"],
    &["export", "r", "--out", "exported", "--force"],
    &["--help"],
];

fn with_results() -> Home {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    home.run(&["tokenize", "text.txt", "--out", "t.bin"]).ok();
    home
}

#[test]
fn a_command_whose_output_cannot_be_written_has_failed() {
    let home = with_results();
    for args in COMMANDS {
        let run = |stdout: Stdio| -> Ended {
            let child = home.command(args).stdout(stdout).stderr(Stdio::piped()).spawn().unwrap();
            rig::finish(child)
        };
        let ended = run(full());
        let told = ended.stderr.contains("standard output could not be written: No space left on device");
        assert!(ended.code == Some(1) && told, "{args:?}: {:?} {}", ended.code, ended.stderr);
        let ended = run(unread());
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(141), ""), "{args:?}");
        // A descriptor that is not open for writing.
        let ended = run(File::open("/dev/null").unwrap().into());
        if args != ["--help"] {
            assert_eq!(ended.code, Some(1), "{args:?}: {}", ended.stderr);
        }
    }
}

#[test]
fn training_goes_on_when_standard_output_is_gone() {
    let home = Home::new();
    for (nproc, show, stdout) in [
        ("1", &["--json"][..], full as fn() -> Stdio),
        ("2", &["--json"], full),
        ("1", &["--json"], unread),
        ("2", &["--json"], unread),
        ("2", &[], unread),
    ] {
        let _ = std::fs::remove_dir_all(home.path("r"));
        let args = [&["train", "small.toml", "--run", "r", "--nproc", nproc][..], show].concat();
        let child = home.command(&args).stdout(stdout()).stderr(Stdio::piped()).spawn().unwrap();
        let ended = rig::finish(child).ok();
        assert_eq!(ended.stderr.matches(GONE).count(), 1, "{args:?}: {}", ended.stderr);
        assert_eq!((home.losses("r").len(), home.newest("r")), (8, 8), "{args:?}");
    }
}

#[test]
fn training_goes_on_after_its_reader_has_read_a_line() {
    let home = Home::new();
    for nproc in ["1", "2"] {
        let args = ["train", "small.toml", "--run", nproc, "--nproc", nproc, "--json"];
        let mut child = home.start(&[&args[..], &["--set", "train.steps=60"]].concat());
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        assert!(first.contains("\"step\":1,"), "{first}");
        let ended = rig::finish(child).ok();
        assert!(ended.stderr.matches(GONE).count() <= 1, "{}", ended.stderr);
        assert_eq!((home.losses(nproc).len(), home.newest(nproc)), (60, 60));
    }
}

/// More than a pipe holds, with ranks that wait for each other for two seconds at most.
#[test]
fn a_reader_that_stands_still_holds_up_no_step() {
    let home = Home::new();
    for nproc in ["1", "2"] {
        let more =
            ["--set", "train.steps=400", "--set", "run.stall_timeout_s=2", "--set", "train.save_every=0"];
        let args = [&["train", "small.toml", "--run", nproc, "--nproc", nproc, "--json"][..], &more].concat();
        let mut child = home.start(&args);
        home.wait_for_step(nproc, 400);
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        rig::finish(child).ok();
        assert!(text.len() > 1 << 16, "{} bytes fit into a pipe", text.len());
        let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines[..lines.len() - 1], home.metrics(nproc));
        assert_eq!(lines.last().unwrap()["steps"], 400);
    }
}

/// A run of many steps whose standard error is `stderr`.
fn endless(home: &Home, run: &str, nproc: &str, stderr: Stdio) -> Child {
    let args = ["train", "small.toml", "--run", run, "--nproc", nproc, "--set", "train.steps=1000000"];
    home.command(&args).stdout(Stdio::null()).stderr(stderr).spawn().unwrap()
}

#[test]
fn nothing_that_is_said_on_standard_error_stops_a_run() {
    let home = Home::new();
    for (nproc, stderr) in [("1", full as fn() -> Stdio), ("2", full), ("1", unread), ("2", unread)] {
        let _ = std::fs::remove_dir_all(home.path("r"));
        let child = endless(&home, "r", nproc, stderr());
        home.wait_for_step("r", 5);
        // The interrupt also writes to standard error.
        signal(child.id() as i32, Signal::INT);
        assert_eq!(rig::finish(child).code, Some(130));
        assert_eq!(Some(home.newest("r")), home.metrics("r").last().unwrap()["step"].as_u64());
    }
}

#[test]
fn errors_that_nobody_reads_keep_their_exit_code() {
    let home = Home::new();
    for stderr in [full, unread] {
        for (args, code) in [(&["plan", "missing.toml"][..], 1), (&["no-command"], 2)] {
            let child = home.command(args).stdout(Stdio::null()).stderr(stderr()).spawn().unwrap();
            assert_eq!(rig::finish(child).code, Some(code), "{args:?}");
        }
    }
}

#[test]
fn closed_standard_streams_are_never_a_file_of_the_run() {
    let home = Home::new();
    for (nproc, show) in [("1", "--json"), ("2", "--json"), ("1", "--threads-as-ranks")] {
        let _ = std::fs::remove_dir_all(home.path("r"));
        let args = ["train", "small.toml", "--run", "r", "--nproc", nproc, show];
        let ended = rig::ended(home.shell("", &args, "<&- >&- 2>&-"));
        assert_eq!(ended.code, Some(0), "{args:?}");
        assert_eq!(home.losses("r").len(), 8);
        home.run(&["inspect", "r", "--verify"]).ok();
        home.json("r/plan.json");
        home.json("r/memory.json");
        home.run(&["train", "--run", "r", "--resume", "--set", "train.steps=9", "--quiet"]).ok();
    }
}

#[test]
fn signals_that_were_ignored_at_the_start_stay_ignored() {
    let home = Home::new();
    for nproc in ["1", "2"] {
        let _ = std::fs::remove_dir_all(home.path("r"));
        let args = ["train", "small.toml", "--run", "r", "--nproc", nproc, "--set", "train.steps=1000000"];
        let mut command = home.shell("trap '' HUP INT", &args, "");
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        home.wait_for_step("r", 5);
        let started: Vec<i32> = ranks(child.id()).into_iter().map(|(_, pid)| pid).collect();
        for pid in started.iter().copied().chain([child.id() as i32]) {
            signal(pid, Signal::HUP);
            signal(pid, Signal::INT);
        }
        let step = home.metrics("r").last().unwrap()["step"].as_u64().unwrap();
        wait("steps after the signals", || {
            assert!(child.try_wait().unwrap().is_none(), "the run has ended");
            home.metrics("r").last().unwrap()["step"].as_u64() >= Some(step + 20)
        });
        signal(child.id() as i32, Signal::TERM);
        assert_eq!(rig::finish(child).code, Some(130));
        assert!(started.iter().all(|pid| !lives(*pid)));
    }
}

#[test]
fn completions_and_manual_pages_cover_every_command() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = home.run(&["completions", shell]).ok().stdout;
        for word in ["phalanx", "tokenize", "--top-p", "strategies"] {
            assert!(script.contains(word.trim_start_matches("--")), "{shell}: {word}");
        }
    }
    home.run(&["man", "new/man1"]).ok();
    for page in ["phalanx", "phalanx-train", "phalanx-bench", "phalanx-bench-step", "phalanx-completions"] {
        let text = String::from_utf8(home.read(&format!("new/man1/{page}.1"))).unwrap();
        assert!(text.contains(".SH NAME") && text.contains(".SH SYNOPSIS"), "{page}: {text}");
        // roff writes a hyphen as \-.
        assert!(text.contains(&page.replace('-', "\\-")), "{page}: {text}");
    }
    // `rank` is for the launcher.
    assert!(!home.path("new/man1/phalanx-rank.1").exists());
}

#[test]
fn files_and_pipes_get_no_colours_and_no_line_breaks() {
    let home = Home::new();
    let long = "x".repeat(150);
    for args in [vec!["train", "--help"], vec!["plan", &long], vec!["sample", "nowhere", "--prompt", "a"]] {
        let ended = home.run(&args);
        assert!(!ended.stdout.contains('\u{1b}') && !ended.stderr.contains('\u{1b}'), "{args:?}");
    }
    let error =
        home.run(&["plan", "no such.toml", "--set", "train.steps=2"]).refused(&["no such.toml"]).stderr;
    assert_eq!(error.lines().count(), 1, "{error}");
}
