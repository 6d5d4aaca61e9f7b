//! Reduce: P ranks on H hosts, S bytes, 1 step; every other host sends its sums to the root's host, which adds them: S
//! bytes leave each of them for each of its subtrees.

use crate::error::CollectiveError;
use crate::network::exchange::Exchange;
use crate::network::partial_sums::{self, PartialSums, Region};
use crate::parts;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(x: &mut Exchange, t: &Transfer, sums: &mut PartialSums) -> Result<(), CollectiveError> {
    let Some((lane, lanes)) = x.lane() else { return Ok(()) };
    let slice = parts::uneven(t.count, lanes, lane);
    let host = x.layout.host_of(t.root());
    let own = host == x.layout.own;
    let offset = slice.start * t.dtype.bytes();
    let target = if own { x.meeting.target(t.root()).wrapping_add(offset) } else { std::ptr::null_mut() };
    let region = Region { host, start: slice.start, elements: slice.len(), target };
    partial_sums::run(x, t, sums, &[region], |_, _, _| ())
}
