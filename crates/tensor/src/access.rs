//! Kind of access to a piece of memory.

/// Access of an operation to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The operand is only read.
    Read,
    /// The operand is overwritten, accumulated into, or updated in place.
    Write,
}
