//! The control block: the memory through which ranks of one host see each other's state.
//!
//! One mapping, all atomics, valid when zero: a header with the abort record, a cell per rank (what it
//! does, for people), then for every channel (a group) a slot per rank and a slot per ordered pair of
//! ranks, then a flight record per rank. A slot is written by its owner alone: a counter on which peers sleep, and two descriptors, of
//! which the older may still be read while the newer is written.
//!
//! Memory order: a descriptor, or data in an arena, is written before its owner advances the counter
//! (sequentially consistent) and read after a peer has seen the counter (acquire).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use phalanx_plan::trace::Site;
use phalanx_tensor::Region;

use crate::error::Blame;
use crate::shared_memory::counter::{Counter, WrittenOnce};
use crate::shared_memory::descriptor::{Descriptor, DescriptorCell};
use crate::shared_memory::flight::{FlightRecord, key};
use crate::shared_memory::rank_cell::{CHANNELS, LastCall, Life, RankCell};
use crate::shared_memory::text::Text;
use crate::shared_memory::word::Word;

/// Maximum number of ranks of a job. It limits the size of the block and is checked on joining.
pub const MAX_WORLD: usize = 1024;

const MAGIC: u64 = u64::from_le_bytes(*b"PHALANX1");

/// Why the job ended.
#[repr(C, align(64))]
pub(crate) struct AbortRecord {
    written: WrittenOnce,
    rank: AtomicU32,
    /// A [`Blame`]: 0 is the rank, 1 a disagreement, and from 2 on the link to the rank with the number that is 2 less.
    blame: AtomicU32,
    reason: Text<512>,
}

/// Content of the abort record.
#[derive(Clone)]
pub(crate) struct Abort {
    pub(crate) rank: usize,
    pub(crate) blame: Blame,
    pub(crate) reason: String,
}

#[repr(C, align(64))]
struct ControlHeader {
    magic: AtomicU64,
    world: AtomicU32,
    cores: AtomicU32,
    /// Number of channels that some rank has opened; they are numbered from 0.
    channels: AtomicU32,
    abort: AbortRecord,
}

/// The name of a group.
pub(crate) type GroupName = Text<4>;

/// Data that one rank shares in a channel. Counter and sleepers share the cache line that waiting peers watch.
#[repr(C, align(128))]
pub(crate) struct ChannelSlot {
    /// Advances by one at every step of every collective, wrapping.
    counter: Counter,
    /// Used in the slot for calls of the whole group: the rank for which this one waits in this channel, in a call of
    /// the group or in a message. Packed ([`Wait`](super::waits::Wait)).
    pub(crate) wait: AtomicU64,
    /// Descriptors of the calls with even and with odd numbers.
    pub(crate) descriptors: [DescriptorCell; 2],
    /// Which call sites these have, for the owner.
    site_keys: [AtomicU64; 2],
    /// The group's name in this rank.
    pub(crate) name: GroupName,
}

impl ChannelSlot {
    /// The counter of the rank's steps.
    pub(crate) fn counter(&self) -> u32 {
        self.counter.value()
    }

    /// Writes the owner's descriptor of a call, before it advances the counter.
    pub(crate) fn describe(&self, call: &Descriptor, site: Site) {
        let (cell, known, key) =
            (&self.descriptors[call.parity()], &self.site_keys[call.parity()], key(site));
        cell.write_numbers(call);
        // Most calls of a group have the site of the one before last.
        if known.load(Ordering::Relaxed) != key {
            cell.write_site(site);
            known.store(key, Ordering::Relaxed);
        }
    }

    /// Visits the words that other hosts need to report on the slot's rank.
    pub(crate) fn for_each_word(&self, mut visit: impl FnMut(Word)) {
        visit(Word::Four(self.counter.word()));
        visit(Word::Eight(&self.wait));
        self.descriptors.iter().for_each(|descriptor| descriptor.for_each_word(&mut visit));
        self.name.for_each_word(&mut visit);
    }

    /// The descriptor that was written last.
    pub(crate) fn newest(&self) -> &DescriptorCell {
        let [even, odd] = &self.descriptors;
        if even.sequence() > odd.sequence() { even } else { odd }
    }

    /// Advances the counter to `value` and wakes the threads that sleep on it.
    pub(crate) fn publish(&self, value: u32) {
        self.counter.publish(value);
    }

