//! Bounds of operands, for tests: the emulator of the driver is told which tensors an operation has, and reports kernels that
//! leave them. All tensors lie in one arena, so that the bounds of allocations would not show it.
//!
//! The driver of a card has no such function; then nothing happens here.

use libloading::Library;

/// The emulator's function: addresses and sizes of what launches of this thread may use; none for everything.
type Announce = unsafe extern "C" fn(*const u64, *const usize, usize) -> u32;

/// The emulator's function, if the driver is the emulator.
pub(crate) struct Bounds {
    announce: Option<Announce>,
    _library: Option<Library>,
}

impl Bounds {
    /// Looks for the function in the driver, which is loaded.
    pub(crate) fn find() -> Bounds {
        // SAFETY: the driver's initialisers have run; the type is that of the emulator's function.
        let (library, announce) = unsafe {
            let library = Library::new("libcuda.so").ok();
            let found =
                library.as_ref().and_then(|library| library.get::<Announce>(b"phalanxEmulatorOperands").ok());
            let announce = found.map(|function| *function);
            (library.filter(|_| announce.is_some()), announce)
        };
        Bounds { announce, _library: library }
    }

    /// Returns whether bounds are checked.
    pub(crate) fn are_checked(&self) -> bool {
        self.announce.is_some()
    }

    /// Runs a function whose launches may use these tensors alone, each an address and its bytes.
    pub(crate) fn within<T>(&self, operands: &[(u64, usize)], run: impl FnOnce() -> T) -> T {
        let Some(announce) = self.announce else { return run() };
        let (addresses, sizes): (Vec<u64>, Vec<usize>) = operands.iter().copied().unzip();
        // SAFETY: both have as many elements as are given.
        unsafe { announce(addresses.as_ptr(), sizes.as_ptr(), addresses.len()) };
        let result = run();
        // SAFETY: with none, nothing is read.
        unsafe { announce(std::ptr::null(), std::ptr::null(), 0) };
        result
    }
}
