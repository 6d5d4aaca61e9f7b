//! Ranks as processes that fail or stand still: the launcher names the rank and the reason within a bounded time, and no
//! process stays.
//!
//! A test is started once more for each rank, by its own name.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use phalanx::{Cpu, Endpoint, Gpt2, LaunchError, Launcher, RunConfig, Spec, Training};
use phalanx_simulated::{Failure, Options, SimulatedFactory};
use phalanx_system::host::process::is_running;
use rustix::process::{Signal, getpid, kill_process};

/// Time for which ranks may stand still.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Time from the moment when a rank stands still until the job has ended: the timeout, the second that is promised, and a
/// second for a busy machine.
const WITHIN: Duration = TIMEOUT.saturating_add(Duration::from_secs(2));

/// The folder in which the ranks of one test leave notes for the launcher.
struct Notes(PathBuf);

impl Notes {
    /// The same folder in the launcher and in its ranks.
    fn new(test: &str) -> Notes {
        let launcher = match std::env::var_os("PHALANX_RANK") {
            Some(_) => std::os::unix::process::parent_id(),
            None => std::process::id(),
        };
        let folder = std::env::temp_dir().join(format!("phalanx-{test}-{launcher}"));
        std::fs::create_dir_all(&folder).unwrap();
        Notes(folder)
    }

    fn write(&self, rank: &Endpoint, what: &str, text: &str) {
        std::fs::write(self.path(rank.rank(), what), text).unwrap();
    }

    fn path(&self, rank: usize, what: &str) -> PathBuf {
        self.0.join(format!("{what}-{rank}"))
    }

    fn read(&self, rank: usize, what: &str) -> String {
        std::fs::read_to_string(self.path(rank, what)).unwrap()
    }

    /// Time since a rank wrote a note.
    fn age(&self, rank: usize, what: &str) -> Duration {
        let written = self.path(rank, what).metadata().unwrap().modified().unwrap();
        SystemTime::now().duration_since(written).unwrap()
    }

