//! Copies over hosts: the slices of a lane that ranks of one host send to those of another.

use std::ops::Range;

use crate::network::exchange::Exchange;
use crate::parts;
use crate::shared_memory::memory::MemoryRange;
use crate::shared_memory::transfer::Transfer;

/// The bytes of this rank's lane in a buffer of `elements` of `width` bytes; None for a rank without a lane.
pub(crate) fn slice(x: &Exchange, elements: usize, width: usize) -> Option<Range<usize>> {
    let (lane, lanes) = x.lane()?;
    let slice = parts::uneven(elements, lanes, lane);
    Some(slice.start * width..slice.end * width)
}

/// The bytes `range` of the buffer at `base`.
pub(crate) fn at(base: *const u8, range: Range<usize>) -> MemoryRange {
    MemoryRange { address: base.cast_mut().wrapping_add(range.start), bytes: range.len() }
}

/// The bytes `range`, `by` bytes later.
pub(crate) fn shift(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// Copies the bytes `range` of this rank's target to the same place of the targets of the other members of the host.
pub(crate) fn copy_to_locals(x: &Exchange, range: Range<usize>) {
    let own = x.meeting.target(x.meeting.rank());
    for q in x.locals().iter().filter(|q| **q != x.meeting.rank()) {
        let to = at(x.meeting.target(*q), range.clone());
        // SAFETY: the call gives these bytes of all targets of this host to this lane alone, until it leaves; the targets
        // have room for them (Meeting compared).
        unsafe { to.fill_from(x.meeting.isa(), own.wrapping_add(range.start)) };
    }
}

/// Copies the parts of this host's members into this rank's target.
pub(crate) fn copy_locals(x: &Exchange, t: &Transfer, bytes: usize) {
    let own = x.meeting.rank();
    // In place, this rank's own part is already where it belongs.
    for q in x.locals().iter().filter(|q| **q != own || !t.in_place()) {
        // SAFETY: the source is a whole part (Meeting compared) that its owner keeps until this rank leaves; these bytes
        // of the target are this rank's alone, and no part that a peer reads.
        unsafe { t.target.range(q * bytes, bytes).fill_from(x.meeting.isa(), x.meeting.source(*q)) };
    }
}
