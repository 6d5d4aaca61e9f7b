//! Reduce_scatter by direct exchange: P ranks, S bytes, 1 step; each rank reads its part of the P - 1
//! others, so S(P-1)/P bytes leave each rank. Every source is read once, the sum is written once.
//!
//! In place, rank r writes part r of its own buffer, which no peer reads.

use phalanx_simd::sums;

use crate::call::summed;
use crate::error::CollectiveError;
use crate::parts;
use crate::shared_memory::meeting::Meeting;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(m: &mut Meeting, t: &Transfer) -> Result<(), CollectiveError> {
    let part = parts::equal(t.count, m.world_size(), m.rank());
    let (start, bytes) = (part.start * t.dtype.bytes(), part.len() * t.dtype.bytes());
    let target = if t.in_place() { t.source.range(start, bytes) } else { t.target.range(0, bytes) };
    // SAFETY: every source holds the whole (Meeting::meet checked), its owner keeps it unwritten until
    // this rank leaves; the target is this rank's alone, or the same part of its own source.
    unsafe {
        sums::sum(m.isa(), summed(t.dtype), m.sources_at(start), target.address, part.len(), t.accumulate)
    };
    m.leave()
}
