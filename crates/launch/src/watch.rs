//! Waits until the ranks of a job have ended, and ends the job when one of them fails.
//!
//! The launcher sleeps in one `poll` until a process ends, the caller asks the ranks to stop, the launcher of another host
//! says something ([`peers`](crate::peers)), or a time is over: that of the next search for ranks that stand still
//! ([`stalled`](crate::stalled)), or that which ranks have to end.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

use crate::control::ControlPlane;
use crate::exit_status::unexpected_end;
use crate::failure::Failure;
use crate::hooks::Hooks;
use crate::processes::RankProcesses;
use crate::stall::StallDetector;

/// Time that ranks have to end after one of them has failed.
const LEAVE: Duration = Duration::from_secs(1);

/// Time that a process has to end after SIGKILL. One that waits for a disk does not see the signal before the disk
/// answers.
const KILLED: Duration = Duration::from_secs(5);

/// Shortest and longest time between two searches for ranks that stand still. A rank is found at most two such times
/// after the timeout and [`PRECEDENCE`](crate::stalled), so within a second after the timeout.
const SEARCH_EVERY: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(250)];

/// Time between two messages with the states of this host's ranks.
pub(crate) const TELL_EVERY: Duration = Duration::from_millis(100);

/// Progress of the end of a job.
#[derive(Clone, Copy)]
pub(crate) enum Phase {
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
        Watch::new(&mut self, hooks, None).run()
    }

    /// The same for the ranks of one of several hosts: waits for the ranks of all hosts, and ends the job on all of them.
    ///
    /// # Errors
    /// As for [`RankProcesses::wait`]; also for a host that is lost.
    pub fn wait_with(mut self, hooks: &dyn Hooks, plane: &mut ControlPlane) -> Result<(), Failure> {
        Watch::new(&mut self, hooks, Some(plane)).run()
    }
}

