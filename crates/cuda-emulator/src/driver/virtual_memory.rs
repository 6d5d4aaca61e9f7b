//! Virtual memory: addresses are reserved, memory is created, and one is mapped to the other.
//!
//! A piece of memory can be mapped at one place only, and as a whole.

use std::ffi::{c_int, c_ulonglong, c_void};

use super::{Status, call_in_context, call_waiting, entry_points, put};
use crate::memory::RangeKind;

/// Sizes and addresses of mappings are multiples of this.
const GRANULARITY: usize = 2 << 20;

/// Memory without an address of its own.
#[derive(Clone, Copy)]
pub(super) struct Physical {
    bytes: usize,
    mapped: Option<u64>,
    /// Whether its handle was given back; the memory stays until it is no longer mapped.
    is_released: bool,
}

impl Physical {
    /// Whether it is mapped to addresses within a range.
    fn overlaps(&self, address: u64, bytes: usize) -> bool {
        self.mapped.is_some_and(|at| at < address + bytes as u64 && address < at + self.bytes as u64)
    }
}

entry_points! {
    /// What sizes must be multiples of.
    cuMemGetAllocationGranularity(out: *mut usize, _properties: *const c_void, _option: c_int) call_in_context |_driver| {
        put(out, GRANULARITY)
    }

    /// Reserves addresses.
    cuMemAddressReserve(out: *mut u64, bytes: usize, align: usize, _wanted: u64, flags: c_ulonglong) call_in_context |driver| {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let range = driver.queues.memory.reserve(bytes, align.max(GRANULARITY), RangeKind::Reservation);
        put(out, range.ok_or(Status::OUT_OF_MEMORY)?)
    }

    /// Gives reserved addresses back.
    cuMemAddressFree(address: u64, bytes: usize) call_in_context |driver| {
        let is_mapped = driver.physical.values().any(|memory| memory.overlaps(address, bytes));
        match driver.queues.memory.range(address) {
            Some((size, RangeKind::Reservation)) if size == bytes && !is_mapped => {}
            _ => return Err(Status::INVALID_VALUE),
        }
        driver.queues.memory.free(address, RangeKind::Reservation).map(|_| ()).map_err(|_| Status::INVALID_VALUE)
    }

    /// Creates memory without an address.
    cuMemCreate(out: *mut u64, bytes: usize, _properties: *const c_void, flags: c_ulonglong) call_in_context |driver| {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        driver.take_memory(bytes)?;
        let handle = driver.next_physical;
        driver.next_physical += 1;
        driver.physical.insert(handle, Physical { bytes, mapped: None, is_released: false });
        put(out, handle)
    }

    /// Gives a handle back. The memory stays as long as it is mapped.
    cuMemRelease(handle: u64) call_in_context |driver| {
        let memory = driver.physical.get_mut(&handle).filter(|memory| !memory.is_released);
        let memory = memory.ok_or(Status::INVALID_VALUE)?;
        memory.is_released = true;
        if memory.mapped.is_none() {
            driver.used -= memory.bytes;
            driver.physical.remove(&handle);
        }
        Ok(())
    }

    /// Maps memory to reserved addresses. It can be used when access was set.
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) call_in_context |driver| {
        let memory = *driver.physical.get(&handle).ok_or(Status::INVALID_VALUE)?;
        if flags != 0 || offset != 0 || memory.is_released || !address.is_multiple_of(GRANULARITY as u64) {
            return Err(Status::INVALID_VALUE);
        }
        if memory.bytes != bytes || memory.mapped.is_some() {
            return Err(Status::NOT_SUPPORTED);
        }
        let overlaps = driver.physical.values().any(|other| other.overlaps(address, bytes));
        if overlaps || !driver.queues.memory.is_reserved(address, bytes) {
            return Err(Status::INVALID_VALUE);
        }
        driver.physical.insert(handle, Physical { mapped: Some(address), ..memory });
        Ok(())
    }

    /// Lets the device use mapped memory.
    cuMemSetAccess(address: u64, bytes: usize, _access: *const c_void, count: usize) call_in_context |driver| {
        let mapped = driver.physical.values().filter_map(|memory| Some((memory.mapped?, memory.bytes)));
        let within = |&(at, size): &(u64, usize)| at >= address && at + size as u64 <= address + bytes as u64;
        let mapped: Vec<(u64, usize)> = mapped.filter(within).collect();
        if count != 1 || mapped.iter().map(|(_, size)| size).sum::<usize>() != bytes {
            return Err(Status::INVALID_VALUE);
        }
        mapped.into_iter().for_each(|(at, size)| driver.queues.memory.validate(at, size));
        Ok(())
    }

    /// Ends a mapping. Work that uses it must have ended; what still uses it is reported.
    cuMemUnmap(address: u64, bytes: usize) call_waiting |driver| {
        let is_here = |memory: &Physical| memory.mapped == Some(address) && memory.bytes == bytes;
        let found = driver.physical.iter().find(|(_, memory)| is_here(memory));
        let (&handle, &memory) = found.ok_or(Status::INVALID_VALUE)?;
        driver.queues.synchronize_all();
        if driver.queues.is_stuck() {
            return Ok(());
        }
        driver.check()?;
        driver.queues.memory.invalidate(address, bytes);
        if memory.is_released {
            driver.used -= bytes;
            driver.physical.remove(&handle);
        } else {
            driver.physical.insert(handle, Physical { mapped: None, ..memory });
        }
        Ok(())
    }
}
