//! Memory that kernels need while they run: taken once, grown in the first step, kept.
//!
//! Two kinds: per thread ([`with_thread_scratch`]: tiles of attention, packed panels) and per call
//! ([`Scratch`]: partial sums that all tasks of a run share). Neither belongs to the plan's arena; both
//! are part of what the engine measures as "above the plan".

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

use phalanx_tensor::region::{HUGE, Region};

/// A memory mapping that is replaced by a larger, zeroed one when a call needs more.
pub(crate) struct ScratchBuffer {
    region: Option<Region>,
}

impl ScratchBuffer {
    const fn empty() -> ScratchBuffer {
        ScratchBuffer { region: None }
    }

    /// The first `len` elements, with unspecified contents.
    pub(crate) fn slice<T: bytemuck::Pod>(&mut self, len: usize) -> &mut [T] {
        let wanted = len * size_of::<T>();
        if self.region.as_ref().is_none_or(|r| r.bytes() < wanted) {
            let bytes = if wanted > HUGE / 4 { wanted.next_multiple_of(HUGE) } else { wanted };
            // Unmapped first, because the old contents are not needed.
            self.region = None;
            self.region = Some(Region::anonymous(bytes).expect("memory for the scratch of a kernel"));
        }
        let base = self.region.as_ref().map_or(std::ptr::null_mut(), Region::base);
        // SAFETY: the region is long enough, starts on a page, is initialised (zeroed when mapped) and is
        // borrowed uniquely with self; every bit pattern is a T.
        unsafe { std::slice::from_raw_parts_mut(base.cast(), len) }
    }
}

thread_local! {
    static THREAD: RefCell<ScratchBuffer> = const { RefCell::new(ScratchBuffer::empty()) };
}

/// Passes the first `len` elements of this thread's scratch to `f`. Calls must not be nested.
pub(crate) fn with_thread_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    THREAD.with(|buffer| f(buffer.borrow_mut().slice(len)))
}

/// Buffers that calls borrow; as many as there are concurrent calls.
#[derive(Default)]
pub(crate) struct Scratch {
    idle: Mutex<Vec<ScratchBuffer>>,
}

impl Scratch {
    /// Lends a buffer to `f`.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut ScratchBuffer) -> R) -> R {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = idle().pop();
        let mut buffer = taken.unwrap_or_else(ScratchBuffer::empty);
        let out = f(&mut buffer);
        idle().push(buffer);
        out
    }
}
