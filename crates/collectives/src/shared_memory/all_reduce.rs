//! All_reduce in place, one pass: P ranks, S bytes, 1 step; 2S(P-1)/P bytes leave each rank.
//!
//! Rank r owns part r of all P buffers: it reads its part of every buffer (the reduce_scatter) and writes
//! the sum into its part of every buffer (the all_gather), block by block, while the block is in the
//! cache of its core. Parts do not meet, so between the first and the last tick nobody waits. Writing to
//! the peers saves what reading from them would cost: a second step, and the transfer of every line that
//! the peer has just modified.

use phalanx_simd::sums;

use crate::call::summed;
use crate::error::CollectiveError;
use crate::parts;
use crate::shared_memory::meeting::Meeting;
use crate::shared_memory::memory::MemoryRange;
use crate::shared_memory::transfer::Transfer;

/// Bytes of a block, which is summed and then copied to the peers while it is in L1.
const BLOCK_BYTES: usize = 8 << 10;

pub(crate) fn run(m: &mut Meeting, t: &Transfer) -> Result<(), CollectiveError> {
    let width = t.dtype.bytes();
    let part = parts::uneven(t.count, m.world_size(), m.rank());
    for first in part.clone().step_by(BLOCK_BYTES / width) {
        let elements = (part.end - first).min(BLOCK_BYTES / width);
        let (start, bytes) = (first * width, elements * width);
        let sum = t.source.range(start, bytes).address;
        // SAFETY: every source holds the whole (Meeting::meet checked); until this rank leaves, its part of
        // all of them is this rank's alone to read and to write.
        unsafe {
            sums::sum(m.isa(), summed(t.dtype), m.sources_at(start), sum, elements, false);
            for q in m.peers() {
                let address = m.source(q).cast_mut().wrapping_add(start);
                MemoryRange { address, bytes }.fill_from(m.isa(), sum);
            }
        }
    }
    m.leave()
}
