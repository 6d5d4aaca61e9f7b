//! The ranges of memory that a launch is told to use: of the allocations in which they lie, it may use nothing else.

use std::ops::Range;

/// Ranges of addresses. Without any, a launch may use all memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operands {
    /// What may be used.
    pub ranges: Vec<Range<u64>>,
    /// The allocations around the ranges.
    pub allocations: Vec<Range<u64>>,
}

impl Operands {
    /// Whether bytes may be used.
    #[inline]
    pub(super) fn allow(&self, address: u64, bytes: u64) -> bool {
        let is_within = |range: &Range<u64>| range.start <= address && address + bytes <= range.end;
        self.ranges.iter().any(is_within) || !self.allocations.iter().any(|range| range.contains(&address))
    }

    /// What lies near an address that may not be used.
    pub(super) fn near(&self, address: u64, bytes: usize) -> String {
        let before =
            self.ranges.iter().filter(|range| range.start <= address).max_by_key(|range| range.start);
        match before {
            Some(range) if address >= range.end => format!(
                "{bytes} bytes, {} past the end of an operand of {} bytes",
                address - range.end,
                range.end - range.start
            ),
            Some(range) => {
                format!("{bytes} bytes over the end of an operand of {} bytes", range.end - range.start)
            }
            None => format!("{bytes} bytes before all operands"),
        }
    }
}
