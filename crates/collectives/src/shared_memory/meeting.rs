//! One collective, seen from one rank: who takes part, and the counters that order them.
//!
//! Every rank advances its counter by the same number of ticks in the same collective, so a counter that
//! stood at `base` when it began says `base + t` after t ticks; tick 1 is "my descriptor is written".
//! A call's descriptor may be overwritten by the call after next: who writes that one has met everybody
//! in the next one, so everybody has read this one.
//!
//! Waits spin briefly, since a peer that runs on another core is near, then sleep on the peer's counter
//! in slices and look around after each ([`watch`](super::watch)).

use std::time::{Duration, Instant};

use phalanx_simd::Isa;
use phalanx_trace::Site;

use crate::error::CollectiveError;
use crate::shared_memory::control::Slot;
use crate::shared_memory::descriptor::Descriptor;
use crate::shared_memory::endpoint::{Host, Options};
use crate::shared_memory::watch::Watch;

/// How to wait before sleeping: turns that keep the core, then a time of offering it to others. On a busy
/// machine an offer comes back late, so offers are not counted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    spins: u32,
    yields: Duration,
}

impl Patience {
    /// A caller who has nothing else to do: sleeping and being woken would cost more than the wait.
    pub(crate) const CALLER: Patience = Patience { spins: 100, yields: Duration::from_micros(600) };
    /// The owner thread, beside which this rank computes: a sleeper gets the core back at once when it
    /// is woken, one that yields waits for its turn.
    pub(crate) const OWNER: Patience = Patience { spins: 1000, yields: Duration::ZERO };
    /// When members outnumber cores, the peer may need this core: no spinning.
    const CROWDED_SPINS: u32 = 20;
}

/// Where a meeting takes place.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) host: &'a Host,
    pub(crate) options: &'a Options,
    pub(crate) group: &'static str,
    pub(crate) channel: usize,
    /// World ranks of the group, by group rank.
    pub(crate) members: &'a [usize],
    /// This rank's group rank.
    pub(crate) rank: usize,
    /// The other end of a send or recv; None when all members meet.
    pub(crate) pair: Option<usize>,
    pub(crate) patience: Patience,
}

impl<'a> Place<'a> {
    /// The slot of member `q` here.
    pub(crate) fn slot(&self, q: usize) -> &'a Slot {
        let Place { host, channel, members, rank, pair, .. } = *self;
        match pair {
            None => host.control.slot(channel, members[q]),
            Some(peer) => {
                let other = if q == rank { peer } else { rank };
                host.control.pair(channel, members[q], members[other])
            }
        }
    }

    /// The slot of member `q` in collectives of the whole group.
    pub(crate) fn slot_of_group(&self, q: usize) -> &'a Slot {
        self.host.control.slot(self.channel, self.members[q])
    }
}

/// Tables by group rank, kept from call to call so that no call allocates.
pub(crate) struct Tables {
    /// Where each member's offered buffer lies here.
    sources: Vec<*const u8>,
    /// The same, moved on.
    shifted: Vec<*const u8>,
    /// Whether the member's descriptor was compared.
    compared: Vec<bool>,
}

// SAFETY: the pointers are followed only inside a meeting, by the thread that holds it.
unsafe impl Send for Tables {}

impl Tables {
    pub(crate) fn new(world_size: usize) -> Tables {
        let pointers = vec![std::ptr::null(); world_size];
        Tables { sources: pointers.clone(), shifted: pointers, compared: vec![false; world_size] }
    }
}

pub(crate) struct Meeting<'a> {
    place: Place<'a>,
    tables: &'a mut Tables,
    base: u32,
    ticks: u32,
}

