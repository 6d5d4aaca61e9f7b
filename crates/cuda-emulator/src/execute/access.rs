//! Loads and stores of threads, each access checked: bounds, alignment, written before, ordered after others.

use std::ops::Range;

use crate::checks::{Access, Accessor, Cell, Finding, HOST_BLOCK, Report};
use crate::kernel::{Address, Register, Transfer};
use crate::memory::{Fault, LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BYTES};
use crate::ptx::StateSpace;
use crate::registers::{Class, LANES};

use super::block::{Block, Stop};
use super::warp::{Warp, lanes};

/// Where an address leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Global(u64),
    Shared(u64),
    Local(u64),
}

/// A thread at its instruction.
#[derive(Clone, Copy)]
pub(super) struct Who<'b> {
    /// Its warp, and what that is ordered after.
    pub by: &'b Accessor<'b>,
    /// Its lane.
    pub lane: usize,
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

/// The bytes of the first word that an access of so many bytes at a place uses.
#[inline]
fn byte_mask(at: usize, count: usize) -> u16 {
    match count {
        1 => 1 << (at % 4),
        2 => 3 << (at % 4),
        _ => 15,
    }
}

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
        for lane in lanes(active) {
            let who = Who { by: &by, lane };
            let bytes: [u8; N] = match load.space {
                StateSpace::Param => self.parameter(addresses[lane], who)?,
                space => self.read(warp, space, addresses[lane], who)?,
            };
            let mut rest = widened(bytes);
            for &register in &load.values {
                set_lane(warp, register, lane, extended(rest as u64, load.bytes, load.signed));
                rest = rest.checked_shr(8 * load.bytes as u32).unwrap_or(0);
            }
        }
        Ok(())
    }

    fn parameter<const N: usize>(&self, address: u64, who: Who) -> Result<[u8; N], Stop> {
        let at = address as usize;
        let found = self.launch.parameters.get(at..at.saturating_add(N));
        found.and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| {
            let detail = format!("{N} bytes of the kernel's parameters");
            self.stop(Fault { finding: Finding::OutOfBounds, detail }, address, who)
        })
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
        for lane in lanes(active) {
            let mut whole = 0u128;
            for &register in store.values.iter().rev() {
                let bits = extended(lane_bits(warp, register, lane), store.bytes, false);
                whole = whole.checked_shl(8 * store.bytes as u32).unwrap_or(0) | u128::from(bits);
            }
            let bytes = std::array::from_fn(|byte| (whole >> (8 * byte)) as u8);
            self.write::<N>(warp, store.space, addresses[lane], bytes, Who { by: &by, lane })?;
        }
        Ok(())
    }

    /// Reads the bytes of one thread.
    #[inline]
    fn read<const N: usize>(
        &mut self,
        warp: &Warp,
        space: StateSpace,
        address: u64,
        who: Who,
    ) -> Result<[u8; N], Stop> {
        match locate(space, address) {
            Place::Global(address) => self.read_global(address, who),
            Place::Shared(address) => self.read_shared(address, who),
            Place::Local(address) => {
                let range = self.local(warp, address, N, who)?;
                if self.launch.checks.unwritten && !warp.local_written[range.clone()].iter().all(|set| *set) {
                    self.note(Finding::Unwritten, "local memory", address, who);
                }
                Ok(array(&warp.local[range]))
            }
        }
    }

    /// Reads bytes of global memory.
    #[inline]
    pub(super) fn read_global<const N: usize>(&mut self, address: u64, who: Who) -> Result<[u8; N], Stop> {
        let place = self.memory.place(address, N).map_err(|fault| self.stop(fault, address, who))?;
        if self.launch.checks.unwritten && !self.memory.is_written(place, N) {
            self.note(Finding::Unwritten, "global memory", address, who);
        }
        if self.launch.checks.races {
            let cells = self.memory.cells(place, N);
            if let Some(found) = touch::<false>(cells, who.by, who.lane, byte_mask(place, N), false) {
                self.race("global", address, found, false, who);
            }
        }
        Ok(array(self.memory.bytes(place, N)))
    }

    /// Reads bytes of shared memory.
    #[inline]
    pub(super) fn read_shared<const N: usize>(&mut self, address: u64, who: Who) -> Result<[u8; N], Stop> {
        let place = self.shared.place(address, N).map_err(|fault| self.stop(fault, address, who))?;
        if self.launch.checks.unwritten
            && let Some(finding) = self.shared.state(place, N)
        {
            self.note(finding, "shared memory", address, who);
        }
        if self.launch.checks.races {
            let cells = self.shared.cells(place, N);
            if let Some(found) = touch::<true>(cells, who.by, who.lane, byte_mask(place, N), false) {
                self.race("shared", address, found, false, who);
            }
        }
        Ok(array(self.shared.bytes(place, N)))
    }

    /// Writes the bytes of one thread.
    #[inline]
    pub(super) fn write<const N: usize>(
        &mut self,
        warp: &mut Warp,
        space: StateSpace,
        address: u64,
        bytes: [u8; N],
        who: Who,
    ) -> Result<(), Stop> {
        match locate(space, address) {
            Place::Global(address) => {
                let place = self.global_for_writing(address, N, who)?;
                self.memory.bytes(place, N).copy_from_slice(&bytes);
            }
            Place::Shared(address) => {
                let place = self.shared_for_writing(address, N, who)?;
                self.shared.bytes(place, N).copy_from_slice(&bytes);
                self.shared.mark_written(place, N);
            }
            Place::Local(address) => {
                let range = self.local(warp, address, N, who)?;
                warp.local[range.clone()].copy_from_slice(&bytes);
                warp.local_written[range].fill(true);
            }
        }
        Ok(())
    }

    /// The place of a write to global memory, which counts as written.
    #[inline(always)]
    pub(super) fn global_for_writing(&mut self, address: u64, count: usize, who: Who) -> Result<usize, Stop> {
        let place = self.memory.place(address, count).map_err(|fault| self.stop(fault, address, who))?;
        if who.by.atomic && self.launch.checks.unwritten && !self.memory.is_written(place, count) {
            self.note(Finding::Unwritten, "global memory", address, who);
        }
        self.memory.mark_written(place, count);
        if self.launch.checks.races {
            let cells = self.memory.cells(place, count);
            if let Some(found) = touch::<false>(cells, who.by, who.lane, byte_mask(place, count), true) {
                self.race("global", address, found, true, who);
            }
        }
        Ok(place)
    }

    /// The place of a write to shared memory. The caller marks it as written.
    #[inline(always)]
    pub(super) fn shared_for_writing(&mut self, address: u64, count: usize, who: Who) -> Result<usize, Stop> {
        let place = self.shared.place(address, count).map_err(|fault| self.stop(fault, address, who))?;
        if self.launch.checks.unwritten {
            if self.shared.is_pending(place, count) {
                self.note(Finding::UnfinishedCopy, "shared memory", address, who);
            } else if who.by.atomic && self.shared.state(place, count).is_some() {
                self.note(Finding::Unwritten, "shared memory", address, who);
            }
        }
        if self.launch.checks.races {
            let cells = self.shared.cells(place, count);
            if let Some(found) = touch::<true>(cells, who.by, who.lane, byte_mask(place, count), true) {
                self.race("shared", address, found, true, who);
            }
        }
        Ok(place)
    }

    /// Whether an address is in shared memory, and the address there.
    pub(super) fn shared_address(space: StateSpace, address: u64) -> Option<u64> {
        match locate(space, address) {
            Place::Shared(address) => Some(address),
            _ => None,
        }
    }

    /// Where a thread's local bytes are in those of its warp.
    fn local(&self, warp: &Warp, address: u64, count: usize, who: Who) -> Result<Range<usize>, Stop> {
        let size = self.launch.kernel.local_bytes;
        let at = address as usize;
        if !at.is_multiple_of(count) || at >= size || at + count > size {
            let finding = if !at.is_multiple_of(count) { Finding::Misaligned } else { Finding::OutOfBounds };
            let detail = format!("{count} bytes in the thread's {size} bytes of local memory");
            return Err(self.stop(Fault { finding, detail }, address, who));
        }
        debug_assert_eq!(warp.local.len(), size * LANES);
        let start = who.lane * size + at;
        Ok(start..start + count)
    }

    /// The report of an access that ends the kernel.
    #[cold]
    pub(super) fn stop(&self, fault: Fault, address: u64, who: Who) -> Stop {
        let report = self.report(fault.finding, who.by.instruction, (who.by.warp, who.lane), fault.detail);
        Box::new(Report { address: Some(address), ..report })
    }

    /// Reports a finding after which the kernel goes on.
    #[cold]
    pub(super) fn note(&mut self, finding: Finding, detail: &str, address: u64, who: Who) {
        let report = self.report(finding, who.by.instruction, (who.by.warp, who.lane), detail.to_string());
        self.reports.add(Report { address: Some(address), ..report });
    }

    /// Reports an access that nothing orders after another.
    #[cold]
    pub(super) fn race(&mut self, space: &str, address: u64, other: Access, write: bool, who: Who) {
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
        self.note(finding, &format!("{verb} {space} memory that {other}"), address, who);
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

/// Records an access in the cells of its words: the first access that it is not ordered after.
#[inline]
fn touch<const SHARED: bool>(
    cells: &mut [Cell],
    by: &Accessor,
    lane: usize,
    bytes: u16,
    write: bool,
) -> Option<Access> {
    let mut found = None;
    for cell in cells {
        let conflict = match write {
            true => cell.write::<SHARED>(by, lane, bytes),
            false => cell.read::<SHARED>(by, lane, bytes),
        };
        found = found.or(conflict);
    }
    found
}

/// A slice of `N` bytes as an array.
#[inline]
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(bytes);
    out
}

/// Bytes as a number.
#[inline]
fn widened<const N: usize>(bytes: [u8; N]) -> u128 {
    let mut all = [0u8; 16];
    all[..N].copy_from_slice(&bytes);
    u128::from_le_bytes(all)
}

/// The low bytes of a number, with zeros or the sign before them.
#[inline]
pub(super) fn extended(bits: u64, bytes: usize, signed: bool) -> u64 {
    let unused = 64 - 8 * bytes as u32;
    if signed { (((bits << unused) as i64) >> unused) as u64 } else { bits << unused >> unused }
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
