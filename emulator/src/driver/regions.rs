//! What only this driver has: regions of memory and operands of launches, which a test announces so that more is found.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::sync::Arc;

use super::{Status, call_early, call_in_context, entry_points};
use crate::execute::Operands;
use crate::queues::Work;

thread_local! {
    /// What launches of the thread may use.
    pub(super) static OPERANDS: RefCell<Arc<Operands>> = RefCell::default();
}

entry_points! {
    /// Begins a region behind the work of a stream: of the allocation around it, only regions have memory from then on. What
    /// it holds counts as not written. The name, with a zero at its end, is for reports.
    phalanxEmulatorRegion(address: u64, bytes: usize, name: *const c_char, stream: usize) call_in_context |driver| {
        if name.is_null() || bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller gives a text with a zero at its end.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let stream = driver.stream(stream)?;
        Ok(driver.queues.enqueue(stream, Work::BeginRegion(address, bytes, name))?)
    }

    /// Ends the region that begins at an address, behind the work of a stream. All its uses must be ordered before.
    phalanxEmulatorRegionEnd(address: u64, stream: usize) call_in_context |driver| {
        let stream = driver.stream(stream)?;
        Ok(driver.queues.enqueue(stream, Work::EndRegion(address))?)
    }

    /// Says what the next launches of the thread may use of the allocations that these ranges lie in: these ranges alone. With
    /// none, they may use everything again.
    phalanxEmulatorOperands(addresses: *const u64, sizes: *const usize, count: usize) call_early |driver| {
        let mut operands = Operands::default();
        if count > 0 && (addresses.is_null() || sizes.is_null()) {
            return Err(Status::INVALID_VALUE);
        }
        for index in 0..count {
            // SAFETY: the caller gives as many addresses and sizes as it says.
            let (address, bytes) = unsafe { (*addresses.add(index), *sizes.add(index)) };
            let around = driver.queues.memory.range_around(address, bytes).ok_or(Status::INVALID_VALUE)?;
            operands.ranges.push(address..address + bytes as u64);
            if !operands.allocations.contains(&around) {
                operands.allocations.push(around);
            }
        }
        OPERANDS.set(Arc::new(operands));
        Ok(())
    }
}
