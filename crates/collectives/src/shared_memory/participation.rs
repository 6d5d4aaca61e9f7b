//! One rank's part in one call of a group, and how long it spins before it sleeps.

use std::time::Duration;

use crate::shared_memory::control::ChannelSlot;
use crate::shared_memory::host::Host;
use crate::shared_memory::options::Options;

/// Effort of a wait before it sleeps: first a number of spins, then a time of yielding the core to other threads. On a busy
/// machine a yield returns late, so yields are limited by time and not by number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    pub(crate) spins: u32,
    pub(crate) yields: Duration,
}

impl Patience {
    /// For a caller that has nothing else to do: sleeping and waking would cost more than the wait.
    pub(crate) const CALLER: Patience = Patience { spins: 100, yields: Duration::from_micros(600) };
    /// For the group's own thread, while this rank computes: a sleeping thread gets a core as soon as it is woken, a
    /// yielding one waits for its turn.
    pub(crate) const OWNER: Patience = Patience { spins: 1000, yields: Duration::ZERO };
    /// Used when there are more members than cores, because the peer may need this core.
    pub(crate) const CROWDED_SPINS: u32 = 20;
}

/// One rank's part in one call of a group: which rank of which group it is, and how it waits.
#[derive(Clone, Copy)]
pub(crate) struct Participation<'a> {
    pub(crate) host: &'a Host,
    pub(crate) options: &'a Options,
    pub(crate) group: &'static str,
    pub(crate) channel: usize,
    /// World ranks of the group, by group rank.
    pub(crate) members: &'a [usize],
    /// Which members run on this host, by group rank.
    pub(crate) here: &'a [bool],
    /// This rank's group rank.
    pub(crate) rank: usize,
    /// The other end of a send or recv; None for a call of all members.
    pub(crate) pair: Option<usize>,
    pub(crate) patience: Patience,
}

impl<'a> Participation<'a> {
    /// The slot of member `q` in this call.
    pub(crate) fn slot(&self, q: usize) -> &'a ChannelSlot {
        let Participation { host, channel, members, rank, pair, .. } = *self;
        match pair {
            None => host.control.slot(channel, members[q]),
            Some(peer) => {
                let other = if q == rank { peer } else { rank };
                host.control.pair(channel, members[q], members[other])
            }
        }
    }

    /// The slot of member `q` in collectives of the whole group.
    pub(crate) fn slot_of_group(&self, q: usize) -> &'a ChannelSlot {
        self.host.control.slot(self.channel, self.members[q])
    }
}
