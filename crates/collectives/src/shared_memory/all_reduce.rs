//! All_reduce in place, in one of two ways.
//!
//! Of a small buffer, *by copies*: P ranks, S bytes, 1 step; S(P-1) bytes leave each rank. Each rank copies its buffer to where peers may read it
//! until the call after next, announces the call, and adds up the copies of all, in the order of the ranks like everybody. A rank that has
//! its sum is done: there is no second meeting, which takes longer than to read a few pages.
//!
//! Else in *one pass*: P ranks, S bytes, 1 step; 2S(P-1)/P bytes leave each rank.
//!
//! Rank r owns part r of all P buffers: it reads its part of every buffer (the reduce_scatter) and writes
//! the sum into its part of every buffer (the all_gather), block by block, while the block is in the
//! cache of its core. Parts do not meet, so between the first and the last tick nobody waits. Writing to
//! the peers saves what reading from them would cost: a second step, and the transfer of every line that
//! the peer has just modified.

use phalanx_trace::CollectiveOp;

use crate::error::CollectiveError;
use crate::parts;
use crate::reduction;
use crate::shared_memory::control::SMALL_BYTES;
use crate::shared_memory::descriptor::Descriptor;
use crate::shared_memory::meeting::Meeting;
use crate::shared_memory::memory::MemoryRange;
use crate::shared_memory::transfer::Transfer;

/// Bytes of a block, which is summed and then copied to the peers while it is in L1.
const BLOCK_BYTES: usize = 8 << 10;

/// Maximum number of members whose small buffers are read by all.
const SMALL_MEMBERS: usize = 16;

/// Whether a call goes by copies.
pub(crate) fn is_small(t: &Transfer, members: usize) -> bool {
    t.op == CollectiveOp::AllReduce && !t.by_device && goes_by_copies(t.count * t.dtype.bytes(), members)
}

/// Whether an all_reduce of `bytes` bytes between ranks of one host goes by copies.
pub(crate) fn goes_by_copies(bytes: usize, members: usize) -> bool {
    bytes <= SMALL_BYTES && (2..=SMALL_MEMBERS).contains(&members)
}

pub(crate) fn run_small(m: &mut Meeting, t: &Transfer, own: &Descriptor) -> Result<(), CollectiveError> {
    let to = t.source.range(0, t.count * t.dtype.bytes());
    // SAFETY: the buffer is this rank's (Pending owns its tensor), and a small one; the copies of all are as long, since all have agreed on
    // type and count, and are not written until the call after next.
    unsafe {
        m.meet_small(own, t.site, to.address, to.bytes)?;
        reduction::sum(m.isa(), t.dtype, m.sources_at(0), to.address, t.count, false);
    }
    Ok(())
}

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
            reduction::sum(m.isa(), t.dtype, m.sources_at(start), sum, elements, false);
            for q in m.peers() {
                let address = m.source(q).cast_mut().wrapping_add(start);
                MemoryRange { address, bytes }.fill_from(m.isa(), sum);
            }
        }
    }
    m.leave()
}
