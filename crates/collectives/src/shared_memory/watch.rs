//! What a waiting rank looks at: has the job ended, does the peer's call agree, has the peer left, does
//! it wait for this rank in another call, has it been too long. Every error is put into words here.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::CollectiveError;
use crate::shared_memory::control::Life;
use crate::shared_memory::descriptor::{Descriptor, DescriptorCell};
use crate::shared_memory::meeting::Place;

/// One wait.
pub(crate) struct Watch<'a> {
    place: Place<'a>,
    /// When it first looked around: the wait has become slow.
    since: Option<Instant>,
    noticed: bool,
}

impl<'a> Watch<'a> {
    /// Longest sleep without looking around.
    pub(crate) const SLICE: Duration = Duration::from_millis(50);

    pub(crate) fn new(place: Place<'a>) -> Watch<'a> {
        Watch { place, since: None, noticed: false }
    }

    /// Member `q` has announced its call: where its buffer lies, if it is the same call.
    pub(crate) fn compare(&self, own: &Descriptor, q: usize) -> Result<*const u8, CollectiveError> {
        let Place { host, members, rank, pair, .. } = self.place;
        let cell = &self.place.slot(q).descriptors[own.parity()];
        let same = |peer: &Descriptor| match pair {
            None => own.agrees_with(peer),
            Some(_) => own.complements(rank, peer, q),
        };
        let Some(peer) = cell.read().filter(same) else { return Err(self.disagreement(q, cell)) };
        let needed = peer.offered_bytes(q, members.len());
        if peer.source_bytes < needed {
            let report = format!("{} bytes offered where {needed} are read", peer.source_bytes);
            return Err(CollectiveError::Unreadable { rank: members[q], report });
        }
        host.memory.find(&host.control, members[q], peer.source, needed)
    }

    /// An error if the wait for member `q` can only end badly. Checked after it was seen not to have come.
    pub(crate) fn look_around(&mut self, q: usize) -> Result<(), CollectiveError> {
        let Place { host, options, members, .. } = self.place;
        host.aborted()?;
        host.control.rank(host.rank).sign();
        let Some(since) = self.since else {
            self.since = Some(Instant::now());
            return Ok(());
        };
        if let Some(cell) = self.crossing(q) {
            return Err(self.disagreement(q, cell));
        }
        if host.control.rank(members[q]).life.load(Ordering::Acquire) == Life::LEFT {
            return Err(CollectiveError::Left { rank: members[q], report: self.report(q, since.elapsed()) });
        }
        let waited = since.elapsed();
        if waited >= options.deadline {
            return Err(CollectiveError::Missing { rank: members[q], report: self.report(q, waited) });
        }
        if waited >= options.notice_after && !self.noticed {
            self.noticed = true;
            (options.notice)(&self.report(q, waited));
        }
        Ok(())
    }

    /// The call in which member `q` waits for this rank while this rank waits for it in another: one of
    /// the whole group against a send or recv. Both run their calls in order, so neither can come.
    fn crossing(&self, q: usize) -> Option<&'a DescriptorCell> {
        let pair = if self.place.pair.is_some() { None } else { Some(q) };
        let other = Place { pair, ..self.place };
        let (own, theirs) = (other.slot(self.place.rank), other.slot(q));
        // This rank is between calls there, so a peer ahead of it is inside one.
        let ahead = theirs.counter().wrapping_sub(own.counter()) as i32 > 0;
        ahead.then(|| theirs.newest())
    }

    fn disagreement(&self, q: usize, theirs: &DescriptorCell) -> CollectiveError {
        let Place { members, rank, group, .. } = self.place;
        let own = self.place.slot(rank).newest().describe(group);
        let theirs = theirs.describe(&self.place.slot_of_group(q).name.read());
        let report = format!("rank {}: {own}; rank {}: {theirs}", members[rank], members[q]);
        CollectiveError::Disagreement { report }
    }

    fn report(&self, q: usize, waited: Duration) -> String {
        let Place { host, members, rank, group, .. } = self.place;
        let own = self.place.slot(rank).newest().describe(group);
        format!(
            "rank {} waits {:.1} s for rank {} in {own}; rank {}: {}",
            members[rank],
            waited.as_secs_f64(),
            members[q],
            members[q],
            host.control.last_activity(members[q])
        )
    }
}
