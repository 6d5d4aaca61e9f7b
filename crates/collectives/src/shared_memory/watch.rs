//! Checks of a waiting rank: the job has not ended, the peer's call agrees, the peer has neither left nor waits for this rank in
//! another call, and the deadline has not passed. The error messages are written here.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::CollectiveError;
use crate::shared_memory::control::GroupName;
use crate::shared_memory::descriptor::{Descriptor, DescriptorCell};
use crate::shared_memory::participation::Participation;
use crate::shared_memory::rank_cell::Life;
use crate::shared_memory::waits::{Chain, Wait};
use crate::shared_memory::work::WorkSeen;

/// A wait for a peer that is in progress.
pub(crate) struct Watch<'a> {
    participation: Participation<'a>,
    /// Time of the last check; None before the wait has become slow.
    looked: Option<Instant>,
    waited: Duration,
    /// Time since the devices of all members have come to the call, counted as `waited` is.
    all_in: Duration,
    work: WorkSeen,
    noticed: bool,
    /// Since when a peer of another host has been seen in another call.
    crossed: Option<Instant>,
    /// True if the wait ended because of the deadline.
    gave_up: bool,
}

impl<'a> Watch<'a> {
    /// Longest sleep between two checks.
    pub(crate) const SLICE: Duration = Duration::from_millis(50);

    /// Maximum time that counts between two checks; also at most a quarter of the deadline. If this process was itself
    /// stopped (Ctrl-Z stops all ranks together), the peer is not charged with that time.
    const COUNTED_MAX: Duration = Duration::from_secs(1);

