//! Loads and stores of threads, each access checked: bounds, alignment, written before, ordered after others.

use std::ops::Range;

use crate::bits;
use crate::checks::{Access, Accessor, Conflict, Finding, HOST_BLOCK, Report};
use crate::kernel::{Address, Register, Transfer};
use crate::memory::{Fault, LOCAL_WINDOW, Parts, SHARED_WINDOW, WINDOW_BYTES};
use crate::ptx::StateSpace;
use crate::registers::{Class, LANES};

use super::block::{Block, Stop};
use super::spans::{Span, Spans};
use super::values::{LaneBytes, of_registers, to_registers};
use super::warp::Warp;

/// Where an address leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Global(u64),
    Shared(u64),
    Local(u64),
}

/// The addresses of all lanes.
#[inline]
pub(super) fn addresses(warp: &Warp, address: &Address) -> [u64; LANES] {
    let slot = usize::from(address.register.slot);
    match address.register.class {
        Class::Long => warp.registers.longs[slot].0.map(|base| base.wrapping_add(address.offset as u64)),
        // 32 bits address shared, local and constant memory.
        _ => warp.registers.words[slot].0.map(|base| u64::from(base.wrapping_add(address.offset as u32))),
    }
}

#[inline]
fn locate(space: StateSpace, address: u64) -> Place {
    match space {
        StateSpace::Shared => Place::Shared(address),
        StateSpace::Local => Place::Local(address),
        StateSpace::Generic if address.wrapping_sub(SHARED_WINDOW) < WINDOW_BYTES => {
            Place::Shared(address - SHARED_WINDOW)
        }
        StateSpace::Generic if address.wrapping_sub(LOCAL_WINDOW) < WINDOW_BYTES => {
            Place::Local(address - LOCAL_WINDOW)
        }
        _ => Place::Global(address),
    }
}

/// `SPACE` of global memory, whose accesses are checked like those of shared memory.
pub(super) const GLOBAL: bool = false;

/// `SPACE` of shared memory.
pub(super) const SHARED: bool = true;

