//! Memory that kernels need while they run: taken once, grown in the first step, kept.
//!
//! Two kinds: per thread ([`with_tile_scratch`], [`with_packing_scratch`]) and per call
//! ([`Scratch`]: partial sums that all tasks of a run share). Neither belongs to the plan's arena; both
//! are part of what the engine measures as "above the plan".

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// Alignment of scratch: a page, so that vectors never straddle lines by bad luck.
const ALIGN: usize = 4096;

/// Zeroed at first, aligned, grown when a call needs more.
pub(crate) struct Buffer {
    base: NonNull<f64>,
    bytes: usize,
}

// SAFETY: it owns its memory like a Vec<f64>.
unsafe impl Send for Buffer {}

impl Buffer {
    const fn empty() -> Buffer {
        Buffer { base: NonNull::dangling(), bytes: 0 }
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, ALIGN).expect("a size that fits in memory")
    }

    /// The first `len` elements; what they hold is whatever was there before.
    pub(crate) fn slice<T: bytemuck::Pod>(&mut self, len: usize) -> &mut [T] {
        let wanted = len * size_of::<T>();
        if wanted > self.bytes {
            let bytes = wanted.next_multiple_of(ALIGN);
            let layout = Buffer::layout(bytes);
            // SAFETY: the layout is not empty, since wanted > 0.
            let base = unsafe { alloc_zeroed(layout) };
            let base = NonNull::new(base.cast()).unwrap_or_else(|| handle_alloc_error(layout));
            *self = Buffer { base, bytes };
        }
        // SAFETY: the memory is long enough, aligned for any number, initialised (zeroed when made),
        // and borrowed uniquely with self. For len 0 a dangling pointer is allowed.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().cast(), len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated in `slice` with this layout, freed once.
            unsafe { dealloc(self.base.as_ptr().cast(), Buffer::layout(self.bytes)) };
        }
    }
}

thread_local! {
    static TILES: RefCell<Buffer> = const { RefCell::new(Buffer::empty()) };
    static PACKING: RefCell<Buffer> = const { RefCell::new(Buffer::empty()) };
}

/// Gives `f` the first `len` elements of this thread's scratch for tiles. Not to be nested.
pub(crate) fn with_tile_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    TILES.with(|buffer| f(buffer.borrow_mut().slice(len)))
}

/// Gives `f` the first `len` elements of this thread's scratch for packed panels. Not to be nested, but
/// inside a [`with_tile_scratch`].
pub(crate) fn with_packing_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    PACKING.with(|buffer| f(buffer.borrow_mut().slice(len)))
}

/// Buffers that calls borrow; as many as there are calls at a time.
#[derive(Default)]
pub(crate) struct Scratch {
    idle: Mutex<Vec<Buffer>>,
}

impl Scratch {
    /// Gives `f` a buffer for its duration.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Buffer) -> R) -> R {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = idle().pop();
        let mut buffer = taken.unwrap_or_else(Buffer::empty);
        let out = f(&mut buffer);
        idle().push(buffer);
        out
    }
}
