//! Waits until the ranks of a job have ended, and ends the job when one of them fails.
//!
//! The launcher sleeps in one `poll` until a process ends, the caller asks the ranks to stop, or a time is over: that of
//! the next search for ranks that stand still, or that which ranks have to end.

use std::cmp::Reverse;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use phalanx_host::process::Activity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

use crate::exit_status::unexpected_end;
use crate::failure::Failure;
use crate::hooks::Hooks;
use crate::processes::RankProcesses;
use crate::stall::{Observation, StallDetector};

/// Time that ranks have to end after one of them has failed.
const LEAVE: Duration = Duration::from_secs(1);

/// Time that a process has to end after SIGKILL. One that waits for a disk does not see the signal before the disk
/// answers.
const KILLED: Duration = Duration::from_secs(5);

/// Time for which a rank may be stalled after the ranks were asked to finish early.
const GRACE: Duration = Duration::from_secs(5);

/// The launcher gives up this much later than the ranks, which know better for which rank they wait.
const PRECEDENCE: Duration = Duration::from_millis(500);

/// Shortest and longest time between two searches for ranks that stand still. A rank is found at most two such times
/// after the timeout and [`PRECEDENCE`], so within a second after the timeout.
const SEARCH_EVERY: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(250)];

/// Largest number of stalled ranks that are named beside the first.
const MAX_NAMED: usize = 15;

/// How far the end of a job has come.
#[derive(Clone, Copy)]
enum Phase {
    /// The ranks work.
    Working,
    /// One has failed; the others end by themselves until this time.
    Leaving(Instant),
    /// All got SIGKILL; the launcher waits until this time.
    Killed(Instant),
}

impl RankProcesses {
    /// Waits until all ranks have ended.
    ///
    /// # Errors
    /// The rank that failed, ended early, or stalled; the others have been ended then.
    pub fn wait(mut self, hooks: &dyn Hooks) -> Result<(), Failure> {
        Watch::new(&mut self, hooks).run()
    }
}

/// Waits for the ranks of a job.
struct Watch<'a> {
    processes: &'a mut RankProcesses,
    hooks: &'a dyn Hooks,
    phase: Phase,
    failure: Option<Failure>,
    stalls: StallDetector,
    /// Whether the ranks were asked to finish early.
    stopping: bool,
    /// When the ranks were last looked at.
    looked: Instant,
}

