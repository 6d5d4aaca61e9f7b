//! Device memory: addresses that the host cannot read, allocations, and which bytes were written.
//!
//! Addresses begin at 2^48, where no host memory lies, so a host that reads through one faults. Addresses are not used
//! again until the space is used up, so that an access to freed memory is seen. Allocations have room between them.

use std::collections::BTreeMap;

use crate::bits;
use crate::checks::{Accessor, Cell, Conflict, Finding, Lanes, ROW, Shadow};
use crate::mapping::Mapping;
pub use crate::parts::{Fault, Parts};
use crate::regions::Regions;
use crate::shared::SharedMemory;

/// Where generic addresses of shared memory begin.
pub const SHARED_WINDOW: u64 = 1 << 47;

/// Where generic addresses of local memory begin.
pub const LOCAL_WINDOW: u64 = 0xa000_0000_0000;

/// The size of both windows.
pub const WINDOW_BYTES: u64 = 1 << 32;

/// Where device memory begins.
pub const DEVICE_BASE: u64 = 1 << 48;

/// Allocations begin at multiples of this, as those of the driver do.
const ALIGN: usize = 512;

/// Unused bytes behind each allocation.
const GAP: usize = 512;

/// The memory of the device.
pub struct DeviceMemory {
    bytes: Mapping<u8>,
    /// Bytes where there is memory.
    pub(crate) valid: Mapping<u64>,
    /// Bytes that were written.
    written: Mapping<u64>,
    rows: Mapping<Cell>,
    words: Mapping<Cell>,
    /// The memory of the block that runs, which all launches use one after the other.
    pub(crate) shared: Option<SharedMemory>,
    space: usize,
    next: usize,
    live: BTreeMap<usize, usize>,
    freed: BTreeMap<usize, usize>,
    /// Regions within allocations that the program announced.
    pub(crate) regions: Regions,
}

impl DeviceMemory {
    /// A memory with room for `space` bytes of addresses.
    ///
    /// # Errors
    /// What the system says to such a reservation.
    pub fn new(space: usize) -> Result<Self, rustix::io::Errno> {
        Ok(Self {
            bytes: Mapping::new(space)?,
            valid: Mapping::new(bits::words_for(space))?,
            written: Mapping::new(bits::words_for(space))?,
            rows: Mapping::new(space.div_ceil(ROW))?,
            words: Mapping::new(space.div_ceil(4))?,
            shared: None,
            space,
            next: 0,
            live: BTreeMap::new(),
            freed: BTreeMap::new(),
            regions: Regions::default(),
        })
    }

    /// Allocates memory whose bytes are not written yet; `None` if the space is used up.
    pub fn allocate(&mut self, bytes: usize) -> Option<u64> {
        let start = self.next.next_multiple_of(ALIGN);
        let end = start.checked_add(bytes)?.checked_add(GAP)?;
        if end > self.space {
            return None;
        }
        self.next = end;
        self.live.insert(start, bytes);
        bits::add(self.valid.all(), start, bytes);
        Some(DEVICE_BASE + start as u64)
    }

    /// The allocation around a range, as its place and size.
    pub(crate) fn around(&self, address: u64, bytes: usize) -> Option<(usize, usize)> {
        let at = self.offset(address);
        let (&start, &size) = self.live.range(..=at).next_back()?;
        (address >= DEVICE_BASE && at + bytes <= start + size).then_some((start, size))
    }

    /// The addresses of the allocation around a range.
    pub fn range_around(&self, address: u64, bytes: usize) -> Option<std::ops::Range<u64>> {
        let (start, size) = self.around(address, bytes)?;
        let start = DEVICE_BASE + start as u64;
        Some(start..start + size as u64)
    }

    /// Refuses accesses to a range, whose bytes stay.
    pub(crate) fn take_valid(&mut self, at: usize, bytes: usize) {
        bits::remove(self.valid.all(), at, bytes);
    }

    /// Allows accesses to a range whose bytes count as not written.
    pub(crate) fn give_new(&mut self, at: usize, bytes: usize) {
        bits::add(self.valid.all(), at, bytes);
        bits::remove(self.written.all(), at, bytes);
    }

