//! Gather: P ranks, S bytes in all, 1 step; the root copies every part, so S/P bytes leave each other rank.

use crate::error::CollectiveError;
use crate::parts;
use crate::shared_memory::meeting::Meeting;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(m: &mut Meeting, t: &Transfer) -> Result<(), CollectiveError> {
    let bytes = parts::equal(t.count, m.world_size(), 0).len() * t.dtype.bytes();
    let own = m.rank();
    if own != t.root() {
        m.tick();
        return m.wait(t.root(), 2);
    }
    for q in m.peers().chain([own]) {
        // SAFETY: the source is a whole part (Meeting::meet checked) that its owner keeps until the root's
        // tick; the target is the root's alone.
        unsafe { t.target.range(q * bytes, bytes).fill_from(m.isa(), m.source(q)) };
    }
    m.tick();
    Ok(())
}
