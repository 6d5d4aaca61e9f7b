//! Finds the rank that keeps the others waiting: the notes in the control block form a graph of which rank waits for
//! which.
//!
//! When rank 1 stops, rank 0 may wait for rank 2, which waits for rank 1: naming the direct peer would be wrong. So a
//! rank writes down in each channel whom it waits for, and up to which count of that peer's counter. Whoever gives up
//! follows these notes from rank to rank. The walk ends at the rank that is silent (a waiting rank gives a sign of life
//! every 50 ms, so one that is noted as waiting and is silent has been stopped), at one that waits for nobody, or between two
//! that live and wait for what the other has sent: then what connects their hosts is the cause.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::shared_memory::control::{ChannelSlot, Control};
use crate::shared_memory::rank_cell::Life;

/// Maximum number of ranks outside the chain whose waits a report lists.
const MAX_OTHERS: usize = 16;

/// A wait of a rank for a peer in a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    /// World rank.
    pub(crate) peer: usize,
    /// True if it waits in a send or recv with the peer, and not in a call of the whole group.
    pub(crate) pair: bool,
    /// The wait ends when the peer's counter reaches this value.
    pub(crate) until: u32,
}

impl Wait {
    /// Packs the wait into one word, so that a reader never sees halves of two waits; 0 means no wait.
    fn pack(self) -> u64 {
        u64::from(self.until) << 32 | (self.peer as u64) << 2 | u64::from(self.pair) << 1 | 1
    }

    fn unpack(word: u64) -> Option<Wait> {
        let peer = (word as u32 >> 2) as usize;
        (word & 1 == 1).then_some(Wait { peer, pair: word & 2 == 2, until: (word >> 32) as u32 })
    }
}

impl ChannelSlot {
    /// Notes the wait of this slot's rank in the channel; `None`: it no longer waits.
    pub(crate) fn note_wait(&self, wait: Option<Wait>) {
        self.wait.store(wait.map_or(0, Wait::pack), Ordering::Relaxed);
    }
}

/// The chain of waits from a rank that gives up to the rank that is the cause.
pub(crate) struct Chain {
    /// The ranks in order: the first is the one that gives up, the last is the cause.
    pub(crate) ranks: Vec<usize>,
    /// For each rank that waits: a description of the call in which it does.
    calls: Vec<String>,
    /// The rank for which the last one waits, though that one waits for it, too, or has sent what it lacks: nothing passes between them.
    pub(crate) link: Option<usize>,
}

impl Chain {
    /// The rank at the end, which does not wait for another, or in vain ([`Chain::link`]).
    pub(crate) fn cause(&self) -> usize {
        self.ranks[self.ranks.len() - 1]
    }
}

impl Control {
    /// The wait that `rank` has noted in `channel`, whether or not it is over. The numbers come from the rank: checked.
    pub(crate) fn noted(&self, channel: usize, rank: usize) -> Option<Wait> {
        let wait = Wait::unpack(self.slot(channel, rank).wait.load(Ordering::Relaxed));
        wait.filter(|wait| wait.peer < self.world_size())
    }

    /// The peer for which `rank` waits in `channel`, if that peer has indeed not arrived. The numbers come from the
    /// peer, so they are checked.
    fn waits(&self, channel: usize, rank: usize) -> Option<(usize, Wait)> {
        let wait = self.noted(channel, rank)?;
        (!self.has_come(channel, rank, wait)).then_some((channel, wait))
    }

    /// Returns whether the peer has reached the count for which `rank` waits.
    fn has_come(&self, channel: usize, rank: usize, wait: Wait) -> bool {
        let slot = self.wait_slot(channel, wait.peer, rank, wait.pair);
        slot.counter().wrapping_sub(wait.until) as i32 >= 0
    }

