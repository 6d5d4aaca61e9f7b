//! How work uses a piece of memory.

/// Whether an operation reads or writes an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The operand is only read.
    Read,
    /// The operand is overwritten, accumulated into, or updated in place.
    Write,
}