/// Waits for the ranks of a job.
pub(crate) struct Watch<'a> {
    pub(crate) processes: &'a mut RankProcesses,
    pub(crate) hooks: &'a dyn Hooks,
    /// The launchers of the other hosts, if there are some.
    pub(crate) plane: Option<&'a mut ControlPlane>,
    pub(crate) phase: Phase,
    pub(crate) failure: Option<Failure>,
    pub(crate) stalls: StallDetector,
    /// True if the ranks were asked to finish early.
    pub(crate) stopping: bool,
    /// When the job was found to have failed.
    pub(crate) failed_at: Option<Instant>,
    /// When the ranks were searched last for those that stand still.
    searched: Instant,
    /// When the other launchers were told what the ranks of this host do.
    pub(crate) told_at: Instant,
    /// Hosts whose ranks have all ended well.
    pub(crate) ended: BTreeSet<usize>,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(
        processes: &'a mut RankProcesses,
        hooks: &'a dyn Hooks,
        plane: Option<&'a mut ControlPlane>,
    ) -> Watch<'a> {
        let (ranks, now) = (processes.ranks.len(), Instant::now());
        Watch {
            processes,
            hooks,
            plane,
            phase: Phase::Working,
            failure: None,
            stalls: StallDetector::new(ranks),
            stopping: false,
            failed_at: None,
            searched: now,
            told_at: now,
            ended: BTreeSet::new(),
        }
    }

    /// Waits until all ranks have ended.
    fn run(mut self) -> Result<(), Failure> {
        while self.processes.alive().next().is_some() || self.waits_for_local() || self.waits_for_others() {
            if self.sleep() {
                self.ask_to_stop();
                self.pass_on_stop();
            }
            let now = Instant::now();
            let ended = self.note_ends().or_else(|| self.lost_locally());
            let heard = self.hear();
            match (self.phase, ended) {
                // Both at once: what another launcher says may be better than what ranks of this host could see.
                (Phase::Working, Some(ended)) => {
                    self.end_job(ended, now);
                    self.correct(heard);
                }
                (Phase::Working, None) => {
                    let first = heard.or_else(|| self.search(now)).or_else(|| self.told());
                    if let Some(first) = first {
                        self.end_job(first, now);
                    }
                }
                (Phase::Leaving(_) | Phase::Killed(_), _) => self.correct(heard),
            }
            match self.phase {
                Phase::Leaving(until) if now >= until => {
                    self.processes.signal(Signal::KILL);
                    self.phase = Phase::Killed(now + KILLED);
                }
                Phase::Killed(until) if now >= until => self.give_up(),
                _ => {}
            }
            self.tell_states(now);
        }
        self.tell_end();
        let Some(mut failure) = self.failure else { return Ok(()) };
        // The number may come from a rank, so it is checked.
        failure.status = self.processes.process(failure.rank).and_then(|process| process.status);
        let job = &self.processes.job;
        failure.world_size =
            self.plane.as_ref().map_or(self.processes.ranks.len(), |plane| plane.ranks().world_size());
        failure.flights = job.ranks().map(|rank| (rank, job.flight_record(rank))).collect();
        Err(failure)
    }

    /// Returns whether ranks of this host that other processes have started still work.
    fn waits_for_local(&self) -> bool {
        matches!(self.phase, Phase::Working) && self.processes.others_work()
    }

    /// A rank of this host that another process has started, and that is lost with that process.
    fn lost_locally(&self) -> Option<Failure> {
        let lost = |rank: &usize| !self.processes.job.is_done(*rank);
        let rank = self.hooks.lost_ranks().into_iter().find(lost)?;
        let reason = "the process that has started it has ended".to_string();
        Some(Failure::new(rank, reason, self.processes.job.last_activity(rank)))
    }

    /// Sleeps until a rank ends, the ranks are to stop, another launcher says something, or a time is over. Returns whether
    /// the ranks are to stop.
    fn sleep(&self) -> bool {
        let pidfds = self.processes.alive().filter_map(|(_, process)| process.pidfd.as_ref());
        let stop = if self.stopping { None } else { self.hooks.stop_event() };
        let plane = self.plane.as_ref().map(|plane| plane.wake());
        let fds = stop.into_iter().chain(plane).chain(pidfds.map(AsFd::as_fd));
        let mut fds: Vec<PollFd> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let limit = match self.phase {
            Phase::Working if self.plane.is_some() => self.search_every().min(TELL_EVERY),
            Phase::Working => self.search_every(),
            Phase::Leaving(until) | Phase::Killed(until) => {
                let left = until.saturating_duration_since(Instant::now());
                if self.plane.is_some() { left.min(TELL_EVERY) } else { left }
            }
        };
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Whether interrupted or timed out, the caller checks everything again.
        let _ = poll(&mut fds, Some(&limit));
        stop.is_some() && !fds[0].revents().is_empty()
    }

    fn search_every(&self) -> Duration {
        let [min, max] = SEARCH_EVERY;
        (self.processes.timeout / 8).clamp(min, max)
    }

    /// Searches for ranks that stand still, if it is time.
    fn search(&mut self, now: Instant) -> Option<Failure> {
        let since = now.saturating_duration_since(self.searched);
        // A rank that waits gives a sign of life every 50 ms; more frequent searches could miss it.
        if since < self.search_every() {
            return None;
        }
        self.searched = now;
        self.stalled(since)
    }

    pub(crate) fn ask_to_stop(&mut self) {
        self.stopping = true;
        self.processes.signal(Signal::TERM);
        // Stopped ranks must get the signal too, so that they finish their step and save.
        self.processes.signal(Signal::CONT);
        self.stalls = StallDetector::new(self.processes.ranks.len());
    }

    /// Notes which processes have ended; returns the first rank that failed.
    fn note_ends(&mut self) -> Option<Failure> {
        let first = self.processes.first();
        let RankProcesses { job, ranks, .. } = &mut *self.processes;
        let mut failure = None;
        for (rank, process) in (first..).zip(ranks.iter_mut()).filter(|(_, process)| process.is_alive()) {
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

    /// A failure that a rank has reported before it ended.
    fn told(&self) -> Option<Failure> {
        let (rank, reason, blame) = self.processes.job.aborted()?;
        Some(Failure { blame, ..Failure::new(rank, reason, self.processes.job.last_activity(rank)) })
    }

    /// Ends the job for all ranks; `first` is what was first seen.
    fn end_job(&mut self, first: Failure, now: Instant) {
        // The abort record names the cause: this rank, unless another has reported an error before it.
        self.processes.job.abort_as(first.rank, &first.reason, first.blame);
        let cause = self.cause(first);
        self.report(&cause);
        self.failure = Some(cause);
        self.failed_at = Some(now);
        self.phase = Phase::Leaving(now + LEAVE);
        // A rank that is stopped, or has not moved for half of the timeout, will not leave by itself.
        let first = self.processes.first();
        let stays = |rank: usize| self.stalls.time(rank - first) >= self.processes.timeout / 2;
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
            // What the launcher of the rank's own host says is better than what a rank elsewhere could see.
            Some((rank, reason, blame))
                if !first.is_remote && (rank != first.rank || reason != first.reason) =>
            {
                Failure { blame, ..Failure::new(rank, reason, job.last_activity(rank)) }
            }
            _ => first,
        };
        self.place(&mut cause);
        // A rank that named another one could not see why that one does not arrive. The number comes from a rank, so it
        // is checked.
        let Some(process) = self.processes.process(cause.rank) else { return cause };
        let activity = process.activity();
        if process.is_alive() && (activity.stopped || self.hooks.waits_for(cause.rank).is_some()) {
            cause.activity = format!("{}; {}", cause.activity, self.held_up_by(cause.rank, &activity)).into();
        }
        cause
    }

    /// Stops waiting for processes that SIGKILL has not ended.
    fn give_up(&mut self) {
        let mut left = Vec::new();
        let first = self.processes.first();
        let ranks = (first..).zip(self.processes.ranks.iter_mut());
        for (rank, process) in ranks.filter(|(_, process)| process.is_alive()) {
            process.given_up = true;
            left.push((rank, process.pid().to_string()));
        }
        if let Some(failure) = self.failure.as_mut().filter(|_| !left.is_empty()) {
            let (ranks, pids): (Vec<usize>, Vec<String>) = left.into_iter().unzip();
            let pids = pids.join(", ");
            failure
                .reason
                .push_str(&format!("; processes that SIGKILL has not ended: {pids} (a disk that hangs?)"));
            failure.left = ranks.into();
        }
    }
}
