//! One call as a row of the table of a launch that computes several (`kernels/spans.cuh`).

use crate::programs::Program;

/// Properties that all calls of a launch share.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shared {
    pub(super) program: Program,
    pub(super) kernel: &'static str,
    pub(super) threads: u32,
    /// Most spans of a table, as in the kernel.
    pub(super) spans_max: usize,
    /// Arguments behind the table and the number of spans.
    pub(super) arguments: Vec<u64>,
}

/// One call as a span of a table.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(super) shared: Shared,
    /// The span as in the kernel. The lower half of the last word is for the number of blocks before it.
    pub(super) words: Vec<u64>,
    pub(super) blocks: u64,
}