    /// Sleeps while the counter is at `seen`, for `limit` at most, or until [`Control::wake_all`].
    pub(crate) fn sleep(&self, seen: u32, limit: Duration) {
        self.counter.sleep(seen, limit);
    }
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The mapped block, behind safe accessors.
pub(crate) struct Control {
    region: Region,
    world: usize,
}

const RANKS_AT: usize = size_of::<ControlHeader>().next_multiple_of(128);

const fn slots_at(world: usize) -> usize {
    (RANKS_AT + world * size_of::<RankCell>()).next_multiple_of(128)
}

const fn flights_at(world: usize) -> usize {
    slots_at(world) + CHANNELS * (world + world * world) * size_of::<ChannelSlot>()
}

impl Control {
    /// Bytes of the block of a world.
    pub(crate) fn bytes(world: usize) -> usize {
        flights_at(world) + world * size_of::<FlightRecord>()
    }

    /// Fills in a zeroed block.
    pub(crate) fn create(region: Region, world: usize, cores: usize) -> Control {
        assert!((1..=MAX_WORLD).contains(&world), "{world} ranks; the maximum is {MAX_WORLD}");
        assert!(region.bytes() >= Control::bytes(world));
        let control = Control { region, world };
        let header = control.header();
        header.world.store(world as u32, Ordering::Relaxed);
        header.cores.store(cores as u32, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        control
    }

    /// Opens a block that a launcher created for `world` ranks.
    pub(crate) fn open(region: Region, world: usize) -> std::io::Result<Control> {
        let invalid = |text: String| std::io::Error::new(std::io::ErrorKind::InvalidData, text);
        if !(1..=MAX_WORLD).contains(&world) || region.bytes() < Control::bytes(world) {
            return Err(invalid(format!(
                "a control block of {} bytes is too small for {world} ranks",
                region.bytes()
            )));
        }
        let control = Control { region, world };
        let magic = control.header().magic.load(Ordering::Acquire);
        let made_for = control.header().world.load(Ordering::Relaxed) as usize;
        if magic != MAGIC || made_for != world {
            return Err(invalid(format!("the control block was made for {made_for} ranks, not {world}")));
        }
        Ok(control)
    }

    pub(crate) fn world_size(&self) -> usize {
        self.world
    }

    /// Cores of the host, as counted by the creator of the block, so that all ranks use the same number.
    pub(crate) fn cores(&self) -> usize {
        self.header().cores.load(Ordering::Relaxed) as usize
    }

    /// The `index`-th T of a table at `offset`.
    fn at<T>(&self, offset: usize, index: usize) -> &T {
        let start = offset + index * size_of::<T>();
        assert!(start + size_of::<T>() <= self.region.bytes() && start.is_multiple_of(align_of::<T>()));
        // SAFETY: the range lies in the mapping (asserted), which lives as long as self and starts at a
        // page; T (private callers: Header, RankCell, Slot, FlightRecord) is made of atomics only, for which every
        // bit pattern is valid and concurrent writes by other processes are defined.
        unsafe { &*self.region.base().add(start).cast::<T>() }
    }

    fn header(&self) -> &ControlHeader {
        self.at(0, 0)
    }

    pub(crate) fn rank(&self, rank: usize) -> &RankCell {
        assert!(rank < self.world);
        self.at(RANKS_AT, rank)
    }

    /// Notes that a rank will use a channel, before it does.
    pub(crate) fn open_channel(&self, channel: usize) {
        assert!(channel < CHANNELS);
        self.header().channels.fetch_max(channel as u32 + 1, Ordering::SeqCst);
    }

    /// Number of channels that some rank of this host has opened.
    pub(crate) fn open_channels(&self) -> usize {
        (self.header().channels.load(Ordering::SeqCst) as usize).min(CHANNELS)
    }

    /// The slot of `rank` for collectives of a channel.
    pub(crate) fn slot(&self, channel: usize, rank: usize) -> &ChannelSlot {
        assert!(channel < CHANNELS && rank < self.world);
        self.at(slots_at(self.world), channel * (self.world + self.world * self.world) + rank)
    }

    /// The slot of `rank` for sends and receives between it and `peer`.
    pub(crate) fn pair(&self, channel: usize, rank: usize, peer: usize) -> &ChannelSlot {
        assert!(channel < CHANNELS && rank < self.world && peer < self.world);
        let row = channel * (self.world + self.world * self.world) + (1 + rank) * self.world;
        self.at(slots_at(self.world), row + peer)
    }

    /// The flight record of `rank`.
    pub(crate) fn flight(&self, rank: usize) -> &FlightRecord {
        assert!(rank < self.world);
        self.at(flights_at(self.world), rank)
    }

    /// Ends the job for everybody; only the first reason stays.
    pub(crate) fn abort(&self, abort: Abort) {
        let record = &self.header().abort;
        record.written.write(|| {
            record.rank.store(abort.rank as u32, Ordering::Relaxed);
            let blame = match abort.blame {
                Blame::Rank => 0,
                Blame::Disagreement => 1,
                Blame::Link { peer } => u32::from(peer) + 2,
            };
            record.blame.store(blame, Ordering::Relaxed);
            record.reason.write(&abort.reason, 0);
        });
        self.wake_all();
    }

    /// Sleeps until the job ends, for `limit` at most. Returns whether it has ended.
    pub(crate) fn wait_aborted(&self, limit: Duration) -> bool {
        let start = Instant::now();
        while !self.is_aborted() {
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return false;
            }
            // Whether woken, timed out or interrupted, the loop checks again.
            self.header().abort.written.sleep(left);
        }
        true
    }