    /// A waiting rank gives a sign of life every [`Watch::SLICE`], so one that has been silent for this long does not
    /// wait. It is short against the deadline, to tell a rank that has just become silent from one that caused the
    /// wait.
    const SILENCE: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(10)];

    /// Time for which a peer of another host must be seen in another call before the calls count as different. What it has sent
    /// before may still be under way, and its state, which its launcher sends, may arrive sooner. When something arrives, the
    /// time begins anew.
    const CROSSED: Duration = Duration::from_millis(600);

    pub(crate) fn new(participation: Participation<'a>) -> Watch<'a> {
        Watch {
            participation,
            looked: None,
            waited: Duration::ZERO,
            all_in: Duration::ZERO,
            work: WorkSeen::default(),
            noticed: false,
            crossed: None,
            gave_up: false,
        }
    }

    /// The part in the call that waits.
    pub(crate) fn participation(&self) -> Participation<'a> {
        self.participation
    }

    /// Called when member `q` of this host has announced its call: the addresses of its buffers that are read and
    /// written, if it is the same call.
    pub(crate) fn compare(
        &self,
        own: &Descriptor,
        q: usize,
    ) -> Result<(*const u8, *mut u8), CollectiveError> {
        let Participation { host, members, .. } = self.participation;
        let cell = &self.participation.slot(q).descriptors[own.parity()];
        let peer = self.agreed(own, q, cell, &self.participation.slot_of_group(q).name)?;
        let needed = peer.offered_bytes(q, members.len());
        if peer.source_bytes < needed {
            let report = format!("{} bytes are offered, but {needed} are read", peer.source_bytes);
            return Err(CollectiveError::Unreadable { rank: members[q], report });
        }
        let source = host.memory.find(&host.control, members[q], peer.source, needed)?;
        let target = match peer.target.checked_sub(1) {
            Some(target) => {
                let written = peer.written_bytes(q, members.len());
                host.memory.find(&host.control, members[q], target, written)?.cast_mut()
            }
            None => std::ptr::null_mut(),
        };
        Ok((source, target))
    }

    /// The call of member `q`, which it has written to `cell`, if it is the same call. `name` is its name of the group.
    pub(crate) fn agreed(
        &self,
        own: &Descriptor,
        q: usize,
        cell: &DescriptorCell,
        name: &GroupName,
    ) -> Result<Descriptor, CollectiveError> {
        let same = |peer: &Descriptor| match self.participation.pair {
            None => own.agrees_with(peer),
            Some(_) => own.complements(self.participation.rank, peer, q),
        };
        cell.read().filter(same).ok_or_else(|| self.disagreement(q, cell, &name.read()))
    }

    /// Returns an error if the wait for member `q`, which ends when its counter reaches `until`, cannot succeed. Called
    /// after it was seen not to have arrived.
    pub(crate) fn look_around(&mut self, q: usize, until: u32) -> Result<(), CollectiveError> {
        let Participation { host, options, members, .. } = self.participation;
        let wait = self.wait_for(q, until);
        self.note(Some(wait))?;
        let now = Instant::now();
        let Some(looked) = self.looked.replace(now) else { return Ok(()) };
        self.waited += self.counted(now, looked);
        if self.work.is_due(self.waited) {
            self.waited = self.work.waited(&host.control, self.waited, options.deadline, self.cause(wait));
        }
        if let Some(cell) =
            self.crossing(q, until).filter(|_| host.ranks.contains(&members[q]) || self.has_stood(now))
        {
            return Err(self.disagreement(q, cell, &self.participation.slot_of_group(q).name.read()));
        }
        let peer = host.control.rank(members[q]);
        // What a rank of another host has sent before it left may still be under way.
        let may_arrive = peer.is_done() && !host.ranks.contains(&members[q]);
        // One that has done its part may leave.
        let is_behind = (self.participation.slot(q).counter().wrapping_sub(until) as i32) < 0;
        if is_behind && peer.life.load(Ordering::Acquire) == Life::LEFT && !may_arrive {
            return Err(CollectiveError::Left { rank: members[q], report: self.report(wait).1 });
        }
        if self.waited >= options.deadline {
            self.gave_up = true;
            return Err(self.given_up(wait));
        }
        if self.waited >= options.notice_after && !self.noticed {
            self.noticed = true;
            (options.notice)(&self.report(wait).1);
        }
        Ok(())
    }

    fn wait_for(&self, q: usize, until: u32) -> Wait {
        Wait { peer: self.participation.members[q], pair: self.participation.pair.is_some(), until }
    }

    /// Gives a sign of life and notes whom this rank waits for, unless the job has ended.
    fn note(&self, wait: Option<Wait>) -> Result<(), CollectiveError> {
        let Participation { host, channel, .. } = self.participation;
        host.aborted()?;
        host.control.rank(host.rank).sign();
        host.control.slot(channel, host.rank).note_wait(wait);
        Ok(())
    }

    /// The time that counts between two checks.
    fn counted(&self, now: Instant, looked: Instant) -> Duration {
        now.duration_since(looked).min(Self::COUNTED_MAX).min(self.participation.options.deadline / 4)
    }

    /// While devices move the bytes: returns an error if the job has ended; others see that this rank lives and for which member's count
    /// it waits, if for any. Whether the deadline has passed since `all_in` was first true, whatever ranks have computed.
    pub(crate) fn sign(&mut self, wait: Option<(usize, u32)>, all_in: bool) -> Result<bool, CollectiveError> {
        let now = Instant::now();
        let looked = self.looked.replace(now);
        if all_in {
            self.all_in += looked.map_or(Duration::ZERO, |looked| self.counted(now, looked));
        }
        self.note(wait.map(|(q, until)| self.wait_for(q, until)))?;
        Ok(self.all_in >= self.participation.options.deadline)
    }

    /// The devices of all ranks have been in the call for too long, and `members` have not come to the count `over` at its end. One of
    /// them that gives no sign of life is the cause.
    pub(crate) fn stuck(&mut self, members: impl Iterator<Item = usize>, over: u32) -> CollectiveError {
        let Participation { host, members: ranks, rank, group, .. } = self.participation;
        self.gave_up = true;
        let members: Vec<usize> = members.collect();
        if let Some(q) = members.iter().copied().find(|q| *q != rank && self.is_silent(ranks[*q])) {
            let (rank, report) = self.report(self.wait_for(q, over));
            return CollectiveError::Missing { rank, report };
        }
        let late: Vec<usize> = members.iter().map(|q| ranks[*q]).collect();
        let call = self.participation.slot(rank).newest().describe(group);
        let report = format!(
            "{call} is not over on ranks {late:?} {:.1} s after the devices of all its ranks had come to it (a connection between them \
             may be down; where a call may take longer, give a longer deadline, run.stall_timeout_s)",
            self.all_in.as_secs_f64()
        );
        CollectiveError::Stuck { rank: late.first().copied().unwrap_or(host.rank), report }
    }

    /// The call in which member `q` waits for this rank while this rank waits for it in another call: a call of the
    /// whole group against a send or recv. Both run their calls in order, so neither can continue.
    fn crossing(&self, q: usize, until: u32) -> Option<&'a DescriptorCell> {
        // Of another host, a peer that has ended this call has sent everything: it is under way.
        if self.participation.slot(q).counter().wrapping_sub(until) as i32 >= 0 {
            return None;
        }
        let pair = if self.participation.pair.is_some() { None } else { Some(q) };
        let other = Participation { pair, ..self.participation };
        let (own, theirs) = (other.slot(self.participation.rank), other.slot(q));
        // This rank is between two calls in that slot, so a peer that is ahead is inside a call.
        let ahead = theirs.counter().wrapping_sub(own.counter()) as i32 > 0;
        ahead.then(|| theirs.newest())
    }

    /// Returns whether a peer of another host has been seen in another call for long enough.
    fn has_stood(&mut self, now: Instant) -> bool {
        now.duration_since(*self.crossed.get_or_insert(now)) >= Self::CROSSED
    }

    fn disagreement(&self, q: usize, theirs: &DescriptorCell, name: &str) -> CollectiveError {
        let Participation { members, rank, group, .. } = self.participation;
        let own = self.participation.slot(rank).newest().describe(group);
        let theirs = theirs.describe(name);
        let report = format!("rank {}: {own}; rank {}: {theirs}", members[rank], members[q]);
        CollectiveError::Disagreement { report }
    }

    /// A description of the call in progress and of what `rank` did last.
    pub(crate) fn describe(&self, rank: usize) -> String {
        let Participation { host, group, .. } = self.participation;
        let own = self.participation.slot(self.participation.rank).newest().describe(group);
        format!("rank {} is in {own}; rank {rank}: {}", host.rank, host.control.last_activity(rank))
    }

    /// The rank that causes this wait, which may differ from the one that it waits for directly, and a description of
    /// the chain of waits.
    fn report(&self, wait: Wait) -> (usize, String) {
        let chain = self.chain(wait);
        (chain.cause(), self.participation.host.control.describe_chain(&chain, self.waited))
    }

    /// The error of a wait that was too long.
    fn given_up(&self, wait: Wait) -> CollectiveError {
        let host = self.participation.host;
        let chain = self.chain(wait);
        let (rank, report) = (chain.cause(), host.control.describe_chain(&chain, self.waited));
        match chain.link {
            Some(peer) => CollectiveError::Cut { rank, peer, report },
            None => CollectiveError::Missing { rank, report },
        }
    }

    fn cause(&self, wait: Wait) -> usize {
        self.chain(wait).cause()
    }

    /// Time of silence after which a rank does not wait.
    fn silence(&self) -> Duration {
        let [min, max] = Self::SILENCE;
        (self.participation.options.deadline / 2).clamp(min, max)
    }

    fn is_silent(&self, rank: usize) -> bool {
        let silent = self.participation.host.control.rank(rank).silent_for();
        silent.is_none_or(|silent| silent >= self.silence())
    }

    fn chain(&self, wait: Wait) -> Chain {
        let Participation { host, channel, .. } = self.participation;
        let silence = self.silence();
        // Within a host, ranks share memory.
        let apart = |one: usize, other: usize| !(host.ranks.contains(&one) && host.ranks.contains(&other));
        host.control.chain(channel, host.rank, wait, silence, &apart)
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        // The note of a rank that gives up stays: another one, whose time ends in this moment, follows it to the cause.
        if self.looked.is_some() && !self.gave_up {
            self.participation
                .host
                .control
                .slot(self.participation.channel, self.participation.host.rank)
                .note_wait(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use phalanx_tensor::Region;

    use crate::shared_memory::control::Control;
    use crate::shared_memory::host::Host;
    use crate::shared_memory::memory::Memory;
    use crate::shared_memory::options::Options;
    use crate::shared_memory::participation::Patience;

    /// Rank 0 waits for rank 1, which waits for rank 2. When rank 1 gives up first, rank 0 still finds rank 2.
    #[test]
    fn the_note_of_a_rank_that_gave_up_leads_to_the_cause() {
        let region = Region::anonymous(Control::bytes(3)).unwrap();
        let control = Arc::new(Control::create(region, 3, 2));
        let hosts = [0, 1, 2].map(|rank| Host::new(Arc::clone(&control), Memory::Threads, rank, 0..3));
        let options = Options { deadline: Duration::ZERO, ..Options::default() };
        let gives_up = |rank: usize, peer: usize| {
            let (host, patience) = (&*hosts[rank], Patience::CALLER);
            let (options, members, here) = (&options, &[0, 1, 2], &[true; 3]);
            let group = "data";
            let part =
                Participation { host, options, group, channel: 0, members, here, rank, pair: None, patience };
            let mut watch = Watch::new(part);
            watch.look_around(peer, 1).unwrap();
            watch.look_around(peer, 1).unwrap_err()
        };
        for (rank, peer) in [(1, 2), (0, 1)] {
            let error = gives_up(rank, peer);
            assert!(matches!(error, CollectiveError::Missing { rank: 2, .. }), "{error}");
        }
    }

    /// Rank 0 waits in a call of the group for rank 1, which is already in a message to it. On the same host they disagree.
    /// From another host, what ends the wait may still be under way.
    #[test]
    fn a_peer_of_another_host_may_be_ahead_for_a_moment() {
        for (ranks, is_here) in [(0..2, true), (0..1, false)] {
            let region = Region::anonymous(Control::bytes(2)).unwrap();
            let host = Host::new(Arc::new(Control::create(region, 2, 2)), Memory::Threads, 0, ranks);
            host.control.open_channel(0);
            host.control.pair(0, 1, 0).publish(1);
            let (host, options, patience) = (&*host, &Options::default(), Patience::CALLER);
            let (members, here, group) = (&[0, 1], &[true, is_here], "data");
            let part = Participation {
                host,
                options,
                group,
                channel: 0,
                members,
                here,
                rank: 0,
                pair: None,
                patience,
            };
            let mut watch = Watch::new(part);
            watch.look_around(1, 1).unwrap();
            assert_eq!(watch.look_around(1, 1).is_ok(), !is_here);
            std::thread::sleep(Watch::CROSSED);
            let error = watch.look_around(1, 1).unwrap_err();
            assert!(matches!(error, CollectiveError::Disagreement { .. }), "{error}");
            // It has ended the call for which this rank waits, so its bytes are under way.
            host.control.slot(0, 1).publish(1);
            watch.look_around(1, 1).unwrap();
        }
    }
}
