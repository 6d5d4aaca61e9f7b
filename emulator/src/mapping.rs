//! Memory from the system that takes no room until it is touched, and reads as zeros.

use std::marker::PhantomData;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// An array of zeros of a plain type, of which only touched pages take memory.
pub struct Mapping<T> {
    start: NonNull<u8>,
    count: usize,
    kind: PhantomData<T>,
}

// SAFETY: the mapping is owned, like that of a `Vec`.
unsafe impl<T: Send> Send for Mapping<T> {}

/// Types for which zeros are a value and any bytes that were written are, too.
pub trait Plain: Copy {}

impl Plain for u8 {}
impl Plain for u64 {}
impl Plain for crate::checks::Cell {}

impl<T: Plain> Mapping<T> {
    /// Reserves room for `count` values.
    ///
    /// # Errors
    /// What the system says, such as a limit of address space.
    pub fn new(count: usize) -> Result<Self, rustix::io::Errno> {
        let bytes = (count * size_of::<T>()).max(1);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at a place that the system chooses overlaps nothing.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags)?
        };
        let start = NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { start, count, kind: PhantomData })
    }

    /// A pointer to `count` values from `at`.
    ///
    /// # Panics
    /// If they are not all within the mapping.
    #[inline]
    pub fn at(&self, at: usize, count: usize) -> *mut T {
        assert!(at <= self.count && count <= self.count - at, "{count} values at {at} of {}", self.count);
        // SAFETY: the index is within the mapping, as just checked.
        unsafe { self.start.as_ptr().cast::<T>().add(at) }
    }

    /// The values from `at`.
    #[inline]
    pub fn slice(&mut self, at: usize, count: usize) -> &mut [T] {
        let start = self.at(at, count);
        // SAFETY: the values are within the mapping, which `self` owns, and any bytes are values of a plain type.
        unsafe { std::slice::from_raw_parts_mut(start, count) }
    }

    /// All values.
    #[inline]
    pub fn all(&mut self) -> &mut [T] {
        self.slice(0, self.count)
    }

    /// Gives the pages within a range back to the system; they read as zeros again, as do the rests at its ends.
    pub fn clear(&mut self, at: usize, count: usize) {
        const PAGE: usize = 4096;
        let size = size_of::<T>();
        let (first, last) = (at * size, (at + count) * size);
        assert!(last <= self.count * size, "{count} values at {at} of {}", self.count);
        let (inner, outer) = (first.next_multiple_of(PAGE).min(last), (last / PAGE * PAGE).max(first));
        let base = self.start.as_ptr();
        // SAFETY: all ranges are within the mapping; zeros are values of a plain type.
        unsafe {
            if inner < outer {
                base.add(first).write_bytes(0, inner - first);
                base.add(outer).write_bytes(0, last - outer);
                if madvise(base.add(inner).cast(), outer - inner, Advice::LinuxDontNeed).is_err() {
                    base.add(inner).write_bytes(0, outer - inner);
                }
            } else {
                base.add(first).write_bytes(0, last - first);
            }
        }
    }
}

impl<T> Drop for Mapping<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length, and nobody uses it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), (self.count * size_of::<T>()).max(1)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cleared_values_are_zeros_and_others_stay() {
        let mut mapping = Mapping::<u8>::new(1 << 30).unwrap();
        mapping.slice(1000, 20_000).fill(7);
        mapping.clear(2000, 10_000);
        let values = mapping.slice(0, 30_000);
        let expected = |at| u8::from((1000..21_000).contains(&at) && !(2000..12_000).contains(&at)) * 7;
        assert!(values.iter().enumerate().all(|(at, &value)| value == expected(at)));
        mapping.clear(5, 3);
    }
}
