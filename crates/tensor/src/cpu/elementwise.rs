//! fill, copy, add: bound by memory; cut into pieces so that two cores pull.

use super::{Cpu, GRAIN};
use crate::buffer::{View, ViewMut};

/// The bytes of a view.
pub(super) fn bytes<'a>(x: &View<'a>) -> &'a [u8] {
    // SAFETY: the view borrows this many bytes for 'a; the address is of host memory on this device
    // (a view of `Meta` has a null address and cannot reach it: its kernels never run here).
    unsafe { std::slice::from_raw_parts(not_null(x.address().as_ptr()), x.bytes()) }
}

/// The bytes of a unique view.
pub(super) fn bytes_mut<'a>(x: ViewMut<'a>) -> &'a mut [u8] {
    // SAFETY: as in `bytes`; the view borrows the memory uniquely for 'a. Its elements are plain numbers,
    // for which every byte is valid.
    unsafe { std::slice::from_raw_parts_mut(not_null(x.address().as_ptr()), x.bytes()) }
}

fn not_null(address: *mut u8) -> *mut u8 {
    assert!(!address.is_null(), "memory of the Meta device cannot be reached");
    address
}

/// Every element becomes `value`.
pub(super) fn fill<T: Copy + Send + Sync>(cpu: &Cpu, x: &mut [T], value: T) {
    cpu.over_mut(x, 4 * GRAIN, |_, x| x.fill(value));
}

/// `to = from`.
pub(super) fn copy(cpu: &Cpu, from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len());
    cpu.over_mut(to, 16 * GRAIN, |range, to| to.copy_from_slice(&from[range]));
}

/// `into += from`.
pub(super) fn add<T: Copy + Send + Sync + std::ops::AddAssign>(cpu: &Cpu, from: &[T], into: &mut [T]) {
    assert_eq!(from.len(), into.len());
    cpu.over_mut(into, GRAIN, |range, into| {
        for (i, f) in into.iter_mut().zip(&from[range]) {
            *i += *f;
        }
    });
}
