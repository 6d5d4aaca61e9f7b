//! Broadcast: P ranks, S bytes, 1 step; every rank copies from the root, which sends S(P-1).
//!
//! On one host a tree would only add copies: all read the root's memory through the same cache.

use crate::error::CollectiveError;
use crate::shared_memory::meeting::Meeting;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(m: &mut Meeting, t: &Transfer) -> Result<(), CollectiveError> {
    let root = t.root();
    if m.rank() == root {
        return m.leave();
    }
    // SAFETY: the root keeps its whole buffer (Meeting::meet checked) until this rank's tick; the target
    // is this rank's alone, and nobody reads it.
    unsafe { t.source.fill_from(m.isa(), m.source(root)) };
    m.tick();
    Ok(())
}