    /// The slot of `rank` in calls with `peer`.
    fn wait_slot(&self, channel: usize, rank: usize, peer: usize, pair: bool) -> &ChannelSlot {
        if pair { self.pair(channel, rank, peer) } else { self.slot(channel, rank) }
    }

    /// A description of the call in which `rank` waits.
    fn waits_in(&self, channel: usize, rank: usize, wait: Wait) -> String {
        let slot = self.wait_slot(channel, rank, wait.peer, wait.pair);
        slot.newest().describe(&self.slot(channel, rank).name.read())
    }

    /// The wait that keeps `rank` from its next call in `channel`: an earlier call in the same channel, or else the
    /// wait of its main thread.
    fn held_up(&self, channel: usize, rank: usize) -> Option<(usize, Wait)> {
        self.waits(channel, rank)
            .or_else(|| self.rank(rank).blocked_on().and_then(|channel| self.waits(channel, rank)))
    }

    /// Follows the waits, beginning with `rank`, which waits in `channel`. A rank that has been silent for `silence` is
    /// taken as the cause. `apart` says whether two ranks may be on different hosts, where what one has sent may not arrive.
    pub(crate) fn chain(
        &self,
        channel: usize,
        rank: usize,
        wait: Wait,
        silence: Duration,
        apart: &dyn Fn(usize, usize) -> bool,
    ) -> Chain {
        let mut chain = Chain { ranks: vec![rank], calls: Vec::new(), link: None };
        // A rank may occur twice: it waits for a message in the background, and the sender waits for a call that the
        // rank's main thread has not made yet. Only a rank that is expected twice in the same channel forms a cycle.
        let mut to_come = Vec::new();
        let mut next = Some((channel, wait));
        while let Some((channel, wait)) = next {
            let last = chain.ranks[chain.ranks.len() - 1];
            chain.calls.push(self.waits_in(channel, last, wait));
            let cell = self.rank(wait.peer);
            let gone = cell.life.load(Ordering::Acquire) != Life::JOINED;
            let silent = cell.silent_for().is_none_or(|silent| silent >= silence);
            let is_apart = apart(last, wait.peer);
            if !gone && !silent && is_apart && self.has_come(channel, last, wait) {
                chain.link = Some(wait.peer);
                return chain;
            }
            chain.ranks.push(wait.peer);
            if let Some(first) = to_come.iter().position(|known| *known == (channel, wait.peer)) {
                // Index 0 of the chain is the rank that gives up, so indices shift by one.
                self.cut_at_oldest(&mut chain, first + 1, is_apart);
                return chain;
            }
            to_come.push((channel, wait.peer));
            let noted = || self.noted(channel, wait.peer).map(|wait| (channel, wait));
            next = if gone || silent { None } else { self.held_up(channel, wait.peer).or_else(noted) };
            next = next.filter(|(channel, next)| {
                apart(wait.peer, next.peer) || !self.has_come(*channel, wait.peer, *next)
            });
        }
        chain
    }

    /// Cuts a cycle of ranks that wait for each other, all of which live. If there are two, which are apart, nothing passes between
    /// them; otherwise one has an outdated note: the one that has been silent longest is the cause. The cycle begins at index `first`
    /// of the chain and closes with its last rank.
    fn cut_at_oldest(&self, chain: &mut Chain, first: usize, are_apart: bool) {
        let circle = first..chain.ranks.len() - 1;
        if circle.len() == 2 && are_apart {
            chain.link = Some(chain.ranks[first + 1]);
            chain.ranks.truncate(first + 1);
            chain.calls.truncate(first + 1);
            return;
        }
        let silent = |place: &usize| self.rank(chain.ranks[*place]).silent_for();
        let oldest = circle.max_by_key(silent).unwrap_or(first);
        chain.ranks.truncate(oldest + 1);
        chain.calls.truncate(oldest);
    }

