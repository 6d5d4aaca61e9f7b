//! Whether ranks move, seen from outside: what the launcher looks at while it waits for them.
//!
//! Ranks that wait for each other give up after `parallel.timeout_s` by themselves. What they cannot notice is that
//! all of them stand: stopped, deadlocked each in itself, held up by a pipe that nobody reads. So the launcher looks,
//! too. A rank moves when one of these holds:
//!
//! - it has given a sign of life (a step, a collective, a look around while it waits for another rank);
//! - its process has used processor time (10 ms of it, the unit of `/proc/PID/stat`): a computation between two
//!   collectives may take as long as it likes;
//! - one of its threads is ready to run: a rank that gets no core on a busy machine is not to blame.
//!
//! A rank that has not moved for `parallel.timeout_s` stands still. A program that computes for ever in a loop is not
//! noticed here; the ranks that wait for it name it.
//!
//! Time in which the launcher itself did not run counts for little: Ctrl-Z stops launcher and ranks together, and all go
//! on together.

use std::path::Path;
use std::time::Duration;

/// What a look at a rank found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Vitals {
    /// Since its last sign of life; None when it has not joined the job yet.
    pub silent: Option<Duration>,
    /// What the system says about its process.
    pub process: Process,
}

/// What the system says about a process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Process {
    /// Processor time so far, in units of the system.
    pub cpu_ticks: u64,
    /// Whether a signal or a debugger has stopped it.
    pub stopped: bool,
    /// Whether one of its threads runs or is ready to run.
    pub runnable: bool,
    /// Whether one of its threads waits for a disk or for the memory manager, which no signal interrupts.
    pub in_disk: bool,
}

impl Process {
    /// Reads `/proc/PID`; of a process that is gone, nothing.
    pub fn read(pid: u32) -> Process {
        let whole = stat(format!("/proc/{pid}/stat").as_ref()).unwrap_or_default();
        let cpu_ticks = cpu_ticks(&whole).unwrap_or(0);
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let states: String = tasks.filter_map(|task| state(&stat(&task.path().join("stat"))?)).collect();
        Process {
            cpu_ticks,
            stopped: !states.is_empty() && states.chars().all(|state| matches!(state, 'T' | 't')),
            runnable: states.contains('R'),
            in_disk: states.contains('D'),
        }
    }
}

/// The text of a `stat` file, which has about 300 bytes; None when the process has ended.
fn stat(path: &Path) -> Option<String> {
    phalanx_files::read_text(path, 4096).ok()
}

/// The state in the text of a `stat` file: behind the name in brackets.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// Time in user and system mode, the 14th and 15th field.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// For how long each rank has not moved.
pub struct Stillness {
    ranks: Vec<Still>,
}

#[derive(Clone, Copy, Default)]
struct Still {
    cpu_ticks: u64,
    time: Duration,
}

impl Stillness {
    /// What the time between two looks counts at most.
    const MAX_COUNTED: Duration = Duration::from_secs(1);

    /// For ranks that have just been started.
    pub fn new(ranks: usize) -> Stillness {
        Stillness { ranks: vec![Still::default(); ranks] }
    }

    /// Takes note of what a look at `rank` found, `since` the look before.
    pub fn note(&mut self, rank: usize, vitals: &Vitals, since: Duration) {
        let still = &mut self.ranks[rank];
        let signed = vitals.silent.is_some_and(|silent| silent <= since);
        let computed = vitals.process.cpu_ticks != still.cpu_ticks;
        still.cpu_ticks = vitals.process.cpu_ticks;
        still.time = match signed || computed || vitals.process.runnable {
            true => Duration::ZERO,
            false => still.time + since.min(Self::MAX_COUNTED),
        };
    }

    /// For how long a rank has not moved.
    pub fn time(&self, rank: usize) -> Duration {
        self.ranks[rank].time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(250);

    fn idle(silent_ms: u64) -> Vitals {
        let process = Process { cpu_ticks: 7, ..Process::default() };
        Vitals { silent: Some(Duration::from_millis(silent_ms)), process }
    }

    #[test]
    fn fields_of_stat_are_found_behind_any_name() {
        let stat = "12 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 123 45 0 0";
        assert_eq!((state(stat), cpu_ticks(stat)), (Some('S'), Some(168)));
        assert_eq!((state(""), cpu_ticks("1 (a) S 1")), (None, None));
        let own = Process::read(std::process::id());
        assert!(own.runnable && !own.stopped);
        assert_eq!(Process::read(u32::MAX), Process::default());
    }

    #[test]
    fn signs_of_life_processor_time_and_readiness_are_movement() {
        let busy = Vitals { process: Process { cpu_ticks: 8, ..Process::default() }, ..idle(9000) };
        let ready = Vitals { process: Process { runnable: true, ..idle(0).process }, ..idle(9000) };
        for (moves, vitals) in [(true, idle(100)), (true, busy), (true, ready), (false, idle(9000))] {
            let mut stillness = Stillness::new(1);
            (0..5).for_each(|_| stillness.note(0, &idle(9000), TICK));
            // The first look saw processor time that was used before it.
            assert_eq!(stillness.time(0), 4 * TICK);
            stillness.note(0, &vitals, TICK);
            assert_eq!(stillness.time(0), if moves { Duration::ZERO } else { 5 * TICK }, "{vitals:?}");
        }
    }

    #[test]
    fn a_rank_that_never_joins_stands_still_too() {
        let mut stillness = Stillness::new(1);
        (0..3).for_each(|_| stillness.note(0, &Vitals { silent: None, process: Process::default() }, TICK));
        assert_eq!(stillness.time(0), 3 * TICK);
    }

    /// Stopped together with its ranks for an hour, the launcher has not seen them stand for an hour.
    #[test]
    fn time_in_which_the_launcher_did_not_run_counts_for_little() {
        let mut stillness = Stillness::new(1);
        stillness.note(0, &idle(9000), TICK);
        stillness.note(0, &idle(3_700_000), Duration::from_secs(3600));
        assert_eq!(stillness.time(0), Stillness::MAX_COUNTED);
    }
}
