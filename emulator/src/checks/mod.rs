//! What the emulator checks beyond results: each finding is a `Report` that names kernel, source line, thread, address.

mod report;
mod rows;
mod shadow;

pub use report::{Finding, Report, Reports};
pub use rows::{Conflict, Lanes, ROW, Shadow};
pub use shadow::{Access, Accessor, Cell, HOST_BLOCK};

/// Which checks run. Bounds and alignment are always checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    /// Reads of memory that was never written.
    pub unwritten: bool,
    /// Accesses to one place that nothing orders.
    pub races: bool,
}

impl Default for Checks {
    fn default() -> Self {
        Self { unwritten: true, races: true }
    }
}