    /// Describes the chain, what its last rank did last, and what the other ranks wait for. `waited` is the time that
    /// the first rank has waited.
    pub(crate) fn describe_chain(&self, chain: &Chain, waited: Duration) -> String {
        let mut text = String::new();
        let peers = chain.ranks.iter().skip(1).chain(&chain.link);
        for ((rank, peer), call) in chain.ranks.iter().zip(peers).zip(&chain.calls) {
            let time =
                if text.is_empty() { format!(" {:.1} s", waited.as_secs_f64()) } else { String::new() };
            text.push_str(&format!("rank {rank} waits{time} for rank {peer} in {call}; "));
        }
        let last = chain.link.unwrap_or(chain.cause());
        text.push_str(&format!("rank {last}: {}", self.last_activity(last)));
        let is_other = |rank: &usize| !chain.ranks.contains(rank) && *rank != last;
        let others: Vec<usize> = (0..self.world_size()).filter(is_other).collect();
        for rank in others.iter().take(MAX_OTHERS) {
            text.push_str(&format!("; {}", self.describe_wait(*rank)));
        }
        if others.len() > MAX_OTHERS {
            text.push_str(&format!("; and {} more ranks", others.len() - MAX_OTHERS));
        }
        text
    }

    /// Describes what a rank waits for, or else what it did last.
    fn describe_wait(&self, rank: usize) -> String {
        let blocked = self.rank(rank).blocked_on().and_then(|channel| self.waits(channel, rank));
        match blocked {
            Some((channel, wait)) => {
                format!("rank {rank} waits for rank {} in {}", wait.peer, self.waits_in(channel, rank, wait))
            }
            None => format!("rank {rank}: {}", self.last_activity(rank)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_tensor::Region;

    const SILENCE: Duration = Duration::from_secs(60);
    const TOGETHER: &dyn Fn(usize, usize) -> bool = &|_, _| false;
    const APART: &dyn Fn(usize, usize) -> bool = &|_, _| true;

    fn control(world: usize) -> Control {
        let control = Control::create(Region::anonymous(Control::bytes(world)).unwrap(), world, 2);
        for rank in 0..world {
            control.rank(rank).life.store(Life::JOINED, Ordering::Release);
            control.rank(rank).sign();
        }
        control
    }

    /// Rank `rank` waits in `channel` for `peer` to reach count 1.
    fn note(control: &Control, channel: usize, rank: usize, peer: usize) -> Wait {
        let wait = Wait { peer, pair: false, until: 1 };
        control.slot(channel, rank).note_wait(Some(wait));
        control.rank(rank).block_on(Some(channel));
        wait
    }

    #[test]
    fn a_wait_fits_in_a_word() {
        for wait in [
            Wait { peer: 0, pair: false, until: 0 },
            Wait { peer: 1023, pair: true, until: u32::MAX },
            Wait { peer: 7, pair: true, until: 5 },
        ] {
            assert_eq!(Wait::unpack(wait.pack()), Some(wait));
        }
        assert_eq!(Wait::unpack(0), None);
    }

    /// Rank 0 waits for 1, which waits in another channel for 2, which does not wait.
    #[test]
    fn the_last_of_a_chain_is_the_cause() {
        let control = control(4);
        let first = note(&control, 0, 0, 1);
        note(&control, 1, 1, 2);
        assert_eq!(control.chain(0, 0, first, SILENCE, TOGETHER).ranks, [0, 1, 2]);
        // Rank 2 has noted a wait for 3, which has arrived meanwhile, so the chain ends at 2.
        note(&control, 2, 2, 3);
        control.slot(2, 3).publish(1);
        assert_eq!(control.chain(0, 0, first, SILENCE, TOGETHER).ranks, [0, 1, 2]);
        // Now it really waits.
        control.slot(2, 2).note_wait(Some(Wait { peer: 3, pair: false, until: 2 }));
        let chain = control.chain(0, 0, first, SILENCE, TOGETHER);
        assert_eq!(chain.ranks, [0, 1, 2, 3]);
        let text = control.describe_chain(&chain, Duration::from_secs(2));
        assert!(
            text.contains("rank 0 waits 2.0 s for rank 1 in") && text.contains("rank 2 waits for rank 3 in")
        );
    }

    /// A rank that waits and gives no sign of life has been stopped, whatever it waits for.
    #[test]
    fn a_silent_rank_is_the_cause() {
        let control = control(3);
        let first = note(&control, 0, 0, 1);
        note(&control, 0, 1, 2);
        assert_eq!(control.chain(0, 0, first, SILENCE, TOGETHER).ranks, [0, 1, 2]);
        assert_eq!(control.chain(0, 0, first, Duration::ZERO, TOGETHER).ranks, [0, 1]);
    }

    /// Rank 0 waits in the background for 1. Rank 1 waits for a result that 0 has not computed, because its main thread
    /// waits for 2.
    #[test]
    fn a_rank_that_is_held_up_by_its_own_main_thread_is_no_circle() {
        let control = control(3);
        let wait = |peer| Wait { peer, pair: true, until: 1 };
        control.slot(4, 0).note_wait(Some(wait(1)));
        control.slot(3, 1).note_wait(Some(wait(0)));
        control.rank(1).block_on(Some(3));
        note(&control, 5, 0, 2);
        assert_eq!(control.chain(4, 0, wait(1), SILENCE, TOGETHER).ranks, [0, 1, 0, 2]);
    }

    #[test]
    fn of_a_circle_the_rank_that_has_been_silent_longest_is_the_cause() {
        for oldest in 0..3 {
            let control = control(3);
            let first = note(&control, 0, 0, 1);
            note(&control, 1, 1, 2);
            note(&control, 2, 2, 0);
            std::thread::sleep(Duration::from_millis(5));
            (0..3).filter(|rank| *rank != oldest).for_each(|rank| control.rank(rank).sign());
            let chain = control.chain(0, 0, first, SILENCE, TOGETHER);
            assert_eq!(chain.ranks.last(), Some(&oldest), "{:?}", chain.ranks);
        }
    }

    /// Ranks 1 and 2, of two hosts, wait for each other; or rank 1 has sent all that rank 2 waits for. Whoever follows the waits finds the
    /// link between them, and the rank that is silent where one is.
    #[test]
    fn between_two_ranks_that_live_the_link_is_the_cause() {
        let link = |control: &Control, rank: usize, wait: Wait, silence| {
            let chain = control.chain(0, rank, wait, silence, APART);
            let text = control.describe_chain(&chain, Duration::from_secs(3));
            assert_eq!(
                text.matches("waits 3.0 s for").count(),
                usize::from(chain.ranks.len() > 1 || chain.link.is_some()),
                "{text}"
            );
            match chain.link {
                Some(peer) => [chain.cause().min(peer), chain.cause().max(peer)].to_vec(),
                None => vec![chain.cause()],
            }
        };
        let control = control(3);
        let (from_0, from_1, from_2) =
            (note(&control, 0, 0, 1), note(&control, 0, 1, 2), note(&control, 0, 2, 1));
        assert_eq!(link(&control, 1, from_1, SILENCE), [1, 2]);
        assert_eq!(link(&control, 2, from_2, SILENCE), [1, 2]);
        assert_eq!(link(&control, 0, from_0, SILENCE), [1, 2]);
        assert_eq!(link(&control, 0, from_0, Duration::ZERO), [1]);
        // Rank 1 is over with the call, and waits for nobody.
        control.slot(0, 1).note_wait(None);
        control.slot(0, 1).publish(1);
        assert_eq!(link(&control, 2, from_2, SILENCE), [1, 2]);
        assert_eq!(link(&control, 2, from_2, Duration::ZERO), [1]);
        let from_0 = note(&control, 0, 0, 2);
        assert_eq!(link(&control, 0, from_0, SILENCE), [1, 2]);
    }
}
