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

use phalanx_plan::trace::Site;
use phalanx_simd::Isa;

use crate::error::CollectiveError;
use crate::mover::{Mover, Started};
use crate::shared_memory::descriptor::Descriptor;
use crate::shared_memory::participation::{Participation, Patience};
use crate::shared_memory::watch::Watch;

/// Tables by group rank, kept from call to call so that no call allocates.
pub(crate) struct Tables {
    /// The address, in this rank, of each member's offered buffer.
    sources: Vec<*const u8>,
    /// The same addresses, advanced by an offset.
    shifted: Vec<*const u8>,
    /// In a group of several hosts: the address, in this rank, of each member's buffer that receives. Null for others.
    targets: Vec<*mut u8>,
    /// For each member: true once its descriptor was compared.
    compared: Vec<bool>,
}

// SAFETY: the pointers are read only inside a meeting, by the thread that holds it.
unsafe impl Send for Tables {}

impl Tables {
    pub(crate) fn new(world_size: usize) -> Tables {
        let pointers = vec![std::ptr::null(); world_size];
        let targets = vec![std::ptr::null_mut(); world_size];
        Tables { sources: pointers.clone(), shifted: pointers, targets, compared: vec![false; world_size] }
    }
}

/// Number of times that a rank asks without a sleep whether devices are done, and bounds of the sleep between two later
/// questions, which is a sixteenth of the time waited so far.
const MOVER_TRIES: u32 = 100;
const MOVER_NAP: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

/// One collective in progress, as one rank runs it.
pub(crate) struct Meeting<'a> {
    participation: Participation<'a>,
    tables: &'a mut Tables,
    base: u32,
    ticks: u32,
}

