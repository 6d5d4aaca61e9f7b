//! Copies and fills.
//!
//! Host memory that is not pinned is read when a copy is queued, and a copy into it has ended when the call returns, as
//! with the real driver. Pinned memory is used when the copy runs.

use std::ffi::{c_uchar, c_uint, c_ushort, c_void};
use std::sync::Arc;

use super::{Driver, Status, call_copying, call_in_context, entry_points};
use crate::queues::{Copy, Fill, Location, Work};

/// A copy of rows (`CUDA_MEMCPY2D`).
#[derive(Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RowCopy {
    pub from_x: usize,
    pub from_y: usize,
    pub from_kind: c_uint,
    pub from_host: *const c_void,
    pub from_device: u64,
    pub from_array: usize,
    pub from_pitch: usize,
    pub to_x: usize,
    pub to_y: usize,
    pub to_kind: c_uint,
    pub to_host: *mut c_void,
    pub to_device: u64,
    pub to_array: usize,
    pub to_pitch: usize,
    pub width: usize,
    pub height: usize,
}

/// `CU_MEMORYTYPE_HOST`
const HOST: c_uint = 1;

/// `CU_MEMORYTYPE_DEVICE`
const DEVICE: c_uint = 2;

impl Driver {
    /// Queues a copy; whether the call must wait for it.
    fn copy(&mut self, mut copy: Copy, stream: usize) -> Result<(), Status> {
        let stream = self.stream(stream)?;
        if copy.width == 0 || copy.height == 0 {
            return Ok(());
        }
        let span = |pitch: usize| pitch * (copy.height - 1) + copy.width;
        let mut waits = false;
        if let Location::Host(start) = copy.from {
            let bytes = span(copy.from_pitch);
            if !self.is_pinned(start, bytes) && !self.queues.is_capturing(stream) {
                // SAFETY: the caller gives as many valid bytes.
                let source = unsafe { std::slice::from_raw_parts(start as *const u8, bytes) };
                copy.from = Location::Bytes(Arc::from(source));
            }
        }
        if let Location::Host(start) = copy.to {
            waits = !self.is_pinned(start, span(copy.to_pitch)) && !self.queues.is_capturing(stream);
        }
        self.queues.enqueue(stream, Work::Copy(copy))?;
        if waits {
            self.queues.synchronize(stream);
        }
        Ok(())
    }

    /// Copies in the default stream and waits.
    fn copy_now(&mut self, copy: Copy) -> Result<(), Status> {
        self.copy(copy, 0)?;
        self.queues.synchronize(0);
        Ok(())
    }

    fn copy_rows(&mut self, rows: *const RowCopy, stream: usize) -> Result<(), Status> {
        if rows.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller gives a valid description.
        let rows = unsafe { *rows };
        let location = |kind: c_uint, host: usize, device: u64, offset: usize| match kind {
            HOST => Ok(Location::Host(host + offset)),
            DEVICE => Ok(Location::Device(device + offset as u64)),
            _ => Err(Status::NOT_SUPPORTED),
        };
        let from_offset = rows.from_y * rows.from_pitch + rows.from_x;
        let to_offset = rows.to_y * rows.to_pitch + rows.to_x;
        if rows.height > 1 && (rows.from_pitch < rows.width || rows.to_pitch < rows.width) {
            return Err(Status::INVALID_VALUE);
        }
        let copy = Copy {
            to: location(rows.to_kind, rows.to_host as usize, rows.to_device, to_offset)?,
            from: location(rows.from_kind, rows.from_host as usize, rows.from_device, from_offset)?,
            width: rows.width,
            height: rows.height,
            to_pitch: rows.to_pitch,
            from_pitch: rows.from_pitch,
        };
        self.copy(copy, stream)
    }

    fn fill(&mut self, to: u64, pattern: Vec<u8>, count: usize, stream: usize) -> Result<(), Status> {
        let stream = self.stream(stream)?;
        if !to.is_multiple_of(pattern.len() as u64) {
            return Err(Status::INVALID_VALUE);
        }
        if count > 0 {
            self.queues.enqueue(stream, Work::Fill(Fill { to, pattern, count }))?;
        }
        Ok(())
    }
}

fn to_device(to: u64, from: *const c_void, bytes: usize) -> Copy {
    Copy::whole(Location::Device(to), Location::Host(from as usize), bytes)
}

fn to_host(to: *mut c_void, from: u64, bytes: usize) -> Copy {
    Copy::whole(Location::Host(to as usize), Location::Device(from), bytes)
}

fn within(to: u64, from: u64, bytes: usize) -> Copy {
    Copy::whole(Location::Device(to), Location::Device(from), bytes)
}

entry_points! {
    /// Copies to the device.
    cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) call_copying |driver| {
        driver.copy_now(to_device(to, from, bytes))
    }

    /// Copies to the host.
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) call_copying |driver| {
        driver.copy_now(to_host(to, from, bytes))
    }

    /// Copies within the device.
    cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) call_in_context |driver| { driver.copy(within(to, from, bytes), 0) }

    /// Queues a copy to the device.
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: usize) call_in_context |driver| {
        driver.copy(to_device(to, from, bytes), stream)
    }

    /// Queues a copy to the host.
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: usize) call_copying |driver| {
        driver.copy(to_host(to, from, bytes), stream)
    }

    /// Queues a copy within the device.
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) call_in_context |driver| {
        driver.copy(within(to, from, bytes), stream)
    }

    /// Copies rows and waits.
    cuMemcpy2D_v2(rows: *const RowCopy) call_copying |driver| {
        driver.copy_rows(rows, 0)?;
        driver.queues.synchronize(0);
        Ok(())
    }

    /// Queues a copy of rows.
    cuMemcpy2DAsync_v2(rows: *const RowCopy, stream: usize) call_copying |driver| { driver.copy_rows(rows, stream) }

    /// Queues a fill with a byte in the default stream.
    cuMemsetD8_v2(to: u64, value: c_uchar, count: usize) call_in_context |driver| { driver.fill(to, vec![value], count, 0) }

    /// Queues a fill with a byte.
    cuMemsetD8Async(to: u64, value: c_uchar, count: usize, stream: usize) call_in_context |driver| {
        driver.fill(to, vec![value], count, stream)
    }

    /// Queues a fill with two bytes.
    cuMemsetD16Async(to: u64, value: c_ushort, count: usize, stream: usize) call_in_context |driver| {
        driver.fill(to, value.to_le_bytes().to_vec(), count, stream)
    }

    /// Queues a fill with four bytes.
    cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: usize) call_in_context |driver| {
        driver.fill(to, value.to_le_bytes().to_vec(), count, stream)
    }
}
