//! Pinned host memory, which copies may use while the host goes on.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_uint, c_void};

use super::{Driver, Status, call_in_context, entry_points, put};
use crate::checks::Finding;

/// What new pinned memory holds: a NaN in every format.
const POISON: u8 = 0xff;

fn layout(bytes: usize) -> Result<Layout, Status> {
    Layout::from_size_align(bytes, 4096).map_err(|_| Status::INVALID_VALUE)
}

impl Driver {
    /// Whether a range is pinned.
    pub(super) fn is_pinned(&self, start: usize, bytes: usize) -> bool {
        let before = self.pinned.range(..=start).next_back();
        before.is_some_and(|(&first, &size)| start + bytes <= first + size)
    }

    /// Ends a pinned range: its size. Copies that still use it are reported.
    fn unpin(&mut self, start: usize) -> Result<usize, Status> {
        let bytes = self.pinned.remove(&start).ok_or(Status::INVALID_VALUE)?;
        if self.queues.uses_host_memory(start, bytes) {
            let detail = format!(
                "{bytes} bytes of pinned host memory are freed while a copy that uses them is queued"
            );
            self.queues.report(Finding::UseAfterFree, "cuMemFreeHost", Some(start as u64), detail);
        }
        Ok(bytes)
    }

    fn pin_new(&mut self, out: *mut *mut c_void, bytes: usize) -> Result<(), Status> {
        if bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the size is not zero.
        let start = unsafe { alloc(layout(bytes)?) };
        if start.is_null() {
            return Err(Status::OUT_OF_MEMORY);
        }
        // SAFETY: the memory was just allocated with this size.
        unsafe { start.write_bytes(POISON, bytes) };
        self.pinned.insert(start as usize, bytes);
        put(out, start.cast())
    }
}

entry_points! {
    /// Allocates pinned host memory.
    cuMemHostAlloc(out: *mut *mut c_void, bytes: usize, _flags: c_uint) call_in_context |driver| {
        driver.pin_new(out, bytes)
    }

    /// Allocates pinned host memory.
    cuMemAllocHost_v2(out: *mut *mut c_void, bytes: usize) call_in_context |driver| { driver.pin_new(out, bytes) }

    /// Frees pinned host memory.
    cuMemFreeHost(start: *mut c_void) call_in_context |driver| {
        let bytes = driver.unpin(start as usize)?;
        driver.check()?;
        // SAFETY: the range was allocated by `pin_new` with this layout, and no queued work uses it.
        unsafe { dealloc(start.cast(), layout(bytes)?) };
        Ok(())
    }

    /// Pins host memory of the caller.
    cuMemHostRegister_v2(start: *mut c_void, bytes: usize, _flags: c_uint) call_in_context |driver| {
        if bytes == 0 || start.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        if !driver.config.registers {
            return Err(Status::NOT_SUPPORTED);
        }
        let overlaps = driver.pinned.iter().any(|(&first, &size)| (start as usize) < first + size && first < start as usize + bytes);
        if overlaps {
            return Err(Status::HOST_MEMORY_ALREADY_REGISTERED);
        }
        driver.pinned.insert(start as usize, bytes);
        Ok(())
    }

    /// Ends the pinning of host memory of the caller.
    cuMemHostUnregister(start: *mut c_void) call_in_context |driver| {
        driver.unpin(start as usize).map(|_| ()).map_err(|_| Status::HOST_MEMORY_NOT_REGISTERED)
    }

    /// The address by which the device reaches pinned host memory: the host's own.
    cuMemHostGetDevicePointer_v2(out: *mut u64, start: *mut c_void, flags: c_uint) call_in_context |driver| {
        if flags != 0 || !driver.is_pinned(start as usize, 1) {
            return Err(Status::INVALID_VALUE);
        }
        put(out, start as u64)
    }
}