    /// Takes the memory of a range away.
    pub fn invalidate(&mut self, address: u64, bytes: usize) {
        let at = self.offset(address);
        let end = (at + bytes).next_multiple_of(ALIGN);
        self.regions.forget(at, bytes);
        self.valid.clear(at / 64, (end - at) / 64);
        self.written.clear(at / 64, (end - at) / 64);
        self.bytes.clear(at, bytes);
        self.rows.clear(at / ROW, bytes.div_ceil(ROW));
        self.words.clear(at / 4, bytes.div_ceil(4));
    }

    /// Frees a range that begins at an address: its size, or why not.
    pub fn free(&mut self, address: u64) -> Result<usize, String> {
        let at = self.offset(address);
        match self.live.get(&at) {
            Some(&bytes) => {
                self.invalidate(address, bytes);
                self.live.remove(&at);
                self.freed.insert(at, bytes);
                Ok(bytes)
            }
            None if self.freed.contains_key(&at) => Err("the memory was freed before".to_string()),
            None => Err("no allocation begins at the address".to_string()),
        }
    }

    /// Size of the live range that begins at an address.
    pub fn range(&self, address: u64) -> Option<usize> {
        self.live.get(&self.offset(address)).copied()
    }

    pub(crate) fn offset(&self, address: u64) -> usize {
        address.wrapping_sub(DEVICE_BASE) as usize
    }

    /// The place of accesses of `bytes` each, a power of two, to `count` bytes in a row.
    ///
    /// # Errors
    /// If they are not aligned or not within memory.
    #[inline]
    pub fn place(&mut self, address: u64, bytes: usize, count: usize) -> Result<usize, Fault> {
        let at = self.offset(address);
        let fits = at & (bytes - 1) == 0 && at < self.space && count <= self.space - at;
        if fits && bits::all(self.valid.all(), at, count) {
            return Ok(at);
        }
        Err(self.explain(address, bytes))
    }

