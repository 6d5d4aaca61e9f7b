//! Calls of one kernel that follow each other, gathered into one launch.
//!
//! A step updates each parameter by itself, and sums its squares: hundreds of small calls, of which each would cost a launch of
//! some microseconds. Such a call is kept until one comes that does not belong to it, or until somebody waits for the stream;
//! then one launch computes all. Its kernel has a table of spans, one for each call (`kernels/spans.cuh`).
//!
//! A block computes a part of one span, by the span's shape alone, so gathering changes no result. Calls that read what an
//! earlier one writes are not gathered.

use std::collections::BTreeMap;
use std::ops::Range;

use phalanx_tensor::Access;
use phalanx_tensor::operation::Operands;
use phalanx_tensor::operations::{Operation, Optimizers, Reductions};

use crate::error::Error;
use crate::launch::spans::{Shared, Span};
use crate::launch::{Issue, elementwise, sums};
use crate::modules::Launch;
use crate::segment::Caller;

/// Most blocks of a launch.
const BLOCKS_MAX: u64 = i32::MAX as u64;

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

/// Addresses, as ranges that do not touch: the end of each by its start.
#[derive(Debug, Default)]
struct Addresses(BTreeMap<u64, u64>);

impl Addresses {
    /// The last range that begins before `end` or at it, and ends behind `start` or at it.
    fn touching(&self, start: u64, end: u64) -> Option<Range<u64>> {
        let (first, last) = self.0.range(..=end).next_back()?;
        (*last >= start).then_some(*first..*last)
    }

    fn overlap(&self, range: &Range<u64>) -> bool {
        self.touching(range.start + 1, range.end - 1).is_some()
    }

    fn add(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        while let Some(old) = self.touching(start, end) {
            self.0.remove(&old.start);
            (start, end) = (start.min(old.start), end.max(old.end));
        }
        self.0.insert(start, end);
    }
}

/// Addresses that calls read and write.
#[derive(Debug, Default)]
struct Used {
    read: Addresses,
    written: Addresses,
}

impl Used {
    /// Returns whether a call with these operands may run concurrently with the others.
    fn is_apart(&self, operands: &[(Access, Range<u64>)]) -> bool {
        operands.iter().all(|(access, range)| {
            let by_reader = *access == Access::Write && self.read.overlap(range);
            !by_reader && !self.written.overlap(range)
        })
    }

    fn add(&mut self, operands: Vec<(Access, Range<u64>)>) {
        for (access, range) in operands {
            match access {
                Access::Read => self.read.add(range),
                Access::Write => self.written.add(range),
            }
        }
    }
}

/// The operands of an operation that have elements.
fn operands(operation: &mut Operation) -> Vec<(Access, Range<u64>)> {
    let mut all = Vec::new();
    operation.visit(&mut |operand| {
        let start = operand.address.as_ptr().expose_provenance() as u64;
        if operand.bytes > 0 {
            all.push((operand.access, start..start + operand.bytes as u64));
        }
    });
    all
}

/// Calls that were not launched yet.
pub(crate) struct Gathered {
    shared: Shared,
    table: Vec<u64>,
    spans: usize,
    blocks: u64,
    used: Used,
    /// The first call, with the bounds of all.
    pub(crate) caller: Caller,
}

impl Gathered {
    /// Begins with a call. The operation has addresses of the card.
    pub(crate) fn new(span: Span, operation: &mut Operation, caller: Caller) -> Gathered {
        let Span { shared, words: table, blocks } = span;
        let mut used = Used::default();
        used.add(operands(operation));
        Gathered { shared, table, spans: 1, blocks, used, caller }
    }

    /// Adds a call with its bounds; gives it back if it does not belong to the others.
    pub(crate) fn add(
        &mut self,
        span: Span,
        operation: &mut Operation,
        bounds: &[(u64, usize)],
    ) -> Result<(), Span> {
        let operands = operands(operation);
        let belongs = self.spans < self.shared.spans_max
            && self.blocks + span.blocks <= BLOCKS_MAX
            && self.shared == span.shared
            && self.used.is_apart(&operands);
        if !belongs {
            return Err(span);
        }
        self.used.add(operands);
        self.caller.bounds.extend(bounds);
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
        self.launch_table(launch, &table, &arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_become_one() {
        let mut addresses = Addresses::default();
        for range in [30..40, 10..20, 60..70, 40..44, 18..30] {
            addresses.add(range);
        }
        assert_eq!(addresses.0, BTreeMap::from([(10, 44), (60, 70)]));
        for (range, overlaps) in
            [(0..10, false), (9..11, true), (43..50, true), (44..60, false), (0..99, true)]
        {
            assert_eq!(addresses.overlap(&range), overlaps, "{range:?}");
        }
    }

    #[test]
    fn calls_that_share_what_one_writes_are_not_apart() {
        let mut used = Used::default();
        used.add(vec![(Access::Read, 0..4), (Access::Write, 8..16)]);
        for (access, range, is_apart) in [
            (Access::Read, 0..4, true),
            (Access::Read, 4..8, true),
            (Access::Read, 12..20, false),
            (Access::Write, 3..4, false),
            (Access::Write, 4..8, true),
            (Access::Write, 15..17, false),
        ] {
            assert_eq!(used.is_apart(&[(access, range.clone())]), is_apart, "{access:?} {range:?}");
        }
    }
}
