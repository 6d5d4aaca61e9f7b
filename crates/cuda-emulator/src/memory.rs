//! Device memory: addresses that the host cannot read, allocations, and which bytes were written.
//!
//! Addresses begin at 2^48, where no host memory lies, so a host that reads through one faults. Addresses are not used
//! again until the space is used up, so that an access to freed memory is seen. Allocations have room between them.

use std::collections::BTreeMap;

use crate::checks::{Access, Accessor, Cell, Finding};
use crate::mapping::Mapping;

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

/// An access that hardware or driver would refuse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What is wrong.
    pub finding: Finding,
    /// The allocation that is near, or was there.
    pub detail: String,
}

/// What an address range holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeKind {
    /// `cuMemAlloc` and variables of modules.
    Allocation,
    /// `cuMemAddressReserve`: no memory until it is mapped.
    Reservation,
}

/// The memory of the device.
pub struct DeviceMemory {
    bytes: Mapping<u8>,
    /// One bit per byte: whether there is memory.
    valid: Mapping<u8>,
    /// One bit per byte: whether it was written.
    written: Mapping<u8>,
    cells: Mapping<Cell>,
    space: usize,
    next: usize,
    live: BTreeMap<usize, (usize, RangeKind)>,
    freed: BTreeMap<usize, usize>,
}

impl DeviceMemory {
    /// A memory with room for `space` bytes of addresses.
    ///
    /// # Errors
    /// What the system says to such a reservation.
    pub fn new(space: usize) -> Result<Self, rustix::io::Errno> {
        Ok(Self {
            bytes: Mapping::new(space)?,
            valid: Mapping::new(space / 8 + 8)?,
            written: Mapping::new(space / 8 + 8)?,
            cells: Mapping::new(space / 4 + 4)?,
            space,
            next: 0,
            live: BTreeMap::new(),
            freed: BTreeMap::new(),
        })
    }

    /// Reserves addresses; `None` if the space is used up.
    pub fn reserve(&mut self, bytes: usize, align: usize, kind: RangeKind) -> Option<u64> {
        let start = self.next.next_multiple_of(align.max(ALIGN));
        let end = start.checked_add(bytes)?.checked_add(GAP)?;
        if end > self.space {
            return None;
        }
        self.next = end;
        self.live.insert(start, (bytes, kind));
        Some(DEVICE_BASE + start as u64)
    }

    /// Allocates memory whose bytes are not written yet; `None` if the space is used up.
    pub fn allocate(&mut self, bytes: usize) -> Option<u64> {
        let address = self.reserve(bytes, ALIGN, RangeKind::Allocation)?;
        self.validate(address, bytes);
        Some(address)
    }

    /// Gives a range memory.
    pub fn validate(&mut self, address: u64, bytes: usize) {
        let at = self.offset(address);
        set_bits(&mut self.valid, at, bytes);
    }

    /// Takes the memory of a range away.
    pub fn invalidate(&mut self, address: u64, bytes: usize) {
        let at = self.offset(address);
        let end = (at + bytes).next_multiple_of(ALIGN);
        self.valid.clear(at / 8, (end - at) / 8);
        self.written.clear(at / 8, (end - at) / 8);
        self.bytes.clear(at, bytes);
        self.cells.clear(at / 4, bytes.div_ceil(4));
    }

    /// Frees a range that begins at an address: its size, or why not.
    pub fn free(&mut self, address: u64, kind: RangeKind) -> Result<usize, String> {
        let at = self.offset(address);
        match self.live.get(&at) {
            Some(&(bytes, found)) if found == kind => {
                self.invalidate(address, bytes);
                self.live.remove(&at);
                self.freed.insert(at, bytes);
                Ok(bytes)
            }
            Some(_) => Err("the address is of another kind of range".to_string()),
            None if self.freed.contains_key(&at) => Err("the memory was freed before".to_string()),
            None => Err("no allocation begins at the address".to_string()),
        }
    }

    /// Size of the live range that begins at an address.
    pub fn range(&self, address: u64) -> Option<(usize, RangeKind)> {
        self.live.get(&self.offset(address)).copied()
    }

