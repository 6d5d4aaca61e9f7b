//! Processes that are no ranks at all: shells that end, sleep and catch signals, under the launcher's watch.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use phalanx_collectives::HostJob;
use phalanx_launch::{Failure, Hooks, RankProcesses};
use phalanx_system::host::process::{Activity, is_running};
use rustix::event::{EventfdFlags, eventfd};

/// Starts one shell for each script.
fn shells(scripts: &[&str], timeout: Duration) -> (RankProcesses, Vec<u32>) {
    let mut processes = RankProcesses::new(HostJob::new(scripts.len()).unwrap(), timeout);
    let pids = scripts.iter().map(|script| {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        processes.start(command).unwrap().id()
    });
    let pids = pids.collect();
    (processes, pids)
}

/// Waits for the shells; none is left.
fn failure(scripts: &[&str], timeout: Duration, hooks: &dyn Hooks) -> Failure {
    let (processes, pids) = shells(scripts, timeout);
    let failure = processes.wait(hooks).unwrap_err();
    assert!(pids.iter().all(|pid| !is_running(*pid)));
    assert!(failure.left.is_empty());
    failure
}

const LONG: Duration = Duration::from_secs(300);

#[test]
fn a_process_that_ends_is_named_at_once_and_the_others_are_ended() {
    for (script, words) in [
        ("exit 3", "ended with exit code 3"),
        ("exit 0", "ended with exit code 0 before its work was done"),
        ("kill -9 $$", "was killed by signal 9 (SIGKILL)"),
        ("kill -15 $$", "was killed by signal 15"),
    ] {
        let start = Instant::now();
        let failure = failure(&["exec sleep 1000", script], LONG, &());
        // The other has a second to leave.
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert_eq!(failure.rank, 1, "{failure}");
        assert!(failure.reason.contains(words) && &*failure.activity == "has not joined", "{failure}");
        assert!(failure.status.is_some_and(|status| status.code().unwrap_or(-1) != 1));
    }
}

#[test]
fn a_process_that_stands_still_is_named_with_what_it_waits_for() {
    struct Waits(Option<&'static str>);
    impl Hooks for Waits {
        fn waits_for(&self, _rank: usize) -> Option<String> {
            self.0.map(String::from)
        }
        fn timeout_setting(&self, timeout: Duration) -> String {
            format!("patience = {timeout:?}")
        }
    }
    let cases = [
        ("kill -STOP $$", None, "is stopped, by a signal"),
        ("exec sleep 1000", Some("a reader"), "waits for a reader"),
        ("exec sleep 1000", None, "sleeps"),
    ];
    for (script, waits_for, words) in cases {
        let start = Instant::now();
        let failure = failure(&[script], Duration::from_millis(400), &Waits(waits_for));
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        for part in ["it is stalled: process", words, "patience = 400ms"] {
            assert!(failure.reason.contains(part), "no {part:?} in {failure}");
        }
    }
}

#[test]
fn a_stop_event_reaches_processes_that_are_stopped() {
    struct Stop(OwnedFd);
    impl Hooks for Stop {
        fn stop_event(&self) -> Option<BorrowedFd<'_>> {
            Some(self.0.as_fd())
        }
    }
    let stop = Stop(eventfd(1, EventfdFlags::CLOEXEC).unwrap());
    let script = "trap 'exit 7' TERM; kill -STOP $$; while :; do sleep 0.01; done";
    let (processes, pids) = shells(&[script, script], LONG);
    let start = Instant::now();
    while !pids.iter().all(|pid| Activity::read(*pid).stopped) {
        assert!(start.elapsed() < Duration::from_secs(60), "shells that stop themselves");
        std::thread::yield_now();
    }
    // No shell reports that its work is done, so the first that ends has failed.
    let failure = processes.wait(&stop).unwrap_err();
    assert!(failure.reason.contains("ended with exit code 7"), "{failure}");
    assert!(pids.iter().all(|pid| !is_running(*pid)));
}

#[test]
fn processes_end_when_the_launcher_gives_up_before_it_waits() {
    let (processes, pids) = shells(&["exec sleep 1000", "exec sleep 1000"], LONG);
    assert!(pids.iter().all(|pid| is_running(*pid)));
    drop(processes);
    assert!(pids.iter().all(|pid| !is_running(*pid)));
}
