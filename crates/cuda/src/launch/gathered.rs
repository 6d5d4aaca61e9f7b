//! Calls of one kernel that follow each other, gathered into one launch.
//!
//! A step updates each parameter by itself, and sums its squares: hundreds of small calls, of which each would cost a launch of
//! some microseconds. Such a call is kept until one comes that does not belong to it, or until somebody waits for the stream;
//! then one launch computes all. Its kernel has a table of spans, one for each call (`kernels/spans.cuh`).
//!
//! A block computes a part of one span, by the span's shape alone, so gathering changes no result. Calls that read what an
//! earlier one writes are not gathered.

use std::ops::Range;

use phalanx_tensor::Access;
use phalanx_tensor::operation::Operands;
use phalanx_tensor::operations::{Operation, Optimizers, Reductions};
use phalanx_trace::Site;

use crate::error::Error;
use crate::launch::{Issue, elementwise, sums};
use crate::modules::Launch;
use crate::programs::Program;

/// Most blocks of a launch.
const BLOCKS_MAX: u64 = i32::MAX as u64;

/// What all calls of a launch share.
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

impl Span {
    /// An operation as a span; None for one that no table holds.
    pub(crate) fn of(operation: &Operation) -> Option<Span> {
        match operation {
            Operation::Optimizers(Optimizers::AdamWUpdate(o)) => Some(elementwise::adamw_span(o)),
            Operation::Reductions(Reductions::BlockSquares(o)) => Some(sums::squares_span(o)),
            Operation::Reductions(Reductions::TreeSum(o)) => sums::tree_span(o),
            _ => None,
        }
    }
}

/// The addresses of one operand of all calls.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hull {
    addresses: Range<u64>,
    is_written: bool,
}

impl Hull {
    /// Whether both may be used side by side.
    fn is_apart(&self, other: &Hull) -> bool {
        let [a, b] = [&self.addresses, &other.addresses];
        !(self.is_written || other.is_written) || a.end <= b.start || b.end <= a.start
    }
}

/// The operands of an operation, in their order.
fn hulls(operation: &mut Operation) -> Vec<Hull> {
    let mut all = Vec::new();
    operation.visit(&mut |operand| {
        let start = operand.address.as_ptr().expose_provenance() as u64;
        let addresses = start..start + operand.bytes as u64;
        all.push(Hull { addresses, is_written: operand.access == Access::Write });
    });
    all
}

/// Calls that were not launched yet.
pub(crate) struct Gathered {
    shared: Shared,
    table: Vec<u64>,
    spans: usize,
    blocks: u64,
    hulls: Vec<Hull>,
    /// Address and bytes of every operand, where the bounds of kernels are checked.
    pub(crate) bounds: Vec<(u64, usize)>,
    /// The first call, for failures.
    pub(crate) call: &'static str,
    pub(crate) site: Site,
}

impl Gathered {
    /// Begins with a call. The operation has addresses of the card.
    pub(crate) fn new(span: Span, operation: &mut Operation, (call, site): (&'static str, Site)) -> Gathered {
        let Span { shared, words: table, blocks } = span;
        Gathered { shared, table, spans: 1, blocks, hulls: hulls(operation), bounds: Vec::new(), call, site }
    }

    /// Adds a call; gives it back if it does not belong to the others.
    pub(crate) fn add(&mut self, span: Span, operation: &mut Operation) -> Result<(), Span> {
        let hulls = hulls(operation);
        let belongs = self.spans < self.shared.spans_max
            && self.blocks + span.blocks <= BLOCKS_MAX
            && self.shared == span.shared
            && self.hulls.len() == hulls.len()
            && hulls.iter().all(|new| self.hulls.iter().all(|old| old.is_apart(new)));
        if !belongs {
            return Err(span);
        }
        for (all, new) in self.hulls.iter_mut().zip(hulls) {
            all.addresses.start = all.addresses.start.min(new.addresses.start);
            all.addresses.end = all.addresses.end.max(new.addresses.end);
        }
        self.table.extend(span.words);
        *self.table.last_mut().expect("spans have words") |= self.blocks;
        self.blocks += span.blocks;
        self.spans += 1;
        Ok(())
    }
}

impl Issue<'_> {
    /// Launches what was gathered.
    pub(crate) fn gathered(&self, gathered: Gathered) -> Result<(), Error> {
        let Gathered { shared, mut table, spans, blocks, .. } = gathered;
        let Shared { program, kernel, threads, spans_max, mut arguments } = shared;
        table.resize(table.len() / spans * spans_max, 0);
        arguments.insert(0, spans as u64);
        let launch = Launch { program, kernel, grid: [blocks, 1], threads, shared_bytes: 0 };
        // SAFETY: as for every launch; the table has the length of the kernel's.
        unsafe { self.modules.launch_table(self.stream, &launch, &mut table, &mut arguments) }
    }
}
