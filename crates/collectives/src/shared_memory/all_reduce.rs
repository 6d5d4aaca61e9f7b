//! All_reduce in place: reduce_scatter, then all_gather, block by block. P ranks, S bytes; each rank sums
//! its part of all buffers and copies the parts of the P - 1 others, so 2S(P-1)/P bytes leave each rank.
//!
//! A rank announces every block of its part as it is summed; peers copy announced blocks between their
//! own, while the lines are still in a cache, and never wait for one before all their own are summed.
//! Writing a peer's part into the own buffer is safe once the peer has summed it: nobody else reads it
//! there.

use crate::error::CollectiveError;
use crate::parts;
use crate::reduction;
use crate::shared_memory::channel::Transfer;
use crate::shared_memory::meeting::Meeting;

/// Bytes of a block: all P sources of one, and the peers' blocks that are copied, fit in a core's cache.
const BLOCK_BYTES: usize = 64 << 10;

pub(crate) fn run(m: &mut Meeting, t: &Transfer) -> Result<(), CollectiveError> {
    let blocks = Blocks {
        count: t.count,
        world_size: m.world_size(),
        block: BLOCK_BYTES / t.dtype.bytes(),
        number: (parts::longest(t.count, m.world_size()) * t.dtype.bytes()).div_ceil(BLOCK_BYTES) as u32,
    };
    m.copied().fill(0);
    for k in 0..blocks.number {
        let (start, elements) = blocks.range(m.rank(), k);
        let target = t.source.range(start * t.dtype.bytes(), elements * t.dtype.bytes());
        // SAFETY: every source holds the whole (Meeting::meet checked); this rank's part of it is not
        // written by its owner before the tick below. The target is the same part of the own source,
        // which no peer reads before that tick.
        unsafe {
            reduction::sum(t.dtype, m.sources_at(start * t.dtype.bytes()), target.address, elements, false);
        }
        m.tick();
        for q in m.peers() {
            copy_announced(m, t, &blocks, q);
        }
    }
    for q in m.peers() {
        while m.copied()[q] < blocks.number {
            let next = m.copied()[q] + 1;
            m.wait(q, 1 + next)?;
            copy_announced(m, t, &blocks, q);
        }
    }
    m.leave()
}

/// How parts are cut into blocks; every part has the same number, the last ones short or empty.
struct Blocks {
    count: usize,
    world_size: usize,
    /// Elements of a block.
    block: usize,
    number: u32,
}

impl Blocks {
    /// First element and number of elements of block `k` of part `q`.
    fn range(&self, q: usize, k: u32) -> (usize, usize) {
        let part = parts::uneven(self.count, self.world_size, q);
        let start = (part.start + k as usize * self.block).min(part.end);
        (start, self.block.min(part.end - start))
    }
}

/// Copies the blocks of part `q` that its owner has summed and this rank does not have yet.
fn copy_announced(m: &mut Meeting, t: &Transfer, blocks: &Blocks, q: usize) {
    let summed = (m.progress(q).saturating_sub(1)).min(blocks.number);
    for k in m.copied()[q]..summed {
        let (start, elements) = blocks.range(q, k);
        let (start, bytes) = (start * t.dtype.bytes(), elements * t.dtype.bytes());
        // SAFETY: the owner has summed the block and changes it no more before this rank leaves; only
        // the owner read this rank's copy of it, and is done.
        unsafe { t.source.range(start, bytes).fill_from(m.source(q).wrapping_add(start)) };
    }
    m.copied()[q] = summed;
}