    /// The memory as accesses see it.
    #[inline]
    pub fn parts(&mut self) -> Parts<'_> {
        Parts {
            bytes: self.bytes.all(),
            written: self.written.all(),
            pending: &mut [],
            shadow: Shadow { rows: self.rows.all(), words: self.words.all() },
        }
    }

    /// The bytes of a place.
    #[inline]
    pub fn bytes(&mut self, at: usize, count: usize) -> &mut [u8] {
        self.bytes.slice(at, count)
    }

    /// Why an access is refused.
    #[cold]
    pub fn explain(&self, address: u64, bytes: usize) -> Fault {
        let at = self.offset(address);
        let out_of_bounds = |detail| Fault { finding: Finding::OutOfBounds, detail };
        if address < DEVICE_BASE || at >= self.space {
            return out_of_bounds(format!("{bytes} bytes in no allocation of device memory"));
        }
        let live = self.live.range(..=at).next_back();
        let freed = self.freed.range(..=at).next_back();
        if let Some((&start, &size)) = live.filter(|&(&start, &size)| at < start + size) {
            let place = format!("{bytes} bytes at byte {} of {size}", at - start);
            let is_there = at + bytes <= start + size && self.valid_at(at);
            if is_there && !at.is_multiple_of(bytes.max(1)) && bytes <= 16 {
                return Fault { finding: Finding::Misaligned, detail: place };
            }
            if let Some(fault) = self.regions.explain((start, size), at, bytes) {
                return fault;
            }
            return out_of_bounds(place);
        }
        if let Some((&start, &size)) = freed.filter(|&(&start, &size)| at < start + size) {
            let detail = format!("{bytes} bytes at byte {} of {size} that were freed", at - start);
            return Fault { finding: Finding::UseAfterFree, detail };
        }
        out_of_bounds(match live {
            Some((&start, &size)) => {
                format!("{bytes} bytes, {} past the end of an allocation of {size} bytes", at - start - size)
            }
            None => format!("{bytes} bytes in no allocation of device memory"),
        })
    }

    fn valid_at(&self, at: usize) -> bool {
        // SAFETY: the word is within the mapping, as `at` checks.
        let word = unsafe { *self.valid.at(at / 64, 1) };
        word >> (at % 64) & 1 == 1
    }

    /// The place of a range that a copy uses.
    ///
    /// # Errors
    /// If it is not within memory.
    pub fn range_place(&mut self, address: u64, bytes: usize) -> Result<usize, Fault> {
        let at = self.offset(address);
        let within = address >= DEVICE_BASE && at < self.space && bytes <= self.space - at;
        if within && bits::all(self.valid.all(), at, bytes) {
            return Ok(at);
        }
        Err(self.explain(address, bytes))
    }

    /// Whether a range was written as a whole.
    pub fn is_range_written(&mut self, at: usize, bytes: usize) -> bool {
        bits::all(self.written.all(), at, bytes)
    }

    /// Marks a range as written.
    pub fn mark_range_written(&mut self, at: usize, bytes: usize) {
        bits::add(self.written.all(), at, bytes);
    }

    /// Copies bytes, and whether they were written, within the memory.
    pub fn copy_within(&mut self, to: usize, from: usize, bytes: usize) {
        let (source, target) = (self.bytes.at(from, bytes), self.bytes.at(to, bytes));
        // SAFETY: both ranges are within the mapping; they may overlap.
        unsafe { std::ptr::copy(source, target, bytes) };
        let written = self.written.all();
        if bits::all(written, from, bytes) {
            return bits::add(written, to, bytes);
        }
        let were_written: Vec<bool> = (from..from + bytes).map(|byte| bits::has(written, byte)).collect();
        for (byte, was_written) in (to..).zip(were_written) {
            if was_written { bits::add(written, byte, 1) } else { bits::remove(written, byte, 1) }
        }
    }

    /// Records the access of a copy to a range: the first access that it is not ordered after.
    pub fn record(&mut self, at: usize, bytes: usize, write: bool, accessor: &Accessor) -> Option<Conflict> {
        self.parts().shadow.touch::<false>(at, bytes, Lanes::ONE, accessor, write)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> DeviceMemory {
        DeviceMemory::new(1 << 24).unwrap()
    }

    #[test]
    fn places_are_within_allocations_and_aligned() {
        let mut memory = memory();
        let a = memory.allocate(100).unwrap();
        assert!(memory.place(a + 96, 4, 4).is_ok());
        let finding = |memory: &mut DeviceMemory, address, bytes| {
            memory.place(address, bytes, bytes).unwrap_err().finding
        };
        assert_eq!(finding(&mut memory, a + 100, 4), Finding::OutOfBounds);
        assert_eq!(finding(&mut memory, a + 98, 4), Finding::OutOfBounds);
        assert_eq!(finding(&mut memory, a + 2, 4), Finding::Misaligned);
        assert_eq!(finding(&mut memory, 16, 4), Finding::OutOfBounds);
        assert_eq!(memory.free(a), Ok(100));
        assert_eq!(finding(&mut memory, a + 4, 4), Finding::UseAfterFree);
        let b = memory.allocate(100).unwrap();
        assert_ne!(a, b);
        assert_eq!(finding(&mut memory, a + 4, 4), Finding::UseAfterFree);
        assert!(memory.free(a).unwrap_err().contains("before"));
    }

    #[test]
    fn written_bytes_are_known() {
        let mut memory = memory();
        let a = memory.allocate(64).unwrap();
        let at = memory.place(a, 16, 16).unwrap();
        assert!(!memory.is_range_written(at, 4));
        memory.mark_range_written(at + 4, 4);
        assert!(memory.is_range_written(at + 4, 4) && memory.is_range_written(at + 6, 2));
        assert!(!memory.is_range_written(at, 8));
        memory.mark_range_written(at, 37);
        assert!(memory.is_range_written(at, 37) && !memory.is_range_written(at, 38));
        let b = memory.allocate(64).unwrap();
        let to = memory.range_place(b, 64).unwrap();
        memory.copy_within(to, at, 64);
        assert!(memory.is_range_written(to, 37) && !memory.is_range_written(to + 30, 10));
        assert!(memory.range_place(b, 65).is_err());
    }
}
