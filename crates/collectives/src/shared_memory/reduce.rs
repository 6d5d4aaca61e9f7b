//! Reduce: reduce_scatter in place, then the root copies the parts. P ranks, S bytes, 2 steps; S(P-1)/P
//! bytes leave the root, S every other rank, and all ranks share the additions.

use crate::error::CollectiveError;
use crate::parts;
use crate::reduction;
use crate::shared_memory::channel::Transfer;
use crate::shared_memory::meeting::Meeting;

/// Ticks after which a rank's part is summed.
const SUMMED: u32 = 2;

pub(crate) fn run(m: &mut Meeting, t: &Transfer) -> Result<(), CollectiveError> {
    let width = t.dtype.bytes();
    let world_size = m.world_size();
    let part = |q| parts::uneven(t.count, world_size, q);
    let own = part(m.rank());
    let target = t.source.range(own.start * width, own.len() * width);
    // SAFETY: every source holds the whole (Meeting::meet checked); nobody writes this rank's part of it
    // before the tick below but its owner, who is this rank.
    unsafe { reduction::sum(t.dtype, m.sources_at(own.start * width), target.address, own.len(), false) };
    m.tick();
    if m.rank() == t.root() {
        for q in m.peers() {
            m.wait(q, SUMMED)?;
            let (start, bytes) = (part(q).start * width, part(q).len() * width);
            // SAFETY: the owner has summed its part and keeps it until the root leaves; only the owner
            // read the root's copy of it, and is done.
            unsafe { t.source.range(start, bytes).fill_from(m.source(q).wrapping_add(start)) };
        }
    }
    m.leave()
}
