//! Reduce: P ranks, S bytes, 1 step; rank r sums part r of all buffers into the root's buffer, so all ranks
//! share the additions. S(P-1)/P bytes leave the root, S every other rank.

use phalanx_simd::sums;

use crate::call::summed;
use crate::error::CollectiveError;
use crate::parts;
use crate::shared_memory::meeting::Meeting;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(m: &mut Meeting, t: &Transfer) -> Result<(), CollectiveError> {
    let part = parts::uneven(t.count, m.world_size(), m.rank());
    let start = part.start * t.dtype.bytes();
    let target = m.source(t.root()).cast_mut().wrapping_add(start);
    // SAFETY: every source holds the whole (Meeting::meet checked); until this rank leaves, its part of all
    // of them is this rank's alone to read and to write.
    unsafe { sums::sum(m.isa(), summed(t.dtype), m.sources_at(start), target, part.len(), false) };
    m.leave()
}
