//! One contiguous piece of mapped memory: what an arena hands out addresses from.
//!
//! A region is private to the process, or a memfd that other ranks of the host map too, so that
//! collectives read each other's buffers in place. A device whose memory the host must not touch maps its memfd a second
//! time without access, and its tensors carry those addresses. Either kind of memory asks for huge pages: private memory gets them where
//! `transparent_hugepage/enabled` is not `never`, a memfd where `shmem_enabled` is `advise` or more.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Size of a huge page, in bytes.
pub const HUGE: usize = 2 << 20;

/// Mapped, zero-filled memory; unmapped when dropped.
pub struct Region {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a Region is an address range that stays mapped until it is dropped; it hands out no
// references itself. Who may touch which bytes when is kept by Buffer (unique ownership per slot).
unsafe impl Send for Region {}
// SAFETY: as above; all methods take &self and change nothing but page residence.
unsafe impl Sync for Region {}

/// Asks for huge pages in a mapped range that starts on a page. Best effort: a kernel without them refuses.
pub(crate) fn ask_for_huge_pages(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the advice changes the size of pages only.
    let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
}

impl Region {
    /// Private memory of `bytes` (rounded up to a page), in huge pages where the system has them.
    ///
    /// # Errors
    /// The system's, when it refuses the mapping.
    pub fn anonymous(bytes: usize) -> std::io::Result<Region> {
        let bytes = bytes.max(1).next_multiple_of(4096);
        // SAFETY: a new private mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        Ok(Region::mapped(base, bytes))
    }

    /// `bytes` of a memfd, shared with everyone who maps it, in huge pages where the system has them for such
    /// memory. The file must be at least that long.
    ///
    /// # Errors
    /// The system's, when it refuses the mapping.
    pub fn shared(memory: BorrowedFd<'_>, bytes: usize) -> std::io::Result<Region> {
        Region::of_file(memory, bytes, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// Addresses for `bytes` of a memfd that nobody may follow: a read or write faults. Another mapping of the same
    /// file gives access ([`Region::shared`]).
    ///
    /// # Errors
    /// The system's, when it refuses the mapping.
    pub fn without_access(memory: BorrowedFd<'_>, bytes: usize) -> std::io::Result<Region> {
        Region::of_file(memory, bytes, ProtFlags::empty())
    }

    fn of_file(memory: BorrowedFd<'_>, bytes: usize, access: ProtFlags) -> std::io::Result<Region> {
        let bytes = bytes.max(1).next_multiple_of(4096);
        // SAFETY: a new mapping at an address of the kernel's choice; other processes may write the
        // same pages, which the protocol of the process group orders.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, memory, 0)? };
        Ok(Region::mapped(base, bytes))
    }

    /// The region over a range that was just mapped.
    fn mapped(base: *mut std::ffi::c_void, bytes: usize) -> Region {
        let base = NonNull::new(base.cast::<u8>()).expect("the kernel never maps at address zero");
        ask_for_huge_pages(base, bytes);
        Region { base, bytes }
    }

    /// Makes the pages of `range` (which starts on a page) resident now, by the thread that calls.
    /// `phalanx_cpu::Cpu::populate` does it for all pages, on all threads.
    ///
    /// # Errors
    /// The system's: out of memory, above all; `InvalidInput` from kernels before 5.14, which give pages at the
    /// first touch alone.
    pub fn populate(&self, range: Range<usize>) -> std::io::Result<()> {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {} bytes", self.bytes);
        // SAFETY: the range lies inside the mapping (asserted).
        let start = unsafe { self.base.as_ptr().add(range.start) };
        // SAFETY: mapped memory; populating does not change its contents.
        unsafe { rustix::mm::madvise(start.cast(), range.len(), Advice::LinuxPopulateWrite)? };
        Ok(())
    }

    /// Locks the pages in memory, which makes them resident.
    ///
    /// # Errors
    /// If the system lets this process lock fewer bytes: the error says how many, and how to raise the limit.
    pub fn lock(&self) -> std::io::Result<()> {
        // SAFETY: the range is mapped; locking its pages does not change them. They are unlocked when they are unmapped.
        let locked = unsafe { rustix::mm::mlock(self.base.as_ptr().cast(), self.bytes) };
        locked.map_err(|error| {
            let error = std::io::Error::from(error);
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit = limit.map_or("no limit".to_string(), |limit| format!("{limit} bytes"));
            let text = format!(
                "{} bytes of host memory cannot be locked: {error}; the limit of this process (RLIMIT_MEMLOCK) is {limit}: \
                 raise it with `ulimit -l unlimited`, LimitMEMLOCK= of systemd or --ulimit memlock=-1 of a container, or \
                 leave out memory.pin_memory",
                self.bytes
            );
            std::io::Error::new(error.kind(), text)
        })
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped in the constructor with this length; every Buffer holds its arena, and the
        // arena its region, so nobody can still point into it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
