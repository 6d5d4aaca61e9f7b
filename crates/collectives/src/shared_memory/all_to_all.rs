//! All_to_all by direct exchange: P ranks, S bytes each, 1 step; each rank copies its part of every
//! buffer, so S(P-1)/P bytes leave each rank.

use crate::error::CollectiveError;
use crate::parts;
use crate::shared_memory::meeting::Meeting;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(m: &mut Meeting, t: &Transfer) -> Result<(), CollectiveError> {
    let bytes = parts::equal(t.count, m.world_size(), 0).len() * t.dtype.bytes();
    let own = m.rank();
    for q in m.peers().chain([own]) {
        // SAFETY: the source holds the whole (Meeting::meet checked) and its owner keeps it until this
        // rank leaves; the target is this rank's alone.
        unsafe { t.target.range(q * bytes, bytes).fill_from(m.isa(), m.source(q).wrapping_add(own * bytes)) };
    }
    m.leave()
}