    /// Whether a range lies within one of reserved addresses.
    pub fn is_reserved(&self, address: u64, bytes: usize) -> bool {
        let at = self.offset(address);
        let before = self.live.range(..=at).next_back();
        before.is_some_and(|(&start, &(size, kind))| {
            kind == RangeKind::Reservation && at + bytes <= start + size
        })
    }

    fn offset(&self, address: u64) -> usize {
        address.wrapping_sub(DEVICE_BASE) as usize
    }

    /// The place of an access of a thread: at most 16 bytes, aligned to their number.
    ///
    /// # Errors
    /// If it is not aligned or not within memory.
    #[inline]
    pub fn place(&mut self, address: u64, bytes: usize) -> Result<usize, Fault> {
        let at = self.offset(address);
        // The number of bytes is a power of two.
        if at & (bytes - 1) == 0 && at < self.space {
            let mask = ones(bytes) << (at % 8);
            if self.bits(at, false) & mask == mask {
                return Ok(at);
            }
        }
        Err(self.explain(address, bytes))
    }

    /// Whether all bytes of a place were written.
    #[inline]
    pub fn is_written(&mut self, at: usize, bytes: usize) -> bool {
        let mask = ones(bytes) << (at % 8);
        self.bits(at, true) & mask == mask
    }

    /// The bits of up to 16 bytes from the byte of a place.
    #[inline]
    fn bits(&self, at: usize, written: bool) -> u32 {
        let map = if written { &self.written } else { &self.valid };
        let start = map.at(at / 8, 3);
        // SAFETY: three bytes from here are within the mapping.
        unsafe { u32::from(start.cast::<u16>().read_unaligned()) | u32::from(*start.add(2)) << 16 }
    }

    /// Marks up to 16 bytes of a place as written.
    #[inline]
    pub fn mark_written(&mut self, at: usize, bytes: usize) {
        let mask = ones(bytes) << (at % 8);
        for (byte, bits) in self.written.slice(at / 8, 3).iter_mut().zip(mask.to_le_bytes()) {
            *byte |= bits;
        }
    }

    /// The bytes of a place.
    #[inline]
    pub fn bytes(&mut self, at: usize, count: usize) -> &mut [u8] {
        self.bytes.slice(at, count)
    }

    /// The cells of the words that bytes of a place lie in.
    #[inline]
    pub fn cells(&mut self, at: usize, count: usize) -> &mut [Cell] {
        self.cells.slice(at / 4, (at + count).div_ceil(4) - at / 4)
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
        if let Some((&start, &(size, kind))) = live.filter(|&(&start, &(size, _))| at < start + size) {
            let place = format!("{bytes} bytes at byte {} of {size}", at - start);
            if at + bytes <= start + size && !at.is_multiple_of(bytes.max(1)) && bytes <= 16 {
                return Fault { finding: Finding::Misaligned, detail: place };
            }
            return out_of_bounds(match kind {
                RangeKind::Allocation => place,
                RangeKind::Reservation => format!("{place} in an address range that is not mapped there"),
            });
        }
        if let Some((&start, &size)) = freed.filter(|&(&start, &size)| at < start + size) {
            let detail = format!("{bytes} bytes at byte {} of {size} that were freed", at - start);
            return Fault { finding: Finding::UseAfterFree, detail };
        }
        out_of_bounds(match live {
            Some((&start, &(size, _))) => {
                format!("{bytes} bytes, {} past the end of an allocation of {size} bytes", at - start - size)
            }
            None => format!("{bytes} bytes in no allocation of device memory"),
        })
    }

    /// The place of a range that a copy uses.
    ///
    /// # Errors
    /// If it is not within memory.
    pub fn range_place(&mut self, address: u64, bytes: usize) -> Result<usize, Fault> {
        let at = self.offset(address);
        let within = address >= DEVICE_BASE && at < self.space && bytes <= self.space - at;
        if within && all_bits(&mut self.valid, at, bytes) {
            return Ok(at);
        }
        Err(self.explain(address, bytes))
    }

    /// Whether a range was written as a whole.
    pub fn is_range_written(&mut self, at: usize, bytes: usize) -> bool {
        all_bits(&mut self.written, at, bytes)
    }

    /// Marks a range as written.
    pub fn mark_range_written(&mut self, at: usize, bytes: usize) {
        set_bits(&mut self.written, at, bytes);
    }

