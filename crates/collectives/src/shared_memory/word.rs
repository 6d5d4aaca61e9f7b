//! A word of shared memory, for code that visits the words of a record: copies of it go to other hosts.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A word in shared memory, of 4 or 8 bytes.
pub(crate) enum Word<'a> {
    Four(&'a AtomicU32),
    Eight(&'a AtomicU64),
}

impl Word<'_> {
    pub(crate) fn load(&self) -> u64 {
        match self {
            Word::Four(word) => word.load(Ordering::Acquire).into(),
            Word::Eight(word) => word.load(Ordering::Relaxed),
        }
    }

    /// Stores the value, or its lower half.
    pub(crate) fn store(&self, value: u64) {
        match self {
            Word::Four(word) => word.store(value as u32, Ordering::Release),
            Word::Eight(word) => word.store(value, Ordering::Relaxed),
        }
    }
}
