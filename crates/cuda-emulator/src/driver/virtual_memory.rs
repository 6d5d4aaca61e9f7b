//! Virtual memory: addresses are reserved, memory is created, and one is mapped to the other.
//!
//! A piece of memory can be mapped at one place only, and as a whole.

use std::ffi::{c_int, c_ulonglong, c_void};

use super::{Status, call_in_context, entry_points, put};
use crate::memory::RangeKind;

/// Sizes and addresses of mappings are multiples of this.
const GRANULARITY: usize = 2 << 20;

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
        let is_mapped = driver.physical.values().any(|(_, at)| at.is_some_and(|at| at >= address && at < address + bytes as u64));
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
        driver.physical.insert(handle, (bytes, None));
        put(out, handle)
    }

    /// Gives memory back, which must not be mapped: this driver does not keep it until then.
    cuMemRelease(handle: u64) call_in_context |driver| {
        match driver.physical.get(&handle) {
            Some(&(bytes, None)) => {
                driver.physical.remove(&handle);
                driver.used -= bytes;
                Ok(())
            }
            Some(_) => Err(Status::NOT_SUPPORTED),
            None => Err(Status::INVALID_VALUE),
        }
    }

    /// Maps memory to reserved addresses. It can be used when access was set.
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) call_in_context |driver| {
        let &(size, mapped) = driver.physical.get(&handle).ok_or(Status::INVALID_VALUE)?;
        if flags != 0 || offset != 0 || !address.is_multiple_of(GRANULARITY as u64) {
            return Err(Status::INVALID_VALUE);
        }
        if size != bytes || mapped.is_some() {
            return Err(Status::NOT_SUPPORTED);
        }
        let end = address + bytes as u64;
        let overlaps = driver.physical.values().any(|&(size, at)| at.is_some_and(|at| at < end && address < at + size as u64));
        if overlaps || !driver.queues.memory.is_reserved(address, bytes) {
            return Err(Status::INVALID_VALUE);
        }
        driver.physical.insert(handle, (size, Some(address)));
        Ok(())
    }

    /// Lets the device use mapped memory.
    cuMemSetAccess(address: u64, bytes: usize, _access: *const c_void, count: usize) call_in_context |driver| {
        let mut mapped: Vec<(u64, usize)> =
            driver.physical.values().filter_map(|&(size, at)| Some((at?, size))).collect();
        mapped.retain(|&(at, size)| at >= address && at + size as u64 <= address + bytes as u64);
        if count != 1 || mapped.iter().map(|(_, size)| size).sum::<usize>() != bytes {
            return Err(Status::INVALID_VALUE);
        }
        mapped.into_iter().for_each(|(at, size)| driver.queues.memory.validate(at, size));
        Ok(())
    }

    /// Ends a mapping. Work that uses it must have ended; what still uses it is reported.
    cuMemUnmap(address: u64, bytes: usize) call_in_context |driver| {
        let found = driver.physical.iter().find(|(_, (size, at))| *at == Some(address) && *size == bytes);
        let handle = *found.ok_or(Status::INVALID_VALUE)?.0;
        driver.queues.synchronize_all();
        driver.check()?;
        driver.queues.memory.invalidate(address, bytes);
        driver.physical.insert(handle, (bytes, None));
        Ok(())
    }
}
