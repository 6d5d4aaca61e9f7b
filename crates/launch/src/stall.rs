//! Detects stalled ranks from outside: the launcher looks at their processes while it waits for them.
//!
//! Ranks that wait for each other give up after a timeout by themselves, unless the rank that they wait for works. Whether it
//! does, they cannot see, and they cannot notice that all of them are stalled: stopped by a signal, or blocked on a pipe that
//! nobody reads. So the launcher looks. A rank makes progress when one of these holds:
//!
//! - it has given a sign of life (a step, a collective, a look around while it waits for another rank);
//! - its process has used processor time (10 ms of it, the unit of `/proc/PID/stat`): a computation may take as long as it
//!   likes;
//! - one of its threads is ready to run: a rank that gets no core on a busy machine is not to blame.
//!
//! A rank without progress for the timeout is stalled. Waiting is progress, but no work: a rank works if it makes calls or
//! steps, if it uses a fifth of a core, or if it gives no sign of life and computes or waits for a disk. Ranks that wait for
//! one that works are patient.
//!
//! Time in which the launcher itself did not run counts for little: Ctrl-Z stops launcher and ranks together, and all go
//! on together.

use std::time::Duration;

use phalanx_system::host::process::Activity;

/// The launcher's observation of a rank at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// Time since its last sign of life; `None` when it has not joined the job yet.
    pub silent: Option<Duration>,
    /// State of its process.
    pub process: Activity,
    /// Number of its calls and steps so far.
    pub events: u64,
}

/// For each rank, the time for which it has made no progress.
pub struct StallDetector {
    ranks: Vec<Still>,
}

#[derive(Clone, Copy, Default)]
struct Still {
    cpu_ticks: u64,
    events: u64,
    time: Duration,
}

impl StallDetector {
    /// The time between two observations counts as at most this.
    const MAX_COUNTED: Duration = Duration::from_secs(1);

    /// A detector for ranks that have just been started.
    pub fn new(ranks: usize) -> StallDetector {
        StallDetector { ranks: vec![Still::default(); ranks] }
    }

    /// Time of the processor in one tick of `/proc/PID/stat`.
    const TICK: Duration = Duration::from_millis(10);

    /// Records an observation of `rank`, at time `since` after the previous one. Returns whether the rank works.
    pub fn note(&mut self, rank: usize, observation: &Observation, since: Duration) -> bool {
        let still = &mut self.ranks[rank];
        let Observation { silent, process, events } = *observation;
        let signed = silent.is_some_and(|silent| silent <= since);
        let ticks = process.cpu_ticks.saturating_sub(still.cpu_ticks);
        let called = events != still.events;
        (still.cpu_ticks, still.events) = (process.cpu_ticks, events);
        still.time = match signed || ticks > 0 || process.runnable {
            true => Duration::ZERO,
            false => still.time + since.min(Self::MAX_COUNTED),
        };
        let uses_a_core = Self::TICK * u32::try_from(ticks).unwrap_or(u32::MAX) >= since / 5;
        called
            || (ticks > 0 && uses_a_core)
            || (!signed && (ticks > 0 || process.runnable || process.in_disk))
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
        Observation { silent: Some(Duration::from_millis(silent_ms)), process, events: 0 }
    }

    #[test]
    fn signs_of_life_processor_time_and_readiness_are_movement() {
        let busy = Observation { process: Activity { cpu_ticks: 8, ..Activity::default() }, ..idle(9000) };
        let ready = Observation { process: Activity { runnable: true, ..idle(0).process }, ..idle(9000) };
        for (moves, observation) in [(true, idle(100)), (true, busy), (true, ready), (false, idle(9000))] {
            let mut stalls = StallDetector::new(1);
            (0..5).for_each(|_| _ = stalls.note(0, &idle(9000), TICK));
            // The first observation includes processor time that was used before it.
            assert_eq!(stalls.time(0), 4 * TICK);
            let _ = stalls.note(0, &observation, TICK);
            assert_eq!(stalls.time(0), if moves { Duration::ZERO } else { 5 * TICK }, "{observation:?}");
        }
    }

    #[test]
    fn waiting_is_progress_but_no_work() {
        let mut stalls = StallDetector::new(1);
        let mut ticks = 7;
        let mut works = |silent_ms, more_ticks, process: Activity, events| {
            ticks += more_ticks;
            let process = Activity { cpu_ticks: ticks, ..process };
            let silent = Some(Duration::from_millis(silent_ms));
            stalls.note(0, &Observation { silent, process, events }, TICK)
        };
        let sleeps = Activity::default();
        works(0, 0, sleeps, 0);
        // A rank that waits wakes every 50 ms, and looks around.
        assert!(!works(40, 0, sleeps, 0) && !works(40, 1, sleeps, 0));
        assert!(!works(40, 0, Activity { runnable: true, ..sleeps }, 0));
        // It spins, or its other threads compute.
        assert!(works(40, 5, sleeps, 0));
        assert!(works(40, 0, sleeps, 1) && !works(40, 0, sleeps, 1));
        // It has left its wait.
        assert!(works(900, 1, sleeps, 1) && !works(900, 0, sleeps, 1));
        assert!(works(900, 0, Activity { runnable: true, ..sleeps }, 1));
        assert!(works(900, 0, Activity { in_disk: true, ..sleeps }, 1));
    }

    #[test]
    fn a_rank_that_never_joins_stands_still_too() {
        let mut stalls = StallDetector::new(1);
        let never = Observation { silent: None, process: Activity::default(), events: 0 };
        (0..3).for_each(|_| _ = stalls.note(0, &never, TICK));
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