impl Block<'_> {
    /// Reads memory into registers.
    pub(super) fn load(
        &mut self,
        warp: &mut Warp,
        load: &Transfer,
        active: u32,
        at: usize,
    ) -> Result<(), Stop> {
        match load.bytes * load.values.len() {
            1 => self.load_sized::<1>(warp, load, active, at),
            2 => self.load_sized::<2>(warp, load, active, at),
            4 => self.load_sized::<4>(warp, load, active, at),
            8 => self.load_sized::<8>(warp, load, active, at),
            _ => self.load_sized::<16>(warp, load, active, at),
        }
    }

    /// `load` of `N` bytes a thread.
    fn load_sized<const N: usize>(
        &mut self,
        warp: &mut Warp,
        load: &Transfer,
        active: u32,
        at: usize,
    ) -> Result<(), Stop> {
        let addresses = addresses(warp, &load.address);
        let by = self.accessor(warp.number, at, false);
        let mut lanes = [[0u8; N]; LANES];
        for span in Spans::new(&addresses, active, N, true) {
            if load.space == StateSpace::Param {
                self.parameters(span, &by, &mut lanes)?;
                continue;
            }
            match locate(load.space, span.address) {
                Place::Global(address) => self.read::<GLOBAL, N>(span.at(address), &by, &mut lanes)?,
                Place::Shared(address) => self.read::<SHARED, N>(span.at(address), &by, &mut lanes)?,
                Place::Local(address) => {
                    for one in span.at(address).each(N) {
                        lanes[one.lane] = self.read_local(warp, one, &by)?;
                    }
                }
            }
        }
        to_registers(warp, load, &lanes, active);
        Ok(())
    }

    fn parameters<const N: usize>(
        &self,
        span: Span,
        by: &Accessor,
        lanes: &mut LaneBytes<N>,
    ) -> Result<(), Stop> {
        for one in span.each(N) {
            let at = one.address as usize;
            let found = self.launch.parameters.get(at..at.saturating_add(N));
            lanes[one.lane] = found.and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| {
                let detail = format!("{N} bytes of the kernel's parameters");
                self.stop(Fault { finding: Finding::OutOfBounds, detail }, one, by)
            })?;
        }
        Ok(())
    }

    /// Writes registers to memory.
    pub(super) fn store(
        &mut self,
        warp: &mut Warp,
        store: &Transfer,
        active: u32,
        at: usize,
    ) -> Result<(), Stop> {
        match store.bytes * store.values.len() {
            1 => self.store_sized::<1>(warp, store, active, at),
            2 => self.store_sized::<2>(warp, store, active, at),
            4 => self.store_sized::<4>(warp, store, active, at),
            8 => self.store_sized::<8>(warp, store, active, at),
            _ => self.store_sized::<16>(warp, store, active, at),
        }
    }

    /// `store` of `N` bytes a thread.
    fn store_sized<const N: usize>(
        &mut self,
        warp: &mut Warp,
        store: &Transfer,
        active: u32,
        at: usize,
    ) -> Result<(), Stop> {
        let addresses = addresses(warp, &store.address);
        let by = self.accessor(warp.number, at, false);
        let lanes = of_registers::<N>(warp, store);
        for span in Spans::new(&addresses, active, N, false) {
            match locate(store.space, span.address) {
                Place::Global(address) => self.write::<GLOBAL, N>(span.at(address), &by, &lanes)?,
                Place::Shared(address) => self.write::<SHARED, N>(span.at(address), &by, &lanes)?,
                Place::Local(address) => {
                    for one in span.at(address).each(N) {
                        let range = self.local(warp, one, N, &by)?;
                        warp.local[range.clone()].copy_from_slice(&lanes[one.lane]);
                        warp.local_written[range].fill(true);
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads the bytes of a span of lanes.
    #[inline]
    pub(super) fn read<const SPACE: bool, const N: usize>(
        &mut self,
        span: Span,
        by: &Accessor,
        lanes: &mut LaneBytes<N>,
    ) -> Result<(), Stop> {
        let count = span.bytes(N);
        let at = self.place::<SPACE>(span, N, by)?;
        let checks = self.launch.checks;
        let mut parts = self.parts::<SPACE>();
        let unwritten = checks.unwritten && !bits::all(parts.written, at, count);
        let mut conflict = None;
        if checks.races {
            conflict = parts.shadow.touch::<SPACE>(at, count, span.which(N), by, false);
        }
        let (out, bytes) = (&mut lanes[span.lane..span.lane + span.lanes], &parts.bytes[at..at + count]);
        if let [one] = out {
            *one = array(bytes);
        } else if span.same {
            out.fill(array(bytes));
        } else {
            out.as_flattened_mut().copy_from_slice(bytes);
        }
        if unwritten {
            self.unwritten::<SPACE>(span, at, N, by);
        }
        if let Some(conflict) = conflict {
            self.race::<SPACE>(span.address + (conflict.at - at) as u64, conflict, false, by);
        }
        Ok(())
    }

    /// Writes the bytes of a span of lanes.
    #[inline]
    pub(super) fn write<const SPACE: bool, const N: usize>(
        &mut self,
        span: Span,
        by: &Accessor,
        lanes: &LaneBytes<N>,
    ) -> Result<(), Stop> {
        let at = self.place_of_write::<SPACE>(span, N, by)?;
        let bytes = lanes[span.lane..span.lane + span.lanes].as_flattened();
        self.parts::<SPACE>().bytes[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// The place of a write, which counts as done.
    #[inline]
    pub(super) fn place_of_write<const SPACE: bool>(
        &mut self,
        span: Span,
        of_lane: usize,
        by: &Accessor,
    ) -> Result<usize, Stop> {
        let count = span.bytes(of_lane);
        let at = self.place::<SPACE>(span, of_lane, by)?;
        let checks = self.launch.checks;
        let parts = self.parts::<SPACE>();
        let pending = SPACE == SHARED && bits::any(parts.pending, at, count);
        let unwritten = pending || by.atomic && !bits::all(parts.written, at, count);
        if unwritten && checks.unwritten {
            self.unwritten::<SPACE>(span, at, of_lane, by);
        }
        let parts = self.parts::<SPACE>();
        bits::add(parts.written, at, count);
        if pending {
            bits::remove(parts.pending, at, count);
        }
        if checks.races {
            let mut shadow = parts.shadow;
            if let Some(conflict) = shadow.touch::<SPACE>(at, count, span.which(of_lane), by, true) {
                self.race::<SPACE>(span.address + (conflict.at - at) as u64, conflict, true, by);
            }
        }
        Ok(at)
    }

    /// The place of a span of lanes in its memory.
    #[inline]
    fn place<const SPACE: bool>(&mut self, span: Span, of_lane: usize, by: &Accessor) -> Result<usize, Stop> {
        let mut find = |span: Span| match SPACE {
            SHARED => self.shared.place(span.address, of_lane, span.bytes(of_lane)),
            GLOBAL => self.memory.place(span.address, of_lane, span.bytes(of_lane)),
        };
        let operands = self.launch.operands;
        let allow = |span: Span| {
            SPACE == SHARED
                || operands.ranges.is_empty()
                || operands.allow(span.address, span.bytes(of_lane) as u64)
        };
        let mut find = |span: Span| {
            let place = find(span)?;
            if allow(span) {
                return Ok(place);
            }
            Err(Fault { finding: Finding::OutOfBounds, detail: operands.near(span.address, of_lane) })
        };
        let fault = match find(span) {
            Ok(at) => return Ok(at),
            Err(fault) => fault,
        };
        let mut places = span.each(of_lane).map(|one| (find(one), one));
        match places.find(|(place, _)| place.is_err()) {
            Some((Err(fault), one)) => Err(self.stop(fault, one, by)),
            // Each lane has an operand of its own, and these follow each other.
            _ => find(Span { lanes: 1, ..span }).map_err(|_| self.stop(fault, span, by)),
        }
    }

    /// A memory as accesses see it.
    #[inline]
    pub(super) fn parts<const SPACE: bool>(&mut self) -> Parts<'_> {
        match SPACE {
            SHARED => self.shared.parts(),
            GLOBAL => self.memory.parts(),
        }
    }

    /// Reports the first lane of a span whose bytes were not written.
    #[cold]
    fn unwritten<const SPACE: bool>(&mut self, span: Span, at: usize, of_lane: usize, by: &Accessor) {
        for one in span.each(of_lane) {
            let at = at + (one.address - span.address) as usize;
            let parts = self.parts::<SPACE>();
            if !bits::all(parts.written, at, of_lane) {
                let pending = SPACE == SHARED && bits::any(parts.pending, at, of_lane);
                let finding = if pending { Finding::UnfinishedCopy } else { Finding::Unwritten };
                return self.note(finding, &format!("{} memory", name::<SPACE>()), one, by);
            }
        }
    }

    /// Reads the local bytes of a thread.
    fn read_local<const N: usize>(&mut self, warp: &Warp, one: Span, by: &Accessor) -> Result<[u8; N], Stop> {
        let range = self.local(warp, one, N, by)?;
        if self.launch.checks.unwritten && !warp.local_written[range.clone()].iter().all(|set| *set) {
            self.note(Finding::Unwritten, "local memory", one, by);
        }
        Ok(array(&warp.local[range]))
    }

    /// Whether an address is in shared memory, and the address there.
    pub(super) fn shared_address(space: StateSpace, address: u64) -> Option<u64> {
        match locate(space, address) {
            Place::Shared(address) => Some(address),
            _ => None,
        }
    }

    /// Where a thread's local bytes are in those of its warp.
    fn local(&self, warp: &Warp, one: Span, count: usize, by: &Accessor) -> Result<Range<usize>, Stop> {
        let size = self.launch.kernel.local_bytes;
        let at = one.address as usize;
        if !at.is_multiple_of(count) || at >= size || at + count > size {
            let finding = if !at.is_multiple_of(count) { Finding::Misaligned } else { Finding::OutOfBounds };
            let detail = format!("{count} bytes in the thread's {size} bytes of local memory");
            return Err(self.stop(Fault { finding, detail }, one, by));
        }
        debug_assert_eq!(warp.local.len(), size * LANES);
        let start = one.lane * size + at;
        Ok(start..start + count)
    }

    /// The report of an access that ends the kernel, by the first lane of a span.
    #[cold]
    pub(super) fn stop(&self, fault: Fault, span: Span, by: &Accessor) -> Stop {
        let report = self.report(fault.finding, by.instruction, (by.warp, span.lane), fault.detail);
        Box::new(Report { address: Some(span.address), ..report })
    }

    /// Reports a finding after which the kernel goes on, by the first lane of a span.
    #[cold]
    pub(super) fn note(&mut self, finding: Finding, detail: &str, span: Span, by: &Accessor) {
        let report = self.report(finding, by.instruction, (by.warp, span.lane), detail.to_string());
        self.reports.add(Report { address: Some(span.address), ..report });
    }

    /// Reports an access that nothing orders after another.
    #[cold]
    fn race<const SPACE: bool>(&mut self, address: u64, conflict: Conflict, write: bool, by: &Accessor) {
        let other = conflict.earlier;
        let verb = if write { "writes" } else { "reads" };
        let (finding, other) = if other.operation != self.launch.operation {
            let what = if other.block == HOST_BLOCK { "a copy" } else { "a kernel" };
            let number = other.operation;
            (
                Finding::StreamOrder,
                format!("{what} (operation {number}) uses; no event or stream orders them"),
            )
        } else if other.block == self.linear {
            (Finding::Race, format!("{}; no barrier orders them", self.use_by(other)))
        } else {
            (Finding::RaceBetweenBlocks, format!("{}, in block number {}", self.use_by(other), other.block))
        };
        let detail = format!("{verb} {} memory that {other}", name::<SPACE>());
        self.note(finding, &detail, Span::one(address, conflict.lane), by);
    }

    /// The thread and place in the code of an earlier access of this launch.
    fn use_by(&self, other: Access) -> String {
        let (kernel, at) = (self.launch.kernel, usize::from(other.instruction));
        let place = match kernel.source(at) {
            Some((file, line)) => format!("{file}:{line}"),
            None => format!("PTX line {}", kernel.lines.get(at).map_or(0, |(line, _)| *line)),
        };
        match other.lane() {
            Some(lane) => format!("thread {:?} uses at {place}", self.thread(other.warp(), lane as usize)),
            None => format!("several threads of warp {} use at {place}", other.warp()),
        }
    }
}

/// The name of a memory.
fn name<const SPACE: bool>() -> &'static str {
    match SPACE {
        SHARED => "shared",
        GLOBAL => "global",
    }
}

/// A slice of `N` bytes as an array.
#[inline]
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(bytes);
    out
}

/// The bits of a lane of a register.
#[inline]
pub(super) fn lane_bits(warp: &Warp, register: Register, lane: usize) -> u64 {
    let slot = usize::from(register.slot);
    match register.class {
        Class::Long => warp.registers.longs[slot].0[lane],
        Class::Word => u64::from(warp.registers.words[slot].0[lane]),
        Class::Predicate => u64::from(warp.registers.predicates[slot] >> lane & 1),
    }
}

/// Sets a lane of a register.
#[inline]
pub(super) fn set_lane(warp: &mut Warp, register: Register, lane: usize, bits: u64) {
    let slot = usize::from(register.slot);
    match register.class {
        Class::Long => warp.registers.longs[slot].0[lane] = bits,
        Class::Word => warp.registers.words[slot].0[lane] = bits as u32,
        Class::Predicate => {
            let row = &mut warp.registers.predicates[slot];
            *row = *row & !(1 << lane) | (bits as u32 & 1) << lane;
        }
    }
}
