//! Memory: that of the card, reserved and mapped by virtual memory management, and host memory that the card reaches.
//!
//! Device memory is taken once, when the device is made: the arena, and scratch for kernels. Tensors carry addresses of a range
//! that is reserved without access, so the host faults where it follows one; a fixed distance leads to the card's own
//! addresses. Host memory is ordinary memory that is registered with the driver: what cudarc allocates as pinned is
//! write-combined, which a processor reads very slowly.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use cudarc::driver::sys;
use phalanx_tensor::Region;
use rustix::fs::MemfdFlags;

use crate::driver::{Context, driver};
use crate::error::Error;

/// Flags of registered memory: usable by all contexts, and by what runs on their cards.
const REGISTERED: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// A range of the card's addresses with memory behind it.
pub(crate) struct CardMemory {
    context: Arc<Context>,
    start: u64,
    /// Rounded up to what the card maps at once.
    bytes: usize,
    handle: sys::CUmemGenericAllocationHandle,
}

impl CardMemory {
    /// Takes `bytes` of the card's memory; `purpose` is for the error.
    pub(crate) fn new(
        context: &Arc<Context>,
        bytes: u64,
        purpose: &'static str,
    ) -> Result<CardMemory, Error> {
        context.enter()?;
        context.made.count_allocation();
        let property = property_of(context);
        let mut granularity = 0usize;
        // SAFETY: the context is current; the property describes memory of its card.
        unsafe {
            let kind = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
            driver!(cuMemGetAllocationGranularity(&mut granularity, &property, kind))?;
        }
        let bytes = (bytes.max(1) as usize).next_multiple_of(granularity);
        let mut memory = CardMemory { context: Arc::clone(context), start: 0, bytes: 0, handle: 0 };
        let mapped = memory.map(bytes, granularity, &property);
        mapped.map_err(|error| memory.explain(error, bytes as u64, purpose))?;
        Ok(memory)
    }

    /// Reserves addresses and maps memory at them; what was done before a failure is undone when `self` is dropped.
    fn map(
        &mut self,
        bytes: usize,
        granularity: usize,
        property: &sys::CUmemAllocationProp,
    ) -> Result<(), Error> {
        // SAFETY: sizes are multiples of the granularity; what fails undoes what was done before.
        unsafe {
            driver!(cuMemCreate(&mut self.handle, bytes, property, 0))?;
            let reserved = driver!(cuMemAddressReserve(&mut self.start, bytes, granularity, 0, 0));
            let mapped = reserved.and_then(|()| driver!(cuMemMap(self.start, bytes, 0, self.handle, 0)));
            if let Err(error) = mapped {
                if self.start != 0 {
                    driver!(cuMemAddressFree(self.start, bytes))?;
                }
                driver!(cuMemRelease(self.handle))?;
                return Err(error);
            }
            self.bytes = bytes;
            let access = sys::CUmemAccessDesc {
                location: property.location,
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            };
            driver!(cuMemSetAccess(self.start, bytes, &access, 1))
        }
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
        // SAFETY: the memory is mapped; null is the context's first stream, which is there without being created.
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
        if self.bytes == 0 || self.context.enter().is_err() {
            return;
        }
        // SAFETY: mapped and reserved by `map` with this length. Whoever owns the memory has waited for all work on it. A
        // failure leaves it to the end of the process.
        unsafe {
            let _ = driver!(cuMemUnmap(self.start, self.bytes));
            let _ = driver!(cuMemRelease(self.handle));
            let _ = driver!(cuMemAddressFree(self.start, self.bytes));
        }
    }
}

/// Memory of the context's card.
fn property_of(context: &Context) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: context.card.index as i32,
        },
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
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

/// Host memory of the device's own, registered.
pub(crate) struct HostBuffer {
    _registered: Registered,
    /// Declared last: unmapped after it was unregistered.
    region: Region,
}

impl HostBuffer {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<HostBuffer, Error> {
        let region =
            Region::anonymous(bytes).map_err(|error| Error::Addresses { bytes: bytes as u64, error })?;
        // SAFETY: the region is dropped after `registered`.
        let registered = unsafe { Registered::new(context, &region)? };
        Ok(HostBuffer { _registered: registered, region })
    }

    /// The first byte, for the host.
    pub(crate) fn base(&self) -> *mut u8 {
        self.region.base()
    }
}
