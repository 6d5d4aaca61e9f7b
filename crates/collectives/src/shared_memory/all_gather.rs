//! All_gather by direct exchange: P ranks, S bytes, 1 step; each rank copies the parts of the P - 1
//! others, so S(P-1)/P bytes leave each rank.

use crate::error::CollectiveError;
use crate::parts;
use crate::shared_memory::meeting::Meeting;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(m: &mut Meeting, t: &Transfer) -> Result<(), CollectiveError> {
    let bytes = parts::equal(t.count, m.world_size(), 0).len() * t.dtype.bytes();
    let own = m.rank();
    // In place, this rank's own part is already where it belongs.
    let from = m.peers().chain((!t.in_place()).then_some(own));
    for q in from {
        // SAFETY: the source is a whole part (Meeting::meet checked) that its owner keeps until this
        // rank leaves; the target is this rank's alone, and no part that a peer reads.
        unsafe { t.target.range(q * bytes, bytes).fill_from(m.isa(), m.source(q)) };
    }
    m.leave()
}
