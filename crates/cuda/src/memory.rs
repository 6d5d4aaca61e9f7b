//! Memory: that of the card, and host memory that the card reaches.
//!
//! Device memory is taken once, when the device is made: the arena, and scratch for kernels. Tensors carry addresses of a range
//! that is reserved without access, so the host faults where it follows one; a fixed distance leads to the card's own
//! addresses. The host arena, which transports share, is ordinary memory that is registered with the driver; small buffers are the
//! driver's own, which every system gives. None is write-combined, as cudarc's is, because a processor reads that very slowly.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;
use phalanx_tensor::Region;
use rustix::fs::MemfdFlags;

use crate::driver::{Context, driver};
use crate::error::Error;

/// Bytes of a page of the host's memory.
const PAGE: usize = 4096;

/// Flags of registered memory: usable by all contexts, and by what runs on their cards.
const REGISTERED: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// Memory of the card.
pub(crate) struct CardMemory {
    context: Arc<Context>,
    start: u64,
    bytes: usize,
}

impl CardMemory {
    /// Takes `bytes` of the card's memory, rounded up to a page of the host; `purpose` is for the error.
    pub(crate) fn new(
        context: &Arc<Context>,
        bytes: u64,
        purpose: &'static str,
    ) -> Result<CardMemory, Error> {
        context.enter()?;
        context.made.count_allocation();
        let bytes = (bytes.max(1) as usize).next_multiple_of(PAGE);
        let mut memory = CardMemory { context: Arc::clone(context), start: 0, bytes };
        // SAFETY: the context is current; the address is there to be written.
        let allocated = unsafe { driver!(cuMemAlloc_v2(&mut memory.start, bytes)) };
        allocated.map_err(|error| memory.explain(error, bytes as u64, purpose))?;
        Ok(memory)
    }

    /// An error of the driver, or how much memory there is where that was missing.
    fn explain(&self, error: Error, needed_bytes: u64, purpose: &'static str) -> Error {
        match (&error, self.context.memory()) {
            (Error::Driver { name, .. }, Ok((free_bytes, total_bytes)))
                if name == "CUDA_ERROR_OUT_OF_MEMORY" =>
            {
                let index = self.context.card.index;
                Error::OutOfMemory { index, needed_bytes, free_bytes, total_bytes, purpose }
            }
            _ => error,
        }
    }

    /// Sets all bytes to 0.
    fn clear(&self) -> Result<(), Error> {
        self.context.enter()?;
        let stream = std::ptr::null_mut();
        // SAFETY: the memory is there; null is the context's first stream, which is there without being created.
        unsafe {
            driver!(cuMemsetD8Async(self.start, 0, self.bytes, stream))?;
            driver!(cuStreamSynchronize(stream))
        }
    }

    /// The first address.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Length.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for CardMemory {
    fn drop(&mut self) {
        if self.start != 0 && self.context.enter().is_ok() {
            // SAFETY: allocated in `new`. Whoever owns the memory has waited for all work on it. A failure leaves it to the end of the
            // process.
            let _ = unsafe { driver!(cuMemFree_v2(self.start)) };
        }
    }
}

/// The memory from which tensors come: the addresses that they carry, and where they lie on the card.
pub(crate) struct TensorMemory {
    memory: CardMemory,
    addresses: Range<usize>,
}

impl TensorMemory {
    /// Takes `bytes` of the card's memory for tensors; the region has their addresses.
    pub(crate) fn new(context: &Arc<Context>, bytes: u64) -> Result<(TensorMemory, Region), Error> {
        let memory = CardMemory::new(context, bytes, "tensors")?;
        // The file has no pages: nobody can touch them.
        let map = || -> std::io::Result<Region> {
            let file = rustix::fs::memfd_create("phalanx-cuda", MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&file, memory.bytes() as u64)?;
            Region::without_access(file.as_fd(), memory.bytes())
        };
        let region = map().map_err(|error| Error::Addresses { bytes, error })?;
        let start = region.base().addr();
        Ok((TensorMemory { addresses: start..start + region.bytes(), memory }, region))
    }

    /// Sets all bytes to 0, as memory of the host is when a process gets it: what lies between tensors is copied with them.
    pub(crate) fn clear(&self) -> Result<(), Error> {
        self.memory.clear()
    }

    /// The addresses of this memory on the card.
    pub(crate) fn on_card(&self) -> Range<u64> {
        self.memory.start()..self.memory.start() + self.memory.bytes() as u64
    }

    /// The distance from a tensor's address to the card's, if the tensor lies in this memory.
    pub(crate) fn distance(&self, address: usize) -> Option<isize> {
        let there = self.memory.start() as usize;
        self.addresses
            .contains(&address)
            .then(|| (there as isize).wrapping_sub(self.addresses.start as isize))
    }
}

/// Host memory that the driver knows: copies from and to it run beside the host.
pub(crate) struct Registered {
    context: Arc<Context>,
    start: usize,
}

impl Registered {
    /// Registers the memory of a region.
    ///
    /// # Safety
    /// The region stays mapped until what is returned is dropped.
    pub(crate) unsafe fn new(context: &Arc<Context>, region: &Region) -> Result<Registered, Error> {
        context.enter()?;
        context.made.count_allocation();
        // SAFETY: the region is mapped (the caller's promise), and the flags are those of the function.
        unsafe { driver!(cuMemHostRegister_v2(region.base().cast(), region.bytes(), REGISTERED))? };
        Ok(Registered { context: Arc::clone(context), start: region.base().expose_provenance() })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: registered in `new`, and still mapped. A failure leaves it registered.
            let _ =
                unsafe { driver!(cuMemHostUnregister(std::ptr::with_exposed_provenance_mut(self.start))) };
        }
    }
}

/// Host memory of the device's own, which the card reaches; zero-filled.
pub(crate) struct HostBuffer {
    context: Arc<Context>,
    base: NonNull<u8>,
}

// SAFETY: a range of addresses that stays until it is dropped; who may touch which bytes when is kept by its owner.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<HostBuffer, Error> {
        context.enter()?;
        context.made.count_allocation();
        let mut base: *mut c_void = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current; the address is there to be written.
        unsafe { driver!(cuMemHostAlloc(&mut base, bytes, flags))? };
        let base = NonNull::new(base.cast::<u8>()).expect("the driver has allocated memory");
        // SAFETY: just allocated with this length.
        unsafe { base.write_bytes(0, bytes) };
        Ok(HostBuffer { context: Arc::clone(context), base })
    }

    /// The first byte, for the host.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: allocated in `new`. A failure leaves it to the end of the process.
            let _ = unsafe { driver!(cuMemFreeHost(self.base.as_ptr().cast())) };
        }
    }
}
