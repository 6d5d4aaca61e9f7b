//! Reduce_scatter: P ranks on H hosts, S bytes, 1 step; each host sends its sums of every part that belongs to another
//! host there, so S(H-1)/H bytes leave it for each of its subtrees.

use crate::error::CollectiveError;
use crate::network::exchange::Exchange;
use crate::network::partial_sums::{self, PartialSums, Region};
use crate::parts;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(x: &mut Exchange, t: &Transfer, sums: &mut PartialSums) -> Result<(), CollectiveError> {
    let Some((lane, lanes)) = x.lane() else { return Ok(()) };
    let world = x.meeting.world_size();
    let part = t.count / world;
    let slice = parts::uneven(part, lanes, lane);
    let region = |q: usize| {
        let host = x.layout.host_of(q);
        let offset = slice.start * t.dtype.bytes();
        let own = host == x.layout.own;
        let target = if own { x.meeting.target(q).wrapping_add(offset) } else { std::ptr::null_mut() };
        Region { host, start: q * part + slice.start, elements: slice.len(), target }
    };
    let regions: Vec<Region> = (0..world).map(region).collect();
    partial_sums::run(x, t, sums, &regions, |_, _, _| ())
}
