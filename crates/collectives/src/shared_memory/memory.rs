//! Access of a rank to the buffers of other ranks.
//!
//! Threads offer addresses. Processes offer offsets in their arenas, memfds that every rank can map: the
//! reader checks offset and length against the peer's published arena, and maps it at first use. Arenas
//! are sealed against shrinking before they are published, so a checked range cannot vanish.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use phalanx_simd::Isa;
use phalanx_tensor::Region;

use crate::error::CollectiveError;
use crate::shared_memory::control::Control;

/// A range of this rank's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryRange {
    pub(crate) address: *mut u8,
    pub(crate) bytes: usize,
}

// SAFETY: a range is an address and a length. Pending, which owns the tensor, ensures that the memory is valid when it
// is read or written.
unsafe impl Send for MemoryRange {}

impl MemoryRange {
    pub(crate) const EMPTY: MemoryRange = MemoryRange { address: std::ptr::null_mut(), bytes: 0 };

    /// A part of the range.
    pub(crate) fn range(self, start: usize, bytes: usize) -> MemoryRange {
        assert!(start + bytes <= self.bytes, "{bytes} bytes at {start} exceed {self:?}");
        // SAFETY: stays inside (asserted).
        MemoryRange { address: unsafe { self.address.add(start) }, bytes }
    }

    /// Overwrites the range with as many bytes from `source`.
    ///
    /// # Safety
    /// The processor has `isa`. Only this rank writes the range; the source is readable and not written meanwhile; they
    /// do not overlap.
    pub(crate) unsafe fn fill_from(self, isa: Isa, source: *const u8) {
        if self.bytes > 0 {
            // SAFETY: passed on.
            unsafe { phalanx_simd::copy(isa, source, self.address, self.bytes) };
        }
    }
}

/// Means by which this rank finds the buffers that peers offer.
pub(crate) enum Memory {
    /// All ranks in one address space.
    Threads,
    /// Each rank's arena is a file.
    Processes(Arenas),
}

pub(crate) struct Arenas {
    /// The first rank of this host.
    first: usize,
    /// A file per rank of this host.
    files: Vec<OwnedFd>,
    /// Base and bytes of this rank's own mapping.
    own: OnceLock<(usize, usize)>,
    peers: Vec<OnceLock<Region>>,
}

impl Arenas {
    /// The arenas of the ranks of this host, of which `first` is the first.
    pub(crate) fn new(first: usize, files: Vec<OwnedFd>) -> Arenas {
        let peers = files.iter().map(|_| OnceLock::new()).collect();
        Arenas { first, files, own: OnceLock::new(), peers }
    }

    /// Gives this rank's arena its size and maps it.
    pub(crate) fn create(&self, rank: usize, bytes: usize) -> std::io::Result<Region> {
        let bytes = bytes.max(1).next_multiple_of(4096);
        let file = &self.files[rank - self.first];
        rustix::fs::ftruncate(file, bytes as u64)?;
        // Peers will map the file, so from here on no process, including this one, can shrink it.
        let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
        rustix::fs::fcntl_add_seals(file, seals)?;
        let region = Region::shared(file.as_fd(), bytes)?;
        let first = self.own.set((region.base().expose_provenance(), region.bytes())).is_ok();
        assert!(first, "a rank has one arena");
        Ok(region)
    }

    /// The offset of a range in this rank's arena; None for one outside.
    fn offset(&self, span: MemoryRange) -> Option<u64> {
        let (base, bytes) = *self.own.get()?;
        let offset = span.address.addr().wrapping_sub(base);
        (offset <= bytes && span.bytes <= bytes - offset).then_some(offset as u64)
    }

    fn mapped(&self, control: &Control, rank: usize) -> std::io::Result<&Region> {
        let place = rank - self.first;
        if let Some(region) = self.peers[place].get() {
            return Ok(region);
        }
        let file = &self.files[place];
        let bytes = control.rank(rank).arena_bytes.load(Ordering::Acquire);
        let length = rustix::fs::fstat(file)?.st_size as u64;
        let sealed = rustix::fs::fcntl_get_seals(file)?;
        if bytes == 0 || bytes > length || !sealed.contains(rustix::fs::SealFlags::SHRINK) {
            let text = format!("an arena of {bytes} bytes in a file of {length}, seals {sealed:?}");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
        }
        let region = Region::shared(file.as_fd(), bytes as usize)?;
        Ok(self.peers[place].get_or_init(|| region))
    }
}

impl Memory {
    /// The number that identifies a buffer of `rank`, this rank, to peers: its address, or its offset in the arena.
    ///
    /// # Errors
    /// A buffer that other processes cannot read.
    pub(crate) fn offer(&self, rank: usize, span: MemoryRange) -> Result<u64, CollectiveError> {
        match self {
            _ if span.bytes == 0 => Ok(0),
            Memory::Threads => Ok(span.address.expose_provenance() as u64),
            Memory::Processes(arenas) => {
                arenas.offset(span).ok_or(CollectiveError::NotShared { rank, bytes: span.bytes })
            }
        }
    }

    /// The address, in this rank, of the `bytes` that `rank` offered as `source`.
    pub(crate) fn find(
        &self,
        control: &Control,
        rank: usize,
        source: u64,
        bytes: u64,
    ) -> Result<*const u8, CollectiveError> {
        if bytes == 0 {
            return Ok(std::ptr::null());
        }
        let arenas = match self {
            Memory::Threads => return Ok(std::ptr::with_exposed_provenance(source as usize)),
            Memory::Processes(arenas) => arenas,
        };
        let unreadable = |report: String| CollectiveError::Unreadable { rank, report };
        let region = arenas.mapped(control, rank).map_err(|e| unreadable(e.to_string()))?;
        let length = region.bytes() as u64;
        if source > length || bytes > length - source {
            return Err(unreadable(format!("{bytes} bytes at {source} of an arena of {length}")));
        }
        // SAFETY: inside the mapping (checked), which lives as long as self.
        Ok(unsafe { region.base().add(source as usize) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;

    /// A peer's offer of buffers is checked before it is used.
    #[test]
    fn offers_outside_a_sealed_arena_are_refused() {
        let control = Control::create(Region::anonymous(Control::bytes(2)).unwrap(), 2, 1);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let files: Vec<OwnedFd> = (0..2).map(|_| rustix::fs::memfd_create("test", flags).unwrap()).collect();
        let copies = files.iter().map(|f| f.try_clone().unwrap()).collect();
        let (own, peer) = (Memory::Processes(Arenas::new(0, files)), Arenas::new(0, copies));
        let find = |source, bytes| own.find(&control, 1, source, bytes);

        assert!(find(0, 64).is_err(), "no arena yet");
        control.rank(1).arena_bytes.store(8192, Ordering::Release);
        assert!(find(0, 64).is_err(), "an arena longer than its file");
        let region = peer.create(1, 8192).unwrap();
        // SAFETY: the first byte of a fresh mapping of this test's own.
        unsafe { region.base().write(42) };
        for (source, bytes) in [(8192, 1), (0, 8193), (u64::MAX, 2), (1, u64::MAX)] {
            assert!(find(source, bytes).is_err(), "{bytes} bytes at {source}");
        }
        // SAFETY: inside the arena, as find has checked; nobody writes it.
        assert_eq!(unsafe { *find(0, 8192).unwrap() }, 42);
        assert!(rustix::fs::ftruncate(&peer.files[1], 4096).is_err(), "sealed");
    }
}
