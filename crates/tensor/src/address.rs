//! Addresses of memory: of a device, of a disk, or of a dry run, which has none.

use std::ptr::NonNull;

/// Position of memory: an address that only its device may follow, an offset on disk, or on `Meta` an allocation and an offset in
/// it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address(pub(crate) Location);

/// Kinds of [`Address`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Location {
    Memory(NonNull<u8>),
    /// Bytes from the start of the disk memory.
    Disk(u64),
    /// As in [`Spot`]; its fields, so that an address is two words.
    Nowhere {
        allocation: u32,
        offset: u64,
    },
}

const _: () = assert!(size_of::<Address>() == 16);

/// A position within an allocation of a dry run, which has no memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Spot {
    /// Number of the allocation in the trace.
    pub(crate) allocation: u32,
    /// Bytes from its start.
    pub(crate) offset: u64,
}

// SAFETY: an address is a number; the views that carry it keep the borrow rules.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    pub(crate) fn memory(at: NonNull<u8>) -> Address {
        Address(Location::Memory(at))
    }

    pub(crate) fn nowhere(allocation: u32) -> Address {
        Address(Location::Nowhere { allocation, offset: 0 })
    }

    pub(crate) fn on_disk(offset: u64) -> Address {
        Address(Location::Disk(offset))
    }

    /// The address `bytes` further on; inside the same allocation.
    pub(crate) fn add(self, bytes: usize) -> Address {
        Address(match self.0 {
            // SAFETY: every caller checks that the offset stays inside the allocation.
            Location::Memory(p) => Location::Memory(unsafe { p.add(bytes) }),
            Location::Disk(offset) => Location::Disk(offset + bytes as u64),
            Location::Nowhere { allocation, offset } => {
                Location::Nowhere { allocation, offset: offset + bytes as u64 }
            }
        })
    }

    /// The real address; None on disk and on `Meta`.
    pub(crate) fn real(self) -> Option<NonNull<u8>> {
        match self.0 {
            Location::Memory(p) => Some(p),
            Location::Disk(_) | Location::Nowhere { .. } => None,
        }
    }

    /// The offset in the disk memory; None elsewhere.
    pub fn disk_offset(self) -> Option<u64> {
        match self.0 {
            Location::Disk(offset) => Some(offset),
            Location::Memory(_) | Location::Nowhere { .. } => None,
        }
    }

    /// The place in a dry run; None on a device with memory.
    pub(crate) fn spot(self) -> Option<Spot> {
        match self.0 {
            Location::Memory(_) | Location::Disk(_) => None,
            Location::Nowhere { allocation, offset } => Some(Spot { allocation, offset }),
        }
    }

    /// A number that orders addresses: two ranges of one rank overlap exactly if their numbers do. On a device with memory
    /// it has 64 bits.
    pub fn number(self) -> u128 {
        match self.0 {
            Location::Memory(p) => p.as_ptr().addr() as u128,
            // Above all addresses of a process.
            Location::Disk(offset) => (1 << 63) | u128::from(offset),
            Location::Nowhere { allocation, offset } => (u128::from(allocation) << 64) | u128::from(offset),
        }
    }

    /// The address so many bytes further on, or back, in another mapping of the same memory; unchanged on disk and on
    /// `Meta`.
    #[must_use]
    pub fn moved(self, bytes: isize) -> Address {
        match self.0 {
            Location::Memory(p) => {
                let moved = p.as_ptr().wrapping_offset(bytes);
                Address::memory(NonNull::new(moved).expect("a mapping is never at address zero"))
            }
            Location::Disk(_) | Location::Nowhere { .. } => self,
        }
    }

    /// As a raw pointer; null on disk and on `Meta`.
    pub fn as_ptr(self) -> *mut u8 {
        self.real().map_or(std::ptr::null_mut(), |p| p.as_ptr())
    }
}