impl<'a> Meeting<'a> {
    pub(crate) fn new(place: Place<'a>, tables: &'a mut Tables) -> Meeting<'a> {
        let base = place.slot(place.rank).counter();
        Meeting { place, tables, base, ticks: 0 }
    }

    /// The instruction set to sum and copy with; the processor has it.
    pub(crate) fn isa(&self) -> Isa {
        self.place.options.isa
    }

    pub(crate) fn rank(&self) -> usize {
        self.place.rank
    }

    pub(crate) fn world_size(&self) -> usize {
        self.place.members.len()
    }

    /// The other members who take part, from the next rank on, so that not all start at the same.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world, pair) = (self.rank(), self.world_size(), self.place.pair);
        (1..world).map(move |i| (rank + i) % world).filter(move |q| pair.is_none_or(|p| p == *q))
    }

    /// Announces this rank's call, waits for every peer's in whatever order they come, compares them
    /// with the own one and finds the peers' buffers. No byte moves before this returns.
    pub(crate) fn meet(
        &mut self,
        own: &Descriptor,
        site: Site,
        source: *const u8,
    ) -> Result<(), CollectiveError> {
        self.place.slot(self.rank()).descriptors[own.parity()].write(own, site);
        self.tick();
        self.tables.compared.fill(false);
        self.tables.sources[self.place.rank] = source;
        let mut watch = Watch::new(self.place);
        loop {
            let mut late = None;
            for q in self.peers() {
                if self.tables.compared[q] {
                    continue;
                }
                if self.progress(q) >= 1 || late.is_none() && self.spin(q, 1) {
                    self.tables.sources[q] = watch.compare(own, q)?;
                    self.tables.compared[q] = true;
                } else if late.is_none() {
                    late = Some(q);
                }
            }
            let Some(q) = late else { return Ok(()) };
            self.sleep(q, 1, &mut watch)?;
        }
    }

    /// Where the buffer that member `q` offered lies here; this rank's own among them.
    pub(crate) fn source(&self, q: usize) -> *const u8 {
        self.tables.sources[q]
    }

    /// Where byte `offset` of every member's offered buffer lies here, by rank.
    pub(crate) fn sources_at(&mut self, offset: usize) -> &[*const u8] {
        let Tables { sources, shifted, .. } = &mut *self.tables;
        for (shifted, source) in shifted.iter_mut().zip(sources) {
            *shifted = source.wrapping_add(offset);
        }
        shifted
    }

    /// Tells the peers that one more step is done.
    pub(crate) fn tick(&mut self) {
        self.ticks += 1;
        self.place.slot(self.rank()).publish(self.base.wrapping_add(self.ticks));
    }

    /// Ticks of member `q` in this meeting so far.
    pub(crate) fn progress(&self, q: usize) -> u32 {
        // Below zero while the peer is still in the meeting before.
        (self.place.slot(q).counter().wrapping_sub(self.base) as i32).max(0) as u32
    }

    /// Waits until member `q` has made `ticks`.
    pub(crate) fn wait(&self, q: usize, ticks: u32) -> Result<(), CollectiveError> {
        if self.spin(q, ticks) {
            return Ok(());
        }
        let mut watch = Watch::new(self.place);
        while self.progress(q) < ticks {
            self.sleep(q, ticks, &mut watch)?;
        }
        Ok(())
    }

    /// The last tick: waits until every peer has made as many, so that nobody reads this rank's buffers
    /// any more.
    pub(crate) fn leave(&mut self) -> Result<(), CollectiveError> {
        self.tick();
        self.peers().try_for_each(|q| self.wait(q, self.ticks))
    }

    fn spin(&self, q: usize, ticks: u32) -> bool {
        let Patience { spins, yields } = self.place.patience;
        let spins = if self.crowded() { spins.min(Patience::CROWDED_SPINS) } else { spins };
        for _ in 0..spins {
            if self.progress(q) >= ticks {
                return true;
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        while start.elapsed() < yields {
            std::thread::yield_now();
            if self.progress(q) >= ticks {
                return true;
            }
        }
        false
    }

    fn crowded(&self) -> bool {
        self.place.members.len() > self.place.host.control.cores()
    }

    /// One slice of sleep until member `q` moves, then a look around if it has not come.
    fn sleep(&self, q: usize, ticks: u32, watch: &mut Watch) -> Result<(), CollectiveError> {
        // A look before the first sleep as well: an abort between the spin and the sleep wakes nobody.
        watch.look_around(q, self.base.wrapping_add(ticks))?;
        let slot = self.place.slot(q);
        let seen = slot.counter();
        if (seen.wrapping_sub(self.base) as i32) < ticks as i32 {
            slot.sleep(seen, Watch::SLICE);
        }
        Ok(())
    }
}
