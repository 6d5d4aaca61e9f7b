//! Little of what a process may have: threads, memory, long files. Every refusal is an error that names the limit.

use crate::rig;
use std::process::Stdio;

use crate::rig::{Ended, Home};
use phalanx_testing::process;

/// Runs the program below a limit of the shell.
fn below(home: &Home, limit: &str, args: &[&str]) -> Ended {
    let mut shell = process::command("sh");
    let script = format!("ulimit {limit} && exec \"$0\" \"$@\"");
    shell.current_dir(home.path("")).args(["-c", &script, env!("CARGO_BIN_EXE_phalanx")]).args(args);
    // With backtraces, which a program that has no memory cannot make.
    shell.stdin(Stdio::null()).env("RUST_BACKTRACE", "1");
    rig::ended(shell)
}

/// A limit on private memory (KiB) refuses the stacks of threads or an allocation, in this program or in a rank; which
/// comes first depends on the limit. Both end at once and name the limit.
#[test]
fn threads_and_memory_that_the_system_refuses_are_an_error_that_names_the_limit() {
    let home = Home::new();
    let mut refused = 0;
    for (number, kib) in [2500, 3500, 4500, 5000, 6000, 7000, 8000, 10_000].into_iter().enumerate() {
        for ranks in ["1", "2"] {
            let run = format!("r-{number}-{ranks}");
            let sets = ["--set", "train.threads=2", "--set", "run.stall_timeout_s=2"];
            let args = [&["train", "small.toml", "--run", &run, "--nproc", ranks], &sets[..]].concat();
            let ended = below(&home, &format!("-d {kib}"), &args);
            if ended.code != Some(0) {
                // The C library ends a program itself when it has no memory for a thread's own variables.
                let words = ["`ulimit -d`", "Fatal glibc error"];
                let said = words.iter().any(|words| ended.stderr.contains(words));
                assert!(said, "{kib} KiB: {}", ended.stderr);
                refused += 1;
            }
        }
    }
    assert!(refused > 0, "no limit was low enough");
}

/// The limit (in units of 512 bytes) is reached by the configuration, the tokens, the metrics or a checkpoint, in the
/// launcher or in a rank.
#[test]
fn a_file_beyond_the_limit_is_an_error_that_names_it() {
    let home = Home::new();
    for (number, limit) in ["0", "4", "12", "24", "48"].into_iter().enumerate() {
        for ranks in ["1", "2"] {
            let run = format!("r-{number}-{ranks}");
            let sets =
                ["--set", "train.steps=300", "--set", "train.save_every=0", "--set", "run.stall_timeout_s=5"];
            let args = [&["train", "small.toml", "--run", &run, "--nproc", ranks], &sets[..]].concat();
            let ended = below(&home, &format!("-f {limit}"), &args);
            ended.refused(&["ulimit -f", "File too large"]);
        }
    }
}
