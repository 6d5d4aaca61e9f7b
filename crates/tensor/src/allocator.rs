//! The allocator of programs: the system's, but a program that gets no memory ends at once and says so.
//!
//! Left to the standard library, a failed allocation under `RUST_BACKTRACE=1` takes the lock under which backtraces are
//! printed, allocates to print one, fails again, and waits for its own lock for ever.

use std::alloc::{GlobalAlloc, Layout, System};

/// Message of a program that has run out of memory. It is constant, since nothing may be formatted any more.
const MESSAGE: &[u8] =
    b"error: the system gives no more memory to this program; `ulimit -d` and `ulimit -v` limit it, \
and `phalanx plan` says what needs less\n";

/// The system's allocator, which ends the program with a message when there is no memory left: for `#[global_allocator]`.
pub struct OrEnd;

// SAFETY: every call goes to the system's allocator with the arguments that came, so its guarantees are kept; a null
// pointer is never returned.
unsafe impl GlobalAlloc for OrEnd {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on.
        or_end(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on.
        or_end(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: passed on.
        or_end(unsafe { System.realloc(address, layout, bytes) })
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(address, layout) };
    }
}

fn or_end(address: *mut u8) -> *mut u8 {
    if address.is_null() {
        end();
    }
    address
}

#[cold]
fn end() -> ! {
    // SAFETY: only borrowed for this call. A descriptor 2 that is closed makes the write fail, which changes nothing.
    let stderr = unsafe { std::os::fd::BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(stderr, MESSAGE);
    std::process::abort()
}

/// Gives memory that was freed back to the system. The C library keeps what threads have freed in a heap for each of them:
/// after work with large temporary data, this makes room for what follows. It does nothing where the C library has no such
/// call.
pub fn return_freed_memory() {
    #[cfg(target_env = "gnu")]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> i32;
        }
        // SAFETY: glibc's function takes its own locks and touches free memory alone; any number is a valid pad.
        unsafe { malloc_trim(0) };
    }
}
