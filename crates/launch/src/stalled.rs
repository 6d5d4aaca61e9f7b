//! The search for ranks that stand still, and its words.

use std::cmp::Reverse;
use std::time::Duration;

use phalanx_system::host::process::Activity;

use crate::failure::Failure;
use crate::stall::Observation;
use crate::watch::Watch;

/// Time for which a rank may be stalled after the ranks were asked to finish early.
const GRACE: Duration = Duration::from_secs(5);

/// Time that a disk may take to answer, also after a signal.
const DISK: Duration = Duration::from_secs(300);

/// The launcher gives up this much later than the ranks, which know better for which rank they wait.
const PRECEDENCE: Duration = Duration::from_millis(500);

/// Largest number of stalled ranks that are named beside the first.
const MAX_NAMED: usize = 15;

impl Watch<'_> {
    /// Searches for stalled ranks ([`stall`](crate::stall)), `since` after the last search. A rank that was asked to
    /// finish early gets less time: it should be finishing its step.
    pub(crate) fn stalled(&mut self, since: Duration) -> Option<Failure> {
        let whole = self.processes.timeout;
        let timeout = if self.stopping { whole.min(GRACE) } else { whole };
        let first = self.processes.first();
        let mut still = Vec::new();
        for (rank, process) in self.processes.alive() {
            let activity = process.activity();
            let silent = self.processes.job.silent_for(rank);
            let events = self.processes.job.events(rank);
            if self.stalls.note(rank - first, &Observation { silent, process: activity, events }, since) {
                self.processes.job.note_work(rank);
            }
            let limit = if activity.in_disk { whole.max(DISK) } else { timeout };
            if self.stalls.time(rank - first) >= limit.saturating_add(PRECEDENCE) {
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
            "it is stalled: {}; for {:.1} s it has given no sign of life and has used no processor time ({}{asked}){}{more}{}",
            self.held_up_by(*rank, first),
            self.stalls.time(*rank - self.processes.first()).as_secs_f64(),
            self.hooks.timeout_setting(self.processes.timeout),
            others.collect::<String>(),
            self.describe_rest(still),
        )
    }

    /// Describes the last activity of the ranks of all hosts that do not stand still.
    fn describe_rest(&self, still: &[(usize, Activity)]) -> String {
        let job = &self.processes.job;
        let world = self.plane.as_ref().map_or(job.ranks().end, |plane| plane.ranks().world_size());
        let rest = (0..world).filter(|rank| !still.iter().any(|(stalled, _)| stalled == rank));
        rest.take(MAX_NAMED).map(|rank| format!("\nrank {rank}: {}", job.last_activity(rank))).collect()
    }

    /// Describes the event that a stalled process waits for, as far as is visible from outside.
    pub(crate) fn held_up_by(&self, rank: usize, activity: &Activity) -> String {
        let pid = self.processes.process(rank).map_or(0, |process| process.pid());
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
}