    /// The processes of all ranks have ended.
    fn assert_ended(&self, ranks: usize) {
        for rank in 0..ranks {
            let pid = self.read(rank, "pid").parse().unwrap();
            assert!(!is_running(pid), "rank {rank}, process {pid}");
        }
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Ranks that run only the test `name` of this file.
fn launcher(ranks: usize, name: &str) -> Launcher {
    Launcher::new(ranks)
        .with_arguments(["--exact", &format!("failures::{name}"), "--nocapture", "--test-threads=1"])
        .with_stall_timeout(TIMEOUT)
}

fn stop() {
    kill_process(getpid(), Signal::STOP).unwrap();
}

fn sleep() {
    std::thread::sleep(Duration::from_secs(60));
}

/// Rank 1 of 3 stands still in `stand_still`; rank 0 waits for it, and so does rank 2 or stands still itself. Returns the
/// reason that the launcher gives for rank 1.
fn with_one_that_stands_still(name: &str, all: bool, stand_still: fn()) -> String {
    let notes = Notes::new(name);
    let body = |rank: &Endpoint| {
        notes.write(rank, "pid", &std::process::id().to_string());
        let barrier = rank.group("all");
        barrier.barrier().wait().map_err(|error| error.to_string())?;
        if all || rank.rank() == 1 {
            notes.write(rank, "still", "");
            stand_still();
        }
        barrier.barrier().wait().map_err(|error| error.to_string())
    };
    let error = launcher(3, name).run(body).unwrap_err();
    let age = notes.age(1, "still");
    notes.assert_ended(3);
    assert!(age < WITHIN, "{age:?}: {error}");
    let LaunchError::Rank { rank, reason, activity } = error else { panic!("{error}") };
    assert!(rank == 1 || all, "rank {rank}: {reason}");
    format!("{reason}; {activity}")
}

#[test]
fn a_rank_that_is_stopped_is_named() {
    let reason = with_one_that_stands_still("a_rank_that_is_stopped_is_named", false, stop);
    assert!(reason.contains("is stopped, by a signal or a debugger"), "{reason}");
}

#[test]
fn a_rank_that_waits_outside_a_collective_is_named() {
    let reason = with_one_that_stands_still("a_rank_that_waits_outside_a_collective_is_named", false, sleep);
    assert!(reason.contains("rank 1"), "{reason}");
}

/// No rank waits in a collective, so none can name another.
#[test]
fn ranks_that_all_stand_still_are_named_by_the_launcher() {
    let name = "ranks_that_all_stand_still_are_named_by_the_launcher";
    let reason = with_one_that_stands_still(name, true, sleep);
    for part in ["it is stalled: process", "sleeps", "with_stall_timeout: 2s", "barrier"] {
        assert!(reason.contains(part), "no {part:?} in {reason}");
    }
}

/// Rank 0 waits for a rank that computes for several timeouts.
#[test]
fn a_rank_that_computes_is_never_stalled() {
    let body = |rank: &Endpoint| {
        let barrier = rank.group("all");
        barrier.barrier().wait().map_err(|error| error.to_string())?;
        let start = Instant::now();
        while rank.rank() == 1 && start.elapsed() < 3 * TIMEOUT {
            std::hint::spin_loop();
        }
        barrier.barrier().wait().map_err(|error| error.to_string())
    };
    launcher(2, "a_rank_that_computes_is_never_stalled").run(body).unwrap();
}

/// Each waits in a call that the other does not make, and none computes.
#[test]
fn ranks_that_wait_for_each_other_are_named() {
    let name = "ranks_that_wait_for_each_other_are_named";
    let notes = Notes::new(name);
    let body = |rank: &Endpoint| {
        notes.write(rank, "pid", &std::process::id().to_string());
        let groups = [rank.group("first"), rank.group("second")];
        groups[0].barrier().wait().map_err(|error| error.to_string())?;
        notes.write(rank, "still", "");
        groups[rank.rank()].barrier().wait().map_err(|error| error.to_string())
    };
    let error = launcher(2, name).run(body).unwrap_err().to_string();
    let age = notes.age(1, "still");
    notes.assert_ended(2);
    assert!(age < WITHIN, "{age:?}: {error}");
    assert!(error.contains("group first") && error.contains("group second"), "{error}");
}

#[test]
fn a_number_of_ranks_that_no_machine_holds_is_an_error() {
    for ranks in [0, 5000] {
        let error = Launcher::new(ranks).run(|_| Ok::<_, String>(())).unwrap_err().to_string();
        assert!(error.contains(&format!("{ranks} ranks: a job has 1 to 1024")), "{error}");
    }
}

/// Two data-parallel ranks on simulated devices, ZeRO-2, four steps.
fn training() -> Training {
    let mut config = RunConfig::default();
    (config.model.seq, config.batch.global) = (16, 8);
    (config.parallel.data, config.parallel.zero) = (Some(2), 2);
    config.check().unwrap();
    let model = Gpt2 { layers: 2, hidden: 32, heads: 4, vocab: 64, positions: 16, ..Gpt2::default() };
    let counting = |position: u64, tokens: &mut [u32], targets: &mut [u32]| {
        let token = |t: usize| (position as usize * 7 + t) as u32 % 64;
        (0..tokens.len()).for_each(|t| (tokens[t], targets[t]) = (token(t), token(t + 1)));
    };
    let mut spec = Spec::new(&config, model, 0, 1).unwrap();
    spec.device.host_addressable = false;
    Training::new(spec, counting, 4).unwrap()
}

/// Simulated devices, of which that of rank 1 fails in the middle of step 2.
fn failing_in_step_2(training: &Training, failure: Failure) -> SimulatedFactory {
    let step = &training.plan().of(1).step;
    let copies: u64 = step.copies.iter().map(|copy| copy.calls).sum();
    let calls = step.kernels.iter().map(|kernel| kernel.calls).sum::<u64>() + copies;
    let options = Options { delayed_share: 0.05, ..Options::new(0) };
    let factory = SimulatedFactory::new(options, None, |request| Ok(Cpu::new(request.threads)));
    factory.with_failure(1, calls + calls / 2, failure)
}

/// Returns whether a text is "`linear` at crates/.../mlp.rs:12 failed on the simulated device: ...".
fn names_operation_and_call_site(text: &str) -> bool {
    let rest = text.strip_prefix('`').and_then(|rest| rest.split_once("` at crates/"));
    let Some((operation, rest)) = rest else { return false };
    let Some((site, _)) = rest.split_once(" failed on the simulated device: ") else { return false };
    let line = site.split_once(".rs:").and_then(|(_, line)| line.parse::<u32>().ok());
    !operation.is_empty() && line.is_some()
}

fn a_device_fails_in_step_2(name: &str, failure: Failure, words: &str) {
    let notes = Notes::new(name);
    let training = training();
    let factory = failing_in_step_2(&training, failure);
    let start = Instant::now();
    let body = |rank: &Endpoint| {
        notes.write(rank, "pid", &std::process::id().to_string());
        let trained = training.on_rank(&factory, rank);
        trained.inspect_err(|error| notes.write(rank, "error", &error.to_string()))
    };
    let launcher = launcher(2, name).with_stall_timeout(Duration::from_secs(100));
    let error = launcher.run(body).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    notes.assert_ended(2);
    let LaunchError::Rank { rank, reason, activity } = error else { panic!("{error}") };
    assert!(rank == 1 && activity.starts_with("step 2, "), "rank {rank}: {reason}; {activity}");
    assert!(names_operation_and_call_site(&reason) && reason.contains(words), "{reason}");
    // The other rank ended with the same reason, and says whose it is.
    assert_eq!(notes.read(0, "error"), format!("the job ended because of rank 1: {reason}"));
    let own = notes.read(1, "error");
    assert!(own == reason || own == notes.read(0, "error"), "{own}");
}

#[test]
fn a_lost_device_of_one_process_ends_all_with_its_operation_and_call_site() {
    let name = "a_lost_device_of_one_process_ends_all_with_its_operation_and_call_site";
    a_device_fails_in_step_2(name, Failure::Lost, "the device was lost");
}

#[test]
fn a_device_without_memory_ends_all_processes_with_its_operation_and_call_site() {
    let name = "a_device_without_memory_ends_all_processes_with_its_operation_and_call_site";
    a_device_fails_in_step_2(name, Failure::OutOfMemory, "out of memory");
}
