//! Start, devices and contexts. A device has one context, its primary one. Where there are several devices, they are alike, and share one
//! memory and its checks.

use std::ffi::{c_char, c_int, c_uint};

use super::{CONTEXT, Driver, Status, call, call_early, call_in_context, call_waiting, entry_points, put};
use crate::execute::MAX_THREADS;

/// The handle of the first device's primary context; those of the others follow.
pub(super) const PRIMARY: usize = 0xc0;

/// What `cuDeviceGetName` says.
const NAME: &[u8] = b"Phalanx CUDA emulator";

/// Shared memory of a block that a launch may use without asking (`cuFuncSetAttribute`).
pub(super) const DEFAULT_SHARED: usize = 48 * 1024;

/// Attributes of the device, as numbered by `CUdevice_attribute`. Those that would need a card are not known.
fn attribute(number: c_int) -> Option<c_int> {
    Some(match number {
        1..=3 => MAX_THREADS as c_int,
        4 => 64,
        5 => c_int::MAX,
        6 | 7 => 65535,
        8 => DEFAULT_SHARED as c_int,
        9 => 65536,
        10 => 32,
        12 | 82 => 65536,
        // One multiprocessor: blocks run one after the other.
        16 => 1,
        39 => 2048,
        106 => 32,
        111 => 1024,
        // Overlap, mapped host memory, concurrent kernels, copy engines, unified addresses, streams with priorities,
        // registered host memory, allocations in stream order.
        15 | 19 | 31 | 41 | 78 | 99 | 115 => 1,
        40 => 2,
        // No limit of time, integrated memory, compute mode, correction of errors, board group, managed memory,
        // cooperative launches, virtual memory.
        17 | 18 | 20 | 32 | 33 | 34 | 35 | 50 | 83 | 84 | 85 | 88 | 89 | 95 | 96 | 102 => 0,
        _ => return None,
    })
}

impl Driver {
    fn check_device(&self, device: c_int) -> Result<(), Status> {
        let is_there = usize::try_from(device).is_ok_and(|device| device < self.config.cards);
        if is_there { Ok(()) } else { Err(Status::INVALID_DEVICE) }
    }
}

entry_points! {
    /// Starts the driver.
    cuInit(flags: c_uint) call_early |driver| {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        if driver.config.cards == 0 {
            return Err(Status::NO_DEVICE);
        }
        driver.is_initialized = true;
        Ok(())
    }

    /// The version of the driver interface.
    cuDriverGetVersion(out: *mut c_int) call_early |driver| { put(out, driver.config.version) }

    /// How many devices there are.
    cuDeviceGetCount(out: *mut c_int) call |driver| { put(out, driver.config.cards as c_int) }

    /// The handle of a device.
    cuDeviceGet(out: *mut c_int, ordinal: c_int) call |driver| {
        driver.check_device(ordinal)?;
        put(out, ordinal)
    }

    /// An attribute of the device.
    cuDeviceGetAttribute(out: *mut c_int, number: c_int, device: c_int) call |driver| {
        driver.check_device(device)?;
        let (major, minor) = driver.config.capability;
        match number {
            75 => return put(out, major),
            76 => return put(out, minor),
            81 => return put(out, (driver.config.shared + 1024) as c_int),
            97 => return put(out, driver.config.shared as c_int),
            _ => {}
        }
        put(out, attribute(number).ok_or(Status::INVALID_VALUE)?)
    }

    /// The name of the device.
    cuDeviceGetName(out: *mut c_char, bytes: c_int, device: c_int) call |driver| {
        driver.check_device(device)?;
        if bytes < 1 || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let length = NAME.len().min(bytes as usize - 1);
        // SAFETY: the caller gives room for `bytes`, of which the name and its end use at most as many.
        unsafe {
            out.cast::<u8>().copy_from_nonoverlapping(NAME.as_ptr(), length);
            out.add(length).write(0);
        }
        Ok(())
    }

    /// The identity of the device.
    cuDeviceGetUuid_v2(out: *mut [u8; 16], device: c_int) call |driver| {
        driver.check_device(device)?;
        let mut identity = *b"phalanx-emulator";
        identity[15] += device as u8;
        put(out, identity)
    }

    /// The size of the device's memory.
    cuDeviceTotalMem_v2(out: *mut usize, _device: c_int) call |driver| { put(out, driver.config.memory) }

    /// The primary context.
    cuDevicePrimaryCtxRetain(out: *mut usize, device: c_int) call |driver| {
        driver.check_device(device)?;
        put(out, PRIMARY + device as usize)
    }

    /// Gives the primary context back. It stays as long as the process.
    cuDevicePrimaryCtxRelease_v2(device: c_int) call |driver| { driver.check_device(device) }

    /// Makes a context that of the thread.
    cuCtxSetCurrent(context: usize) call |driver| {
        if context != 0 && !(PRIMARY..PRIMARY + driver.config.cards).contains(&context) {
            return Err(Status::INVALID_CONTEXT);
        }
        CONTEXT.set(context);
        Ok(())
    }

    /// The context of the thread.
    cuCtxGetCurrent(out: *mut usize) call |_driver| { put(out, CONTEXT.get()) }

    /// The device of the current context.
    cuCtxGetDevice(out: *mut c_int) call_in_context |driver| { put(out, driver.card()? as c_int) }

    /// Waits for all work of the device.
    cuCtxSynchronize() call_waiting |driver| {
        if driver.queues.is_any_capturing() {
            return Err(Status::STREAM_CAPTURE_UNSUPPORTED);
        }
        driver.queues.synchronize_all();
        Ok(())
    }

    /// The range of priorities of streams: priorities make no difference here.
    cuCtxGetStreamPriorityRange(lowest: *mut c_int, highest: *mut c_int) call_in_context |_driver| {
        put(lowest, 0)?;
        put(highest, 0)
    }
}
