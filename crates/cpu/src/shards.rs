//! A slice that the tasks of one run write together, each its own pieces.

use std::marker::PhantomData;
use std::ops::Range;

/// A slice of which each task of a run takes its own piece.
pub(crate) struct Shards<'a, T> {
    base: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: pieces come only from `piece`, whose caller promises that they are disjoint, so sharing this between threads
// is like sending each thread its own `&mut [T]`.
unsafe impl<T: Send> Send for Shards<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shards<'_, T> {}

impl<'a, T> Shards<'a, T> {
    /// Borrows the whole slice for the duration of a run.
    pub(crate) fn new(slice: &'a mut [T]) -> Shards<'a, T> {
        Shards { base: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// Number of elements in all.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// First element; for strided access, under the same promise as `piece`.
    pub(crate) fn base(&self) -> *mut T {
        self.base
    }

    /// Elements `range`.
    ///
    /// # Safety
    /// While a piece lives, no other piece may overlap it.
    #[expect(clippy::mut_from_ref, reason = "the caller keeps the pieces disjoint")]
    pub(crate) unsafe fn piece(&self, range: Range<usize>) -> &mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range {range:?} of {} elements",
            self.len
        );
        // SAFETY: inside the slice (asserted); disjoint from all others (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start), range.len()) }
    }
}
