//! What the memories of a device have in common.

use crate::checks::{Finding, Shadow};

/// An access that hardware or driver would refuse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What is wrong.
    pub finding: Finding,
    /// The allocation that is near, or was there.
    pub detail: String,
}

/// A memory as its accesses see it.
pub struct Parts<'a> {
    /// Its bytes.
    pub bytes: &'a mut [u8],
    /// Bytes that were written.
    pub written: &'a mut [u64],
    /// Bytes that an asynchronous copy will write. None of global memory.
    pub pending: &'a mut [u64],
    /// Who used it.
    pub shadow: Shadow<'a>,
}