impl<'a> Watch<'a> {
    fn new(processes: &'a mut RankProcesses, hooks: &'a dyn Hooks) -> Watch<'a> {
        let stalls = StallDetector::new(processes.ranks.len());
        let (phase, looked) = (Phase::Working, Instant::now());
        Watch { processes, hooks, phase, failure: None, stalls, stopping: false, looked }
    }

    /// Waits until all ranks have ended.
    fn run(mut self) -> Result<(), Failure> {
        while self.processes.alive().next().is_some() {
            if self.sleep() {
                self.ask_to_stop();
            }
            let since = self.looked.elapsed();
            self.looked += since;
            let ended = self.note_ends();
            match self.phase {
                Phase::Working => {
                    let first = ended.or_else(|| self.stalled(since)).or_else(|| self.told());
                    if let Some(first) = first {
                        self.end_job(first);
                    }
                }
                Phase::Leaving(until) if self.looked >= until => {
                    self.processes.signal(Signal::KILL);
                    self.phase = Phase::Killed(self.looked + KILLED);
                }
                Phase::Killed(until) if self.looked >= until => self.give_up(),
                Phase::Leaving(_) | Phase::Killed(_) => {}
            }
        }
        let Some(mut failure) = self.failure else { return Ok(()) };
        // The number may come from a rank, so it is checked.
        failure.status = self.processes.ranks.get(failure.rank).and_then(|process| process.status);
        Err(failure)
    }

    /// Sleeps until a rank ends, the ranks are to stop, or a time is over. Returns whether the ranks are to stop.
    fn sleep(&self) -> bool {
        let pidfds = self.processes.alive().filter_map(|(_, process)| process.pidfd.as_ref());
        let stop = if self.stopping { None } else { self.hooks.stop_event() };
        let fds = stop.into_iter().chain(pidfds.map(AsFd::as_fd));
        let mut fds: Vec<PollFd> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let [min, max] = SEARCH_EVERY;
        let limit = match self.phase {
            Phase::Working => (self.processes.timeout / 8).clamp(min, max),
            Phase::Leaving(until) | Phase::Killed(until) => until.saturating_duration_since(Instant::now()),
        };
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Whether interrupted or timed out, the caller checks everything again.
        let _ = poll(&mut fds, Some(&limit));
        stop.is_some() && !fds[0].revents().is_empty()
    }

    fn ask_to_stop(&mut self) {
        self.stopping = true;
        self.processes.signal(Signal::TERM);
        // Stopped ranks must get the signal too, so that they finish their step and save.
        self.processes.signal(Signal::CONT);
        self.stalls = StallDetector::new(self.processes.ranks.len());
    }

    /// Notes which processes have ended; returns the first rank that failed.
    fn note_ends(&mut self) -> Option<Failure> {
        let RankProcesses { job, ranks, .. } = &mut *self.processes;
        let mut failure = None;
        for (rank, process) in ranks.iter_mut().enumerate().filter(|(_, process)| process.is_alive()) {
            let Ok(Some(status)) = process.child.try_wait() else { continue };
            process.status = Some(status);
            if failure.is_none()
                && let Some(how) = unexpected_end(status, job.is_done(rank), || self.hooks.killed())
            {
                let reason = format!("process {} {how}", process.pid());
                failure = Some(Failure::new(rank, reason, job.last_activity(rank)));
            }
        }
        failure
    }

    /// Searches for stalled ranks ([`stall`](crate::stall)), `since` after the last search. A rank that was asked to
    /// finish early gets less time: it should be finishing its step.
    fn stalled(&mut self, since: Duration) -> Option<Failure> {
        let whole = self.processes.timeout;
        let timeout = if self.stopping { whole.min(GRACE) } else { whole };
        let mut still = Vec::new();
        for (rank, process) in self.processes.alive() {
            let activity = process.activity();
            let silent = self.processes.job.silent_for(rank);
            self.stalls.note(rank, &Observation { silent, process: activity }, since);
            // A disk may be as slow after a signal as without one.
            let limit = if activity.in_disk { whole } else { timeout };
            if self.stalls.time(rank) >= limit.saturating_add(PRECEDENCE) {
                still.push((rank, activity));
            }
        }
        // The rank that has been silent longest is named first: it may be what the others wait for.
        still.sort_by_key(|(rank, _)| Reverse(self.processes.job.silent_for(*rank)));
        let (rank, _) = still.first()?;
        Some(Failure::new(*rank, self.describe_stalled(&still), self.processes.job.last_activity(*rank)))
    }

    /// Describes the ranks that stand still; the first is named as the cause.
    fn describe_stalled(&self, still: &[(usize, Activity)]) -> String {
        let (rank, first) = &still[0];
        let others = still[1..].iter().take(MAX_NAMED).map(|(rank, activity)| {
            let last = self.processes.job.last_activity(*rank);
            format!("\nso does rank {rank}: {last}; {}", self.held_up_by(*rank, activity))
        });
        let more = match still.len().saturating_sub(1 + MAX_NAMED) {
            0 => String::new(),
            more => format!("\nand {more} more"),
        };
        let asked = if self.stopping { "; a signal has asked the run to end" } else { "" };
        format!(
            "it is stalled: {}; for {:.1} s it has given no sign of life and has used no processor time ({}{asked}){}{more}",
            self.held_up_by(*rank, first),
            self.stalls.time(*rank).as_secs_f64(),
            self.hooks.timeout_setting(self.processes.timeout),
            others.collect::<String>(),
        )
    }

    /// What a stalled process waits for, as far as is visible from outside.
    fn held_up_by(&self, rank: usize, activity: &Activity) -> String {
        let pid = self.processes.ranks[rank].pid();
        match (activity.stopped, self.hooks.waits_for(rank), activity.in_disk) {
            (true, _, _) => {
                format!(
                    "process {pid} is stopped, by a signal or a debugger; `kill -CONT {pid}` lets it continue"
                )
            }
            (false, Some(what), _) => format!("process {pid} waits for {what}"),
            (false, None, true) => format!("process {pid} waits for a disk or for memory"),
            (false, None, false) => format!("process {pid} sleeps"),
        }
    }

    /// A failure that a rank has reported before it ended.
    fn told(&self) -> Option<Failure> {
        let (rank, reason, _) = self.processes.job.aborted()?;
        Some(Failure::new(rank, reason, self.processes.job.last_activity(rank)))
    }

    /// Ends the job for all ranks; `first` is the rank that was first seen to end or stall.
    fn end_job(&mut self, first: Failure) {
        // The abort record names the cause: this rank, unless another has reported an error before it.
        self.processes.job.abort(first.rank, &first.reason);
        self.failure = Some(self.cause(first));
        self.phase = Phase::Leaving(self.looked + LEAVE);
        // A rank that is stopped, or has not moved for half of the timeout, will not leave by itself.
        let stays = |rank| self.stalls.time(rank) >= self.processes.timeout / 2;
        for (rank, process) in self.processes.alive() {
            if stays(rank) || process.activity().stopped {
                process.signal(Signal::KILL);
            }
        }
    }

    /// The cause of the failure according to the job's record.
    fn cause(&self, first: Failure) -> Failure {
        let job = &self.processes.job;
        let mut cause = match job.aborted() {
            Some((rank, reason, _)) if rank != first.rank || reason != first.reason => {
                Failure::new(rank, reason, job.last_activity(rank))
            }
            _ => first,
        };
        // A rank that named another one could not see why that one does not arrive. The number comes from a rank, so it
        // is checked.
        let Some(process) = self.processes.ranks.get(cause.rank) else { return cause };
        let activity = process.activity();
        if process.is_alive() && (activity.stopped || self.hooks.waits_for(cause.rank).is_some()) {
            cause.activity = format!("{}; {}", cause.activity, self.held_up_by(cause.rank, &activity));
        }
        cause
    }

    /// Stops waiting for processes that SIGKILL has not ended.
    fn give_up(&mut self) {
        let mut left = Vec::new();
        let alive = |(_, process): &(usize, &mut crate::processes::RankProcess)| process.is_alive();
        for (rank, process) in self.processes.ranks.iter_mut().enumerate().filter(alive) {
            process.given_up = true;
            left.push((rank, process.pid().to_string()));
        }
        if let Some(failure) = &mut self.failure {
            let (ranks, pids): (Vec<usize>, Vec<String>) = left.into_iter().unzip();
            let pids = pids.join(", ");
            failure
                .reason
                .push_str(&format!("; processes that SIGKILL has not ended: {pids} (a disk that hangs?)"));
            failure.left = ranks;
        }
    }
}