    /// The reason why the job ended, if it did.
    pub(crate) fn aborted(&self) -> Option<Abort> {
        let record = &self.header().abort;
        if !record.written.has_begun() {
            return None;
        }
        // The writer may be between its two steps, or may have died there, so the wait is bounded.
        for _ in 0..100 {
            if record.written.is_complete() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Some(Abort {
            rank: record.rank.load(Ordering::Relaxed) as usize,
            blame: match record.blame.load(Ordering::Relaxed) {
                0 => Blame::Rank,
                1 => Blame::Disagreement,
                link => Blame::Link { peer: (link - 2) as u16 },
            },
            reason: record.reason.read(),
        })
    }

    /// Returns whether the job has ended. This check is cheap.
    pub(crate) fn is_aborted(&self) -> bool {
        self.header().abort.written.has_begun()
    }

    /// Wakes every sleeper, so that it checks whether the job has ended. Channels that nobody opened are not touched: they take no memory.
    pub(crate) fn wake_all(&self) {
        for channel in 0..self.open_channels() {
            for rank in 0..self.world {
                self.slot(channel, rank).counter.wake_sleepers();
                for peer in 0..self.world {
                    self.pair(channel, rank, peer).counter.wake_sleepers();
                }
            }
        }
    }

    /// A description of what `rank` did last, for error messages.
    pub(crate) fn last_activity(&self, rank: usize) -> String {
        let cell = self.rank(rank);
        let life = cell.life.load(Ordering::Acquire);
        if life == 0 {
            return "has not joined".to_string();
        }
        let step = match cell.step.load(Ordering::Relaxed) {
            0 => String::new(),
            step => format!("step {}, ", step - 1),
        };
        let call = self.last_call(rank).unwrap_or_else(|| "no collective yet".to_string());
        let silent_s = cell.silent_for().unwrap_or_default().as_secs_f64();
        let left = match (cell.is_done(), life) {
            (true, _) => ", its work is done",
            (false, Life::LEFT) => ", then left",
            (false, _) => "",
        };
        format!("{step}{call}{left}; last sign of life {silent_s:.1} s ago")
    }

    /// The newest call of `rank`; None before the first. The numbers come from the peer: checked.
    fn last_call(&self, rank: usize) -> Option<String> {
        let LastCall { channel, peer, parity } = self.rank(rank).last_call()?;
        if channel >= CHANNELS || peer.is_some_and(|p| p >= self.world) {
            return None;
        }
        let slot = peer.map_or(self.slot(channel, rank), |peer| self.pair(channel, rank, peer));
        Some(slot.descriptors[parity].describe(&self.slot(channel, rank).name.read()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_a_block_do_not_overlap() {
        let world = 3;
        let region = Region::anonymous(Control::bytes(world)).unwrap();
        let control = Control::create(region, world, 2);
        let mut number = 0;
        let mut all = Vec::new();
        for channel in 0..CHANNELS {
            for rank in 0..world {
                all.push(control.slot(channel, rank));
                all.extend((0..world).map(|peer| control.pair(channel, rank, peer)));
            }
        }
        for slot in &all {
            number += 1;
            slot.publish(number);
        }
        for (i, slot) in all.iter().enumerate() {
            assert_eq!(slot.counter(), i as u32 + 1);
        }
        assert!(control.aborted().is_none());
    }

    /// 64 channels of 8 slots for the group and 64 for the pairs, of 512 bytes each, the tables before them, and 8 flight
    /// records.
    #[test]
    fn the_block_of_eight_ranks_is_small() {
        let bytes = Control::bytes(8);
        println!("control block of 8 ranks: {bytes} bytes, {} a channel", 72 * size_of::<ChannelSlot>());
        assert_eq!(size_of::<ChannelSlot>(), 512);
        assert!((64 * 72 * 512..64 * 72 * 512 + (8 << 10) + 8 * (66 << 10)).contains(&bytes), "{bytes}");
    }

    #[test]
    fn the_first_abort_stays() {
        let control = Control::create(Region::anonymous(Control::bytes(1)).unwrap(), 1, 1);
        for reason in ["first", "second"] {
            control.abort(Abort { rank: 0, blame: Blame::Rank, reason: reason.into() });
        }
        assert_eq!(control.aborted().unwrap().reason, "first");
    }
}