impl<'a> Meeting<'a> {
    pub(crate) fn new(participation: Participation<'a>, tables: &'a mut Tables) -> Meeting<'a> {
        let base = participation.slot(participation.rank).counter();
        Meeting { participation, tables, base, ticks: 0 }
    }

    /// The instruction set to sum and copy with; the processor has it.
    pub(crate) fn isa(&self) -> Isa {
        self.participation.options.isa
    }

    pub(crate) fn rank(&self) -> usize {
        self.participation.rank
    }

    pub(crate) fn world_size(&self) -> usize {
        self.participation.members.len()
    }

    /// The other members of the call on this host, beginning with the next rank, so that not all ranks begin with the same
    /// peer.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<'a> {
        let Participation { rank, pair, here, .. } = self.participation;
        let world = here.len();
        let peers = (1..world).map(move |i| (rank + i) % world).filter(move |q| here[*q]);
        peers.filter(move |q| pair.is_none_or(|p| p == *q))
    }

    /// This rank's part in the call.
    pub(crate) fn participation(&self) -> Participation<'a> {
        self.participation
    }

    /// The value of the counters when everybody has made `ticks`.
    pub(crate) fn count_at(&self, ticks: u32) -> u32 {
        self.base.wrapping_add(ticks)
    }

    /// Announces this rank's call, waits for every peer's call in any order, compares it with its own and finds the
    /// peers' buffers. No data moves before this returns.
    pub(crate) fn meet(
        &mut self,
        own: &Descriptor,
        site: Site,
        source: *const u8,
    ) -> Result<(), CollectiveError> {
        self.announce(own, site);
        self.tables.sources[self.participation.rank] = source;
        self.gather_peers(own)
    }

    /// Announces this rank's call to the peers on this host.
    pub(crate) fn announce(&mut self, own: &Descriptor, site: Site) {
        self.participation.slot(self.rank()).describe(own, site);
        self.tick();
    }

    /// The same as [`Meeting::meet`] for a call that was announced, with the buffer that receives.
    pub(crate) fn meet_announced(
        &mut self,
        own: &Descriptor,
        source: *const u8,
        target: *mut u8,
    ) -> Result<(), CollectiveError> {
        self.tables.sources[self.participation.rank] = source;
        self.tables.targets[self.participation.rank] = target;
        self.gather_peers(own)
    }

    fn gather_peers(&mut self, own: &Descriptor) -> Result<(), CollectiveError> {
        self.tables.compared.fill(false);
        let mut watch = Watch::new(self.participation);
        loop {
            let mut late = None;
            for q in self.peers() {
                if self.tables.compared[q] {
                    continue;
                }
                if self.progress(q) >= 1 || late.is_none() && self.spin(q, 1) {
                    (self.tables.sources[q], self.tables.targets[q]) = watch.compare(own, q)?;
                    self.tables.compared[q] = true;
                } else if late.is_none() {
                    late = Some(q);
                }
            }
            let Some(q) = late else { return Ok(()) };
            self.sleep(q, 1, &mut watch)?;
        }
    }

    /// The address, in this rank, of the buffer that member `q` offered; `q` may be this rank.
    pub(crate) fn source(&self, q: usize) -> *const u8 {
        self.tables.sources[q]
    }

    /// The address, in this rank, of the buffer of member `q` of this host that receives; `q` may be this rank.
    pub(crate) fn target(&self, q: usize) -> *mut u8 {
        self.tables.targets[q]
    }

    /// The addresses, in this rank, of byte `offset` of every member's offered buffer, by rank.
    pub(crate) fn sources_at(&mut self, offset: usize) -> &[*const u8] {
        let Tables { sources, shifted, .. } = &mut *self.tables;
        for (shifted, source) in shifted.iter_mut().zip(sources) {
            *shifted = source.wrapping_add(offset);
        }
        shifted
    }

    /// Tells the peers that this rank has completed one more step.
    pub(crate) fn tick(&mut self) {
        self.ticks += 1;
        self.participation.slot(self.rank()).publish(self.base.wrapping_add(self.ticks));
    }

    /// Ticks of member `q` in this meeting so far.
    pub(crate) fn progress(&self, q: usize) -> u32 {
        // Negative while the peer is still in the previous meeting.
        (self.participation.slot(q).counter().wrapping_sub(self.base) as i32).max(0) as u32
    }

    /// Waits until member `q` has made `ticks`.
    pub(crate) fn wait(&self, q: usize, ticks: u32) -> Result<(), CollectiveError> {
        if self.spin(q, ticks) {
            return Ok(());
        }
        let mut watch = Watch::new(self.participation);
        while self.progress(q) < ticks {
            self.sleep(q, ticks, &mut watch)?;
        }
        Ok(())
    }

    /// Makes the last tick and waits until every peer has made it, so that nobody reads this rank's buffers any more.
    pub(crate) fn leave(&mut self) -> Result<(), CollectiveError> {
        self.tick();
        self.peers().try_for_each(|q| self.wait(q, self.ticks))
    }

    /// Lets devices move the bytes of the call, on which all members agree, and waits until this rank's part is over. One tick tells the
    /// peers that this rank's device has come to the call, another one that its part is over, so that they see which rank is behind.
    pub(crate) fn run_mover(&mut self, mover: &mut dyn Mover) -> Result<(), CollectiveError> {
        let mut started = Started::start(mover)?;
        self.wait_for_mover(&mut started).inspect_err(|error| {
            started.note_failure(error.to_string());
            // Before the call is abandoned, which may wait for other calls of the device.
            self.participation.host.abort_because(error);
        })
    }

    /// A rank whose device has not come to the call computes, for as long as that takes. Once all devices have come to it, nothing that a
    /// rank computes excuses a call that does not end: a host that waits for its card may keep a core busy.
    fn wait_for_mover(&mut self, started: &mut Started) -> Result<(), CollectiveError> {
        let mut watch = Watch::new(self.participation);
        let (begun, over) = (self.ticks + 1, self.ticks + 2);
        let (since, mut tries) = (Instant::now(), 0);
        loop {
            if self.ticks < begun && started.has_begun(self.others_are_over(over))? {
                self.tick();
            }
            if started.is_over()? {
                (self.ticks..over).for_each(|_| self.tick());
                return Ok(());
            }
            if tries < MOVER_TRIES {
                tries += 1;
                std::thread::yield_now();
                continue;
            }
            let other = |ticks: u32| self.behind(ticks).find(|q| *q != self.rank());
            if let Some(q) = other(begun) {
                watch.look_around(q, self.count_at(begun))?;
            } else {
                // A rank whose own device has not come to the call waits for none of the others.
                let all_in = self.ticks >= begun;
                let wait = other(over).filter(|_| all_in).map(|q| (q, self.count_at(over)));
                if watch.sign(wait, all_in)? {
                    return Err(watch.stuck(self.behind(over), self.count_at(over)));
                }
            }
            let [min, max] = MOVER_NAP;
            std::thread::sleep((since.elapsed() / 16).clamp(min, max));
        }
    }

    fn others_are_over(&self, over: u32) -> bool {
        self.behind(over).all(|q| q == self.rank())
    }

    /// The members of the call, this one and those of other hosts among them, that have not made `ticks`.
    fn behind(&self, ticks: u32) -> impl Iterator<Item = usize> {
        let Participation { rank, pair, members, .. } = self.participation;
        let all = (0..members.len()).filter(move |q| *q == rank || pair.is_none_or(|pair| pair == *q));
        all.filter(move |q| self.progress(*q) < ticks)
    }

    fn spin(&self, q: usize, ticks: u32) -> bool {
        let Patience { spins, yields } = self.participation.patience;
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
        self.participation.members.len() > self.participation.host.control.cores()
    }

    /// Sleeps for one slice or until member `q` moves; if it has not arrived, checks whether the wait can still
    /// succeed.
    fn sleep(&self, q: usize, ticks: u32, watch: &mut Watch) -> Result<(), CollectiveError> {
        // Also checked before the first sleep, because an abort between spinning and sleeping wakes nobody.
        watch.look_around(q, self.base.wrapping_add(ticks))?;
        let slot = self.participation.slot(q);
        let seen = slot.counter();
        if (seen.wrapping_sub(self.base) as i32) < ticks as i32 {
            slot.sleep(seen, Watch::SLICE);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use phalanx_tensor::{DeviceError, Region};

    use crate::shared_memory::control::Control;
    use crate::shared_memory::host::Host;
    use crate::shared_memory::memory::Memory;
    use crate::shared_memory::options::Options;

    /// A device that comes to its call and ends it so long after its start; None: never.
    struct Device {
        begins: Option<Duration>,
        ends: Option<Duration>,
        since: Instant,
    }

    impl Device {
        fn has(&self, after: Option<Duration>) -> Result<bool, DeviceError> {
            Ok(after.is_some_and(|after| self.since.elapsed() >= after))
        }
    }

    impl Mover for Device {
        fn start(&mut self) -> Result<(), DeviceError> {
            Ok(())
        }
        fn has_begun(&mut self, _: bool) -> Result<bool, DeviceError> {
            self.has(self.begins)
        }
        fn is_over(&mut self) -> Result<bool, DeviceError> {
            self.has(self.ends)
        }
        fn abandon(&mut self, _: &str) {}
    }

    const DEADLINE: Duration = Duration::from_millis(400);

    /// One call between devices, by rank when they come to it and when they end it in milliseconds; `busy` ranks keep a core busy. Results
    /// by rank.
    fn call<const N: usize>(
        devices: [[Option<u64>; 2]; N],
        busy: &[usize],
    ) -> [Result<(), CollectiveError>; N] {
        let control = Arc::new(Control::create(Region::anonymous(Control::bytes(N)).unwrap(), N, 2));
        control.open_channel(0);
        let options = Options { deadline: DEADLINE, ..Options::default() };
        let is_over = AtomicBool::new(false);
        let rank = |rank: usize| {
            let host = Host::new(Arc::clone(&control), Memory::Threads, rank, 0..N);
            let (host, options, group, patience) = (&*host, &options, "data", Patience::CALLER);
            let members: [usize; N] = std::array::from_fn(|rank| rank);
            let (members, here) = (&members, &[true; N]);
            let part =
                Participation { host, options, group, channel: 0, members, here, rank, pair: None, patience };
            let millis = |time: Option<u64>| time.map(Duration::from_millis);
            let [begins, ends] = devices[rank].map(millis);
            let mut tables = Tables::new(N);
            Meeting::new(part, &mut tables).run_mover(&mut Device { begins, ends, since: Instant::now() })
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    busy.iter().for_each(|rank| control.rank(*rank).note_work());
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let rank = &rank;
            let ranks: [_; N] = std::array::from_fn(|number| scope.spawn(move || rank(number)));
            let results = ranks.map(|rank| rank.join().unwrap());
            is_over.store(true, Ordering::Relaxed);
            results
        })
    }

    #[test]
    fn a_call_that_no_device_ends_is_named_though_ranks_are_busy() {
        let since = Instant::now();
        let results = call([[Some(0), None], [Some(100), None]], &[0, 1]);
        assert!(since.elapsed() >= DEADLINE + Duration::from_millis(100));
        let errors = results.map(|result| result.unwrap_err());
        let named = |error: &CollectiveError| matches!(error, CollectiveError::Stuck { rank: 0, report } if report.contains("ranks [0, 1]"));
        assert!(errors.iter().any(named), "{errors:?}");
        assert!(errors.iter().all(|error| error.to_string().contains("does not end")), "{errors:?}");
    }

    #[test]
    fn the_rank_whose_part_does_not_end_is_named() {
        let [own, other] = call([[Some(0), Some(0)], [Some(0), None]], &[0, 1]);
        own.unwrap();
        let error = other.unwrap_err();
        let is_named =
            matches!(&error, CollectiveError::Stuck { rank: 1, report } if report.contains("ranks [1]"));
        assert!(is_named, "{error}");
    }

    /// Rank 2's device computes for several deadlines before it comes to the call, and its process alone is busy.
    #[test]
    fn a_device_that_computes_before_a_call_is_waited_for() {
        let devices = [[Some(0), Some(1300)], [Some(0), Some(1300)], [Some(1200), Some(1300)]];
        for result in call(devices, &[2]) {
            result.unwrap();
        }
    }

    /// It waits for nobody, so the others find it at the end of their waits.
    #[test]
    fn a_device_that_never_comes_to_a_call_is_named() {
        let errors =
            call([[Some(0), None], [Some(0), None], [None, None]], &[0, 1]).map(|result| result.unwrap_err());
        assert!(
            errors.iter().any(|error| matches!(error, CollectiveError::Missing { rank: 2, .. })),
            "{errors:?}"
        );
    }

    /// Rank 1 was stopped when its device had come to the call: it is the cause, whichever device waits for it.
    #[test]
    fn a_rank_that_was_stopped_in_a_call_is_named() {
        let control = Arc::new(Control::create(Region::anonymous(Control::bytes(2)).unwrap(), 2, 2));
        control.open_channel(0);
        control.slot(0, 1).publish(1);
        let host = Host::new(Arc::clone(&control), Memory::Threads, 0, 0..2);
        let options = &Options { deadline: DEADLINE, ..Options::default() };
        let (members, here, patience) = (&[0, 1], &[true; 2], Patience::CALLER);
        let (host, group, rank) = (&*host, "data", 0);
        let part =
            Participation { host, options, group, channel: 0, members, here, rank, pair: None, patience };
        let mut tables = Tables::new(2);
        let mut device = Device { begins: Some(Duration::ZERO), ends: None, since: Instant::now() };
        let error = Meeting::new(part, &mut tables).run_mover(&mut device).unwrap_err();
        assert!(matches!(error, CollectiveError::Missing { rank: 1, .. }), "{error}");
    }
}
