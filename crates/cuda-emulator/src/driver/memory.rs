//! Device memory: allocations, and what is known about an address.

use std::ffi::{c_int, c_void};

use super::{Driver, Status, call_in_context, call_waiting, entry_points, put};
use crate::memory::{DEVICE_BASE, RangeKind};
use crate::queues::Work;

impl Driver {
    /// Takes device memory from what is left.
    pub(super) fn take_memory(&mut self, bytes: usize) -> Result<(), Status> {
        let limit = self.config.memory * self.config.cards.max(1);
        let used = self.used.checked_add(bytes).filter(|used| *used <= limit);
        self.used = used.ok_or(Status::OUT_OF_MEMORY)?;
        Ok(())
    }

    fn allocate(&mut self, bytes: usize) -> Result<u64, Status> {
        if bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        self.take_memory(bytes)?;
        self.queues.memory.allocate(bytes).ok_or(Status::OUT_OF_MEMORY)
    }

    fn allocation(&self, address: u64) -> Result<usize, Status> {
        match self.queues.memory.range(address) {
            Some((bytes, RangeKind::Allocation)) => Ok(bytes),
            _ => Err(Status::INVALID_VALUE),
        }
    }
}

entry_points! {
    /// Allocates device memory.
    cuMemAlloc_v2(out: *mut u64, bytes: usize) call_in_context |driver| {
        let address = driver.allocate(bytes)?;
        put(out, address)
    }

    /// Waits for all work and frees device memory.
    cuMemFree_v2(address: u64) call_waiting |driver| {
        if address == 0 {
            return Ok(());
        }
        let bytes = driver.allocation(address)?;
        driver.queues.synchronize_all();
        if driver.queues.is_stuck() {
            return Ok(());
        }
        driver.check()?;
        driver.queues.enqueue(0, Work::Free(address))?;
        driver.queues.synchronize(0);
        driver.used -= bytes;
        Ok(())
    }

    /// Allocates device memory for the work of a stream from here on.
    cuMemAllocAsync(out: *mut u64, bytes: usize, stream: usize) call_in_context |driver| {
        let stream = driver.stream(stream)?;
        if driver.queues.is_capturing(stream) {
            return Err(Status::STREAM_CAPTURE_UNSUPPORTED);
        }
        let address = driver.allocate(bytes)?;
        put(out, address)
    }

    /// Frees device memory behind the work of a stream.
    cuMemFreeAsync(address: u64, stream: usize) call_in_context |driver| {
        let stream = driver.stream(stream)?;
        let bytes = driver.allocation(address)?;
        if driver.queues.is_capturing(stream) {
            return Err(Status::STREAM_CAPTURE_UNSUPPORTED);
        }
        driver.queues.enqueue(stream, Work::Free(address))?;
        driver.used -= bytes;
        Ok(())
    }

    /// Free and total device memory.
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) call_in_context |driver| {
        // Of several devices, each has its share of what is left of all.
        put(free, driver.config.memory - driver.used / driver.config.cards.max(1))?;
        put(total, driver.config.memory)
    }

    /// An attribute of a pointer: kind of memory (2), device (9), and addresses on both sides (3, 4).
    cuPointerGetAttribute(out: *mut c_void, attribute: c_int, address: u64) call_in_context |driver| {
        let is_device = address >= DEVICE_BASE;
        if !is_device && !driver.is_pinned(address as usize, 1) {
            return Err(Status::INVALID_VALUE);
        }
        match attribute {
            // CU_MEMORYTYPE_DEVICE and CU_MEMORYTYPE_HOST
            2 => put(out.cast::<u32>(), if is_device { 2 } else { 1 }),
            3 if is_device => put(out.cast::<u64>(), address),
            4 if !is_device => put(out.cast::<u64>(), address),
            9 => put(out.cast::<c_int>(), 0),
            _ => Err(Status::INVALID_VALUE),
        }
    }
}
