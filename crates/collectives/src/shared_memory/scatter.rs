//! Scatter: P ranks, S bytes in all, 1 step; each rank copies its part of the root's buffer, so S(P-1)/P
//! bytes leave the root.

use crate::error::CollectiveError;
use crate::parts;
use crate::shared_memory::meeting::Meeting;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(m: &mut Meeting, t: &Transfer) -> Result<(), CollectiveError> {
    let bytes = parts::equal(t.count, m.world_size(), 0).len() * t.dtype.bytes();
    let part = m.source(t.root()).wrapping_add(m.rank() * bytes);
    // SAFETY: the root keeps its whole buffer (Meeting::meet checked) until this rank's tick; the target is
    // this rank's alone.
    unsafe { t.target.range(0, bytes).fill_from(m.isa(), part) };
    if m.rank() == t.root() {
        return m.leave();
    }
    m.tick();
    Ok(())
}
