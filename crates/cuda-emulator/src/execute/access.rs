//! Loads and stores of threads, each access checked: bounds, alignment, written before, ordered after others.

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

/// A thread and its instruction.
#[derive(Clone, Copy)]
pub(super) struct Who {
    pub warp: usize,
    pub lane: usize,
    pub at: usize,
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
        let total = load.bytes * load.values.len();
        let addresses = addresses(warp, &load.address);
        for lane in lanes(active) {
            let mut bytes = [0u8; 16];
            if load.space == StateSpace::Param {
                self.parameter(addresses[lane], &mut bytes[..total], Who { warp: warp.number, lane, at })?;
            } else {
                self.read(warp, load.space, addresses[lane], &mut bytes[..total], (lane, at))?;
            }
            for (&register, chunk) in load.values.iter().zip(bytes.chunks_exact(load.bytes)) {
                set_lane(warp, register, lane, extended(chunk, load.signed));
            }
        }
        Ok(())
    }

    fn parameter(&self, address: u64, out: &mut [u8], who: Who) -> Result<(), Stop> {
        let at = address as usize;
        let found = self.launch.parameters.get(at..at.saturating_add(out.len()));
        let Some(found) = found else {
            let detail = format!("{} bytes at byte {at} of the kernel's parameters", out.len());
            return Err(Box::new(self.report(Finding::OutOfBounds, who.at, (who.warp, who.lane), detail)));
        };
        out.copy_from_slice(found);
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
        let total = store.bytes * store.values.len();
        let addresses = addresses(warp, &store.address);
        for lane in lanes(active) {
            let mut bytes = [0u8; 16];
            for (&register, chunk) in store.values.iter().zip(bytes.chunks_exact_mut(store.bytes)) {
                chunk.copy_from_slice(&lane_bits(warp, register, lane).to_le_bytes()[..store.bytes]);
            }
            self.write(warp, store.space, addresses[lane], &bytes[..total], (lane, at))?;
        }
        Ok(())
    }

    /// Reads the bytes of one thread.
    #[inline]
    pub(super) fn read(
        &mut self,
        warp: &Warp,
        space: StateSpace,
        address: u64,
        out: &mut [u8],
        (lane, at): (usize, usize),
    ) -> Result<(), Stop> {
        let who = Who { warp: warp.number, lane, at };
        match locate(space, address) {
            Place::Global(address) => self.read_global(address, out, who),
            Place::Shared(address) => self.read_shared(address, out, who),
            Place::Local(address) => {
                let start = self.local(warp, address, out.len(), who)?;
                if self.launch.checks.unwritten
                    && !warp.local_written[start..start + out.len()].iter().all(|set| *set)
                {
                    self.note(Finding::Unwritten, "local memory", address, who);
                }
                out.copy_from_slice(&warp.local[start..start + out.len()]);
                Ok(())
            }
        }
    }

    #[inline]
    pub(super) fn read_global(&mut self, address: u64, out: &mut [u8], who: Who) -> Result<(), Stop> {
        let count = out.len();
        let place = self.memory.place(address, count).map_err(|fault| self.stop(fault, address, who))?;
        if self.launch.checks.unwritten && !self.memory.is_written(place, count) {
            self.note(Finding::Unwritten, "global memory", address, who);
        }
        if self.launch.checks.races {
            let accessor = Self::accessor(
                self.launch,
                &self.known,
                (self.linear, who.warp, self.phases[who.warp]),
                who.at,
            );
            let cells = self.memory.cells(place, count);
            if let Some(found) = touch(cells, &accessor, who.lane, byte_mask(place, count), false) {
                self.race("global", address, found, false, who);
            }
        }
        out.copy_from_slice(self.memory.bytes(place, count));
        Ok(())
    }

    #[inline]
    pub(super) fn read_shared(&mut self, address: u64, out: &mut [u8], who: Who) -> Result<(), Stop> {
        let count = out.len();
        let place = self.shared.place(address, count).map_err(|fault| self.stop(fault, address, who))?;
        if self.launch.checks.unwritten
            && let Some(finding) = self.shared.state(place, count)
        {
            self.note(finding, "shared memory", address, who);
        }
        if self.launch.checks.races {
            let accessor = Self::accessor(
                self.launch,
                &self.known,
                (self.linear, who.warp, self.phases[who.warp]),
                who.at,
            );
            let cells = self.shared.cells(place, count);
            if let Some(found) = touch(cells, &accessor, who.lane, byte_mask(place, count), false) {
                self.race("shared", address, found, false, who);
            }
        }
        out.copy_from_slice(self.shared.bytes(place, count));
        Ok(())
    }

    /// Writes the bytes of one thread.
    #[inline]
    pub(super) fn write(
        &mut self,
        warp: &mut Warp,
        space: StateSpace,
        address: u64,
        bytes: &[u8],
        (lane, at): (usize, usize),
    ) -> Result<(), Stop> {
        let who = Who { warp: warp.number, lane, at };
        match locate(space, address) {
            Place::Global(address) => {
                let place = self.global_for_writing(address, bytes.len(), who, false)?;
                self.memory.bytes(place, bytes.len()).copy_from_slice(bytes);
            }
            Place::Shared(address) => {
                let place = self.shared_for_writing(address, bytes.len(), who, false)?;
                self.shared.bytes(place, bytes.len()).copy_from_slice(bytes);
                self.shared.mark_written(place, bytes.len());
            }
            Place::Local(address) => {
                let start = self.local(warp, address, bytes.len(), who)?;
                warp.local[start..start + bytes.len()].copy_from_slice(bytes);
                warp.local_written[start..start + bytes.len()].fill(true);
            }
        }
        Ok(())
    }

    /// The place of a write to global memory, which counts as written.
    #[inline]
    pub(super) fn global_for_writing(
        &mut self,
        address: u64,
        count: usize,
        who: Who,
        atomic: bool,
    ) -> Result<usize, Stop> {
        let place = self.memory.place(address, count).map_err(|fault| self.stop(fault, address, who))?;
        if atomic && self.launch.checks.unwritten && !self.memory.is_written(place, count) {
            self.note(Finding::Unwritten, "global memory", address, who);
        }
        self.memory.mark_written(place, count);
        if self.launch.checks.races {
            let accessor = Self::accessor(
                self.launch,
                &self.known,
                (self.linear, who.warp, self.phases[who.warp]),
                who.at,
            );
            let accessor = Accessor { atomic, ..accessor };
            let cells = self.memory.cells(place, count);
            if let Some(found) = touch(cells, &accessor, who.lane, byte_mask(place, count), true) {
                self.race("global", address, found, true, who);
            }
        }
        Ok(place)
    }

    /// The place of a write to shared memory. The caller marks it as written.
    #[inline]
    pub(super) fn shared_for_writing(
        &mut self,
        address: u64,
        count: usize,
        who: Who,
        atomic: bool,
    ) -> Result<usize, Stop> {
        let place = self.shared.place(address, count).map_err(|fault| self.stop(fault, address, who))?;
        if self.launch.checks.unwritten {
            if self.shared.is_pending(place, count) {
                self.note(Finding::UnfinishedCopy, "shared memory", address, who);
            } else if atomic && self.shared.state(place, count).is_some() {
                self.note(Finding::Unwritten, "shared memory", address, who);
            }
        }
        if self.launch.checks.races {
            let accessor = Self::accessor(
                self.launch,
                &self.known,
                (self.linear, who.warp, self.phases[who.warp]),
                who.at,
            );
            let accessor = Accessor { atomic, ..accessor };
            let cells = self.shared.cells(place, count);
            if let Some(found) = touch(cells, &accessor, who.lane, byte_mask(place, count), true) {
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

    /// The index of a thread's local bytes.
    fn local(&self, warp: &Warp, address: u64, count: usize, who: Who) -> Result<usize, Stop> {
        let size = self.launch.kernel.local_bytes;
        let at = address as usize;
        if !at.is_multiple_of(count) || at >= size || at + count > size {
            let finding = if !at.is_multiple_of(count) { Finding::Misaligned } else { Finding::OutOfBounds };
            let detail = format!("{count} bytes in the thread's {size} bytes of local memory");
            return Err(self.stop(Fault { finding, detail }, address, who));
        }
        debug_assert_eq!(warp.local.len(), size * LANES);
        Ok(who.lane * size + at)
    }

    /// The report of an access that ends the kernel.
    #[cold]
    pub(super) fn stop(&self, fault: Fault, address: u64, who: Who) -> Stop {
        let report = self.report(fault.finding, who.at, (who.warp, who.lane), fault.detail);
        Box::new(Report { address: Some(address), ..report })
    }

    /// Reports a finding after which the kernel goes on.
    #[cold]
    pub(super) fn note(&mut self, finding: Finding, detail: &str, address: u64, who: Who) {
        let report = self.report(finding, who.at, (who.warp, who.lane), detail.to_string());
        self.reports.add(Report { address: Some(address), ..report });
    }

    /// Reports an access that nothing orders after another.
    #[cold]
    pub(super) fn race(&mut self, space: &str, address: u64, other: Access, write: bool, who: Who) {
        let verb = if write { "writes" } else { "reads" };
        let (finding, detail) = if other.operation != self.launch.operation {
            let operation = other.operation;
            let what = if other.block == HOST_BLOCK { "a copy" } else { "a kernel" };
            let detail = format!(
                "{verb} {space} memory that {what} (operation {operation}) uses; no event or stream orders them"
            );
            (Finding::StreamOrder, detail)
        } else {
            let line =
                self.launch.kernel.lines.get(usize::from(other.instruction)).map_or(0, |(line, _)| *line);
            let source = self.launch.kernel.source(usize::from(other.instruction));
            let place = source.map_or(format!("PTX line {line}"), |(file, line)| format!("{file}:{line}"));
            let thread = match other.lane() {
                Some(lane) => format!("thread {:?}", self.thread(other.warp(), lane as usize)),
                None => format!("several threads of warp {}", other.warp()),
            };
            if other.block == self.linear {
                (
                    Finding::Race,
                    format!("{verb} {space} memory that {thread} uses at {place}; no barrier orders them"),
                )
            } else {
                let block = other.block;
                (
                    Finding::RaceBetweenBlocks,
                    format!("{verb} {space} memory that {thread} of block number {block} uses at {place}"),
                )
            }
        };
        self.note(finding, &detail, address, who);
    }
}

/// Records an access in the cells of its words: the first access that it is not ordered after.
#[inline]
fn touch(cells: &mut [Cell], accessor: &Accessor, lane: usize, bytes: u16, write: bool) -> Option<Access> {
    let mut found = None;
    for cell in cells {
        let conflict =
            if write { cell.write(accessor, lane, bytes) } else { cell.read(accessor, lane, bytes) };
        found = found.or(conflict);
    }
    found
}

/// Up to 8 bytes as a number, with zeros or the sign before it.
#[inline]
pub(super) fn extended(bytes: &[u8], signed: bool) -> u64 {
    let mut all = [0u8; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    let value = u64::from_le_bytes(all);
    let unused = 64 - 8 * bytes.len() as u32;
    if signed { (((value << unused) as i64) >> unused) as u64 } else { value }
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
