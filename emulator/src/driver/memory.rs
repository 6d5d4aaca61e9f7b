//! Device memory: allocations, and what is known about an address.

use std::ffi::{c_int, c_void};

use super::{Driver, Status, call_in_context, call_waiting, entry_points, put};
use crate::memory::DEVICE_BASE;
use crate::queues::Work;

impl Driver {
    /// Takes memory of the current context's device from what is left.
    pub(super) fn take_memory(&mut self, bytes: usize) -> Result<(), Status> {
        let card = self.card()?;
        let used = self.used[card].checked_add(bytes).filter(|used| *used <= self.config.memory);
        self.used[card] = used.ok_or(Status::OUT_OF_MEMORY)?;
        Ok(())
    }

    /// Gives memory back that was taken of a device.
    pub(super) fn give_memory(&mut self, card: usize, bytes: usize) {
        self.used[card] = self.used[card].saturating_sub(bytes);
    }

    fn allocate(&mut self, bytes: usize) -> Result<u64, Status> {
        if bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        self.take_memory(bytes)?;
        self.queues.memory.allocate(bytes).ok_or(Status::OUT_OF_MEMORY)
    }

    fn allocation(&self, address: u64) -> Result<usize, Status> {
        self.queues.memory.range(address).ok_or(Status::INVALID_VALUE)
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
        let card = driver.card()?;
        driver.give_memory(card, bytes);
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
        let card = driver.card()?;
        driver.give_memory(card, bytes);
        Ok(())
    }

    /// Free and total device memory.
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) call_in_context |driver| {
        put(free, driver.config.memory - driver.used[driver.card()?])?;
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
