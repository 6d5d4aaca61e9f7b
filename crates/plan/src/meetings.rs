//! Meetings of ranks that are played together: a message arrives when its sender has sent it, and a collective of several of them begins when
//! the last has come. Ranks that are not played do as one of those that are, so nobody waits for them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::trace::{Collective, CollectiveOp};

/// How a rank meets others at a collective.
pub(crate) enum Meeting {
    /// It waits for nobody that is played.
    Alone,
    /// What it receives has not been sent yet.
    None,
    /// What it receives arrives at this time.
    Message(f64),
    /// Others take part: their meeting.
    With(Key),
}

/// The n-th collective of the ranks of a group.
pub(crate) type Key = (Arc<[usize]>, &'static str, usize);

/// The messages and collectives of ranks that are played.
pub(crate) struct Meetings {
    ranks: Vec<usize>,
    /// When messages arrive, in their order, by sender, receiver and tag.
    messages: HashMap<(usize, usize, Option<u64>), VecDeque<f64>>,
    /// The collectives that each rank has begun, by group.
    begun: HashMap<(usize, Arc<[usize]>, &'static str), usize>,
    /// When ranks have come to a collective.
    came: HashMap<Key, HashMap<usize, f64>>,
}

impl Meetings {
    pub(crate) fn of(ranks: Vec<usize>) -> Meetings {
        Meetings { ranks, messages: HashMap::new(), begun: HashMap::new(), came: HashMap::new() }
    }

    /// The meeting of the next collective of a rank.
    pub(crate) fn of_collective(&mut self, rank: usize, collective: &Collective) -> Meeting {
        match collective.op {
            CollectiveOp::Send => return Meeting::Alone,
            CollectiveOp::Recv => {
                let Some(from) = peer(collective).filter(|from| self.is_played(*from)) else {
                    return Meeting::Alone;
                };
                let sent = self.messages.entry((from, rank, collective.tag)).or_default();
                return sent.pop_front().map_or(Meeting::None, Meeting::Message);
            }
            _ => {}
        }
        if self.of_group(collective).count() < 2 {
            return Meeting::Alone;
        }
        let (members, group) = (&collective.members, collective.group);
        let number = self.begun.get(&(rank, members.clone(), group)).copied().unwrap_or(0);
        Meeting::With((members.clone(), group, number))
    }

    /// A rank comes to a collective at a time: when it begins, or `None` as long as others are missing.
    pub(crate) fn meet(&mut self, key: Key, rank: usize, at: f64) -> Option<f64> {
        let expected = match key.0.is_empty() {
            true => self.ranks.len(),
            false => self.ranks.iter().filter(|rank| key.0.contains(rank)).count(),
        };
        let came = self.came.entry(key.clone()).or_default();
        came.insert(rank, at);
        if came.len() < expected {
            return None;
        }
        let start = came.values().copied().fold(0.0, f64::max);
        *self.begun.entry((rank, key.0, key.1)).or_default() += 1;
        Some(start)
    }

    /// Notes when a message of a rank arrives.
    pub(crate) fn send(&mut self, rank: usize, collective: &Collective, arrives: f64) {
        if let Some(to) = peer(collective).filter(|to| self.is_played(*to)) {
            self.messages.entry((rank, to, collective.tag)).or_default().push_back(arrives);
        }
    }

    fn is_played(&self, rank: usize) -> bool {
        self.ranks.contains(&rank)
    }

    fn of_group<'a>(&'a self, collective: &'a Collective) -> impl Iterator<Item = &'a usize> {
        let members = &collective.members;
        self.ranks.iter().filter(move |rank| members.is_empty() || members.contains(rank))
    }
}

/// The world rank of the other end of a message.
fn peer(collective: &Collective) -> Option<usize> {
    let peer = collective.root?;
    if collective.members.is_empty() { Some(peer) } else { collective.members.get(peer).copied() }
}
