//! Detects stalled ranks from outside: the launcher looks at their processes while it waits for them.
//!
//! Ranks that wait for each other give up after a timeout by themselves. They cannot notice that all of them
//! are stalled: stopped by a signal, deadlocked, or blocked on a pipe that nobody reads. So the launcher looks, too. A rank
//! makes progress when one of these holds:
//!
//! - it has given a sign of life (a step, a collective, a look around while it waits for another rank);
//! - its process has used processor time (10 ms of it, the unit of `/proc/PID/stat`): a computation between two
//!   collectives may take as long as it likes;
//! - one of its threads is ready to run: a rank that gets no core on a busy machine is not to blame.
//!
//! A rank without progress for the timeout is stalled. A rank that computes in an endless loop is not noticed
//! here; the ranks that wait for it name it.
//!
//! Time in which the launcher itself did not run counts for little: Ctrl-Z stops launcher and ranks together, and all go
//! on together.

use std::time::Duration;

use phalanx_host::process::Activity;

/// What the launcher observed about a rank at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// Time since its last sign of life; `None` when it has not joined the job yet.
    pub silent: Option<Duration>,
    /// State of its process.
    pub process: Activity,
}

/// For each rank, the time for which it has made no progress.
pub struct StallDetector {
    ranks: Vec<Still>,
}

#[derive(Clone, Copy, Default)]
struct Still {
    cpu_ticks: u64,
    time: Duration,
}

impl StallDetector {
    /// The time between two observations counts as at most this.
    const MAX_COUNTED: Duration = Duration::from_secs(1);

    /// A detector for ranks that have just been started.
    pub fn new(ranks: usize) -> StallDetector {
        StallDetector { ranks: vec![Still::default(); ranks] }
    }

    /// Records an observation of `rank`, at time `since` after the previous one.
    pub fn note(&mut self, rank: usize, observation: &Observation, since: Duration) {
        let still = &mut self.ranks[rank];
        let signed = observation.silent.is_some_and(|silent| silent <= since);
        let computed = observation.process.cpu_ticks != still.cpu_ticks;
        still.cpu_ticks = observation.process.cpu_ticks;
        still.time = match signed || computed || observation.process.runnable {
            true => Duration::ZERO,
            false => still.time + since.min(Self::MAX_COUNTED),
        };
    }

    /// The time for which a rank has made no progress.
    pub fn time(&self, rank: usize) -> Duration {
        self.ranks[rank].time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(250);

    fn idle(silent_ms: u64) -> Observation {
        let process = Activity { cpu_ticks: 7, ..Activity::default() };
        Observation { silent: Some(Duration::from_millis(silent_ms)), process }
    }

    #[test]
    fn signs_of_life_processor_time_and_readiness_are_movement() {
        let busy = Observation { process: Activity { cpu_ticks: 8, ..Activity::default() }, ..idle(9000) };
        let ready = Observation { process: Activity { runnable: true, ..idle(0).process }, ..idle(9000) };
        for (moves, observation) in [(true, idle(100)), (true, busy), (true, ready), (false, idle(9000))] {
            let mut stalls = StallDetector::new(1);
            (0..5).for_each(|_| stalls.note(0, &idle(9000), TICK));
            // The first observation includes processor time that was used before it.
            assert_eq!(stalls.time(0), 4 * TICK);
            stalls.note(0, &observation, TICK);
            assert_eq!(stalls.time(0), if moves { Duration::ZERO } else { 5 * TICK }, "{observation:?}");
        }
    }

    #[test]
    fn a_rank_that_never_joins_stands_still_too() {
        let mut stalls = StallDetector::new(1);
        (0..3)
            .for_each(|_| stalls.note(0, &Observation { silent: None, process: Activity::default() }, TICK));
        assert_eq!(stalls.time(0), 3 * TICK);
    }

    /// If the launcher was stopped for an hour together with its ranks, that hour does not count.
    #[test]
    fn time_in_which_the_launcher_did_not_run_counts_for_little() {
        let mut stalls = StallDetector::new(1);
        stalls.note(0, &idle(9000), TICK);
        stalls.note(0, &idle(3_700_000), Duration::from_secs(3600));
        assert_eq!(stalls.time(0), StallDetector::MAX_COUNTED);
    }
}