    /// Copies bytes, and whether they were written, within the memory.
    pub fn copy_within(&mut self, to: usize, from: usize, bytes: usize) {
        let (source, target) = (self.bytes.at(from, bytes), self.bytes.at(to, bytes));
        // SAFETY: both ranges are within the mapping; they may overlap.
        unsafe { std::ptr::copy(source, target, bytes) };
        for byte in 0..bytes {
            let was_written = self.written.slice((from + byte) / 8, 1)[0] >> ((from + byte) % 8) & 1;
            let at = to + byte;
            let bits = &mut self.written.slice(at / 8, 1)[0];
            *bits = *bits & !(1 << (at % 8)) | was_written << (at % 8);
        }
    }

    /// Records the access of a copy to a range: the first access that it is not ordered after.
    pub fn record(
        &mut self,
        at: usize,
        bytes: usize,
        write: bool,
        accessor: &Accessor,
    ) -> Option<(usize, Access)> {
        let mut conflict = None;
        for (index, cell) in self.cells(at, bytes).iter_mut().enumerate() {
            let found = if write {
                cell.write::<false>(accessor, 0, 15)
            } else {
                cell.read::<false>(accessor, 0, 15)
            };
            conflict = conflict.or(found.map(|access| ((at / 4 + index) * 4, access)));
        }
        conflict
    }
}

/// The bits of up to 16 bytes.
#[inline]
fn ones(bytes: usize) -> u32 {
    (1 << bytes) - 1
}

fn set_bits(map: &mut Mapping<u8>, at: usize, count: usize) {
    let bits = map.slice(at / 8, (at + count).div_ceil(8) - at / 8);
    for_bits(at, count, |index, mask| bits[index] |= mask);
}

fn all_bits(map: &mut Mapping<u8>, at: usize, count: usize) -> bool {
    let bits = map.slice(at / 8, (at + count).div_ceil(8) - at / 8);
    let mut all = true;
    for_bits(at, count, |index, mask| all &= bits[index] & mask == mask);
    all
}

/// Visits the bytes of a range of bits: index and which bits of it.
fn for_bits(at: usize, count: usize, mut visit: impl FnMut(usize, u8)) {
    let (first, end) = (at / 8, (at + count).div_ceil(8));
    for byte in first..end {
        let from = at.max(byte * 8) - byte * 8;
        let to = (at + count).min(byte * 8 + 8) - byte * 8;
        visit(byte - first, ((1u16 << to) - (1u16 << from)) as u8);
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
        assert!(memory.place(a + 96, 4).is_ok());
        let finding =
            |memory: &mut DeviceMemory, address, bytes| memory.place(address, bytes).unwrap_err().finding;
        assert_eq!(finding(&mut memory, a + 100, 4), Finding::OutOfBounds);
        assert_eq!(finding(&mut memory, a + 98, 4), Finding::OutOfBounds);
        assert_eq!(finding(&mut memory, a + 2, 4), Finding::Misaligned);
        assert_eq!(finding(&mut memory, 16, 4), Finding::OutOfBounds);
        assert_eq!(memory.free(a, RangeKind::Allocation), Ok(100));
        assert_eq!(finding(&mut memory, a + 4, 4), Finding::UseAfterFree);
        let b = memory.allocate(100).unwrap();
        assert_ne!(a, b);
        assert_eq!(finding(&mut memory, a + 4, 4), Finding::UseAfterFree);
        assert!(memory.free(a, RangeKind::Allocation).unwrap_err().contains("before"));
    }

    #[test]
    fn written_bytes_are_known() {
        let mut memory = memory();
        let a = memory.allocate(64).unwrap();
        let at = memory.place(a, 16).unwrap();
        assert!(!memory.is_written(at, 4));
        memory.mark_written(at + 4, 4);
        assert!(memory.is_written(at + 4, 4) && memory.is_written(at + 6, 2));
        assert!(!memory.is_written(at, 8));
        memory.mark_range_written(at, 37);
        assert!(memory.is_range_written(at, 37) && !memory.is_range_written(at, 38));
        let b = memory.allocate(64).unwrap();
        let to = memory.range_place(b, 64).unwrap();
        memory.copy_within(to, at, 64);
        assert!(memory.is_range_written(to, 37) && !memory.is_range_written(to + 30, 10));
        assert!(memory.range_place(b, 65).is_err());
    }
}
