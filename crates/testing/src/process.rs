//! Processes that tests start: they handle signals as at a terminal, and every wait for their end is bounded.

use std::ffi::OsStr;
use std::process::{Child, Command, Output};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Longest that a process of a test may take; on an idle machine, most take seconds.
const LIMIT: Duration = Duration::from_secs(900);

/// A command that ignores no signal. A shell makes what it starts in the background ignore SIGINT, and `nohup` SIGHUP; this process
/// hands that on to its children, which rightly keep it and would wait for ever for a signal of a test.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    if !ignores_signals() {
        return Command::new(program);
    }
    let mut command = Command::new("env");
    command.arg("--default-signal").arg(program);
    command
}

/// Waits until a process has ended, and gathers its output.
///
/// # Panics
/// When it takes too long; it is then ended.
#[track_caller]
pub fn finish(child: Child) -> Output {
    let pid = child.id();
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    ended.recv_timeout(LIMIT).map_or_else(
        |_| {
            let pid = Pid::from_raw(pid as i32).expect("a process has a number");
            // It may have ended just now.
            let _ = kill_process(pid, Signal::KILL);
            panic!("process {pid} has not ended within {LIMIT:?}")
        },
        |output| output.expect("the output of a process"),
    )
}

/// Returns whether this process ignores a signal other than SIGPIPE, which the standard library resets.
fn ignores_signals() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or_default();
    let pipe = 1 << (Signal::PIPE.as_raw() - 1);
    u64::from_str_radix(mask.trim(), 16).unwrap_or(0) & !pipe != 0
}
