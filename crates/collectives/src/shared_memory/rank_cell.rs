//! `RankCell`: the state that each rank publishes in the control block.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::shared_memory::clock::now_ms;
use crate::shared_memory::word::Word;

/// Groups that one endpoint can make: a mesh has some for the world and each axis, and two for each neighbour in
/// the pipeline. The block is sparse, so channels that nobody opens cost addresses, not memory.
pub(crate) const CHANNELS: usize = 64;
/// The state of one rank: for error messages and for the launcher.
#[repr(C, align(64))]
pub(crate) struct RankCell {
    /// One of the values of [`Life`]; 0 before the rank joins.
    pub(crate) life: AtomicU32,
    /// 1 when the rank has done its work: from then on its process may end.
    done: AtomicU32,
    /// Packed [`LastCall`]; 0 for none.
    last_call: AtomicU64,
    /// 1 + the step that was noted last; 0 for none.
    pub(crate) step: AtomicU64,
    /// Monotonic milliseconds of the last sign of life.
    heartbeat_ms: AtomicU64,
    /// 1 + the channel of the call that the rank's main thread waits for; 0 while it waits for none.
    blocked_on: AtomicU64,
    /// Bytes of the rank's arena; 0 until it has one.
    pub(crate) arena_bytes: AtomicU64,
    /// Advances while the launcher sees the rank work: compute, make calls, wait for a disk.
    work: AtomicU64,
}

/// Identifies the descriptor that a rank wrote last.
#[derive(Clone, Copy)]
pub(crate) struct LastCall {
    pub(crate) channel: usize,
    /// World rank of the other end of a send or recv.
    pub(crate) peer: Option<usize>,
    pub(crate) parity: usize,
}

impl RankCell {
    /// Notes that a call begins, which is also a sign of life.
    pub(crate) fn begin(&self, call: LastCall, now_ns: u64) {
        let peer = call.peer.map_or(0, |p| p as u64 + 1);
        let packed = (call.channel as u64 + 1) << 32 | peer << 1 | call.parity as u64;
        self.last_call.store(packed, Ordering::Relaxed);
        self.heartbeat_ms.store(now_ns / 1_000_000, Ordering::Relaxed);
    }

    /// Gives a sign of life.
    pub(crate) fn sign(&self) {
        self.heartbeat_ms.store(now_ms(), Ordering::Relaxed);
    }

    /// Time since the last sign of life; None before the first, which the rank gives when it joins.
    pub(crate) fn silent_for(&self) -> Option<Duration> {
        let last_ms = self.heartbeat_ms.load(Ordering::Relaxed);
        (last_ms != 0).then(|| Duration::from_millis(now_ms().saturating_sub(last_ms)))
    }

    /// Notes that the rank was seen to work.
    pub(crate) fn note_work(&self) {
        self.work.fetch_add(1, Ordering::Relaxed);
    }

    /// A number that changes while the rank works.
    pub(crate) fn work(&self) -> u64 {
        self.work.load(Ordering::Relaxed)
    }

    /// Notes that the rank has done its work.
    pub(crate) fn finish(&self) {
        self.done.store(1, Ordering::Release);
    }

    /// Returns whether the rank has done its work.
    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire) != 0
    }

    /// Notes that the main thread begins to wait for a call of `channel`, or (None) that the wait is over.
    pub(crate) fn block_on(&self, channel: Option<usize>) {
        self.blocked_on.store(channel.map_or(0, |channel| channel as u64 + 1), Ordering::Relaxed);
    }

    /// The channel of the call that the main thread waits for. The number comes from the peer: checked.
    pub(crate) fn blocked_on(&self) -> Option<usize> {
        let channel = self.blocked_on.load(Ordering::Relaxed).checked_sub(1)? as usize;
        (channel < CHANNELS).then_some(channel)
    }

    /// The channel of the newest call, and the other end of a message. The numbers come from the peer: checked.
    pub(crate) fn last_place(&self, world_size: usize) -> Option<(usize, Option<usize>)> {
        let LastCall { channel, peer, .. } = self.last_call()?;
        (channel < CHANNELS && peer.is_none_or(|peer| peer < world_size)).then_some((channel, peer))
    }

    /// Visits the words that other hosts need to report on the rank.
    pub(crate) fn for_each_word(&self, mut visit: impl FnMut(Word)) {
        visit(Word::Four(&self.life));
        visit(Word::Four(&self.done));
        [&self.last_call, &self.step, &self.blocked_on, &self.work]
            .into_iter()
            .for_each(|word| visit(Word::Eight(word)));
    }

    /// Notes for a rank of another host how long it has given no sign of life; `u64::MAX`: it has not joined.
    pub(crate) fn set_silent(&self, silent_ms: u64) {
        if silent_ms != u64::MAX {
            self.heartbeat_ms.store(now_ms().saturating_sub(silent_ms).max(1), Ordering::Relaxed);
        }
    }

    /// The newest call.
    pub(crate) fn last_call(&self) -> Option<LastCall> {
        let packed = self.last_call.load(Ordering::Relaxed);
        let channel = (packed >> 32).checked_sub(1)? as usize;
        let peer = (packed as u32 >> 1).checked_sub(1).map(|p| p as usize);
        Some(LastCall { channel, peer, parity: (packed & 1) as usize })
    }
}

/// Values of [`RankCell::life`].
pub(crate) struct Life;
impl Life {
    pub(crate) const JOINED: u32 = 1;
    pub(crate) const LEFT: u32 = 2;
}
