//! All_gather over a ring of hosts: P ranks on H hosts, S bytes, H-1 steps; each host passes the parts of one host on to
//! the next one in each step, so S(H-1)/H bytes leave it, as by direct exchange.
//!
//! A host sends to one other and receives from one at a time, which spares switches the H-1 senders to one receiver of
//! direct exchange. Each step waits for the one before, so it pays for many hosts and long parts.

use crate::error::CollectiveError;
use crate::network::exchange::Exchange;
use crate::network::parcels::{at, copy_locals, copy_to_locals, shift, slice};
use crate::parts;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(x: &mut Exchange, t: &Transfer) -> Result<(), CollectiveError> {
    let part = parts::equal(t.count, x.meeting.world_size(), 0).len();
    let bytes = part * t.dtype.bytes();
    x.agree()?;
    copy_locals(x, t, bytes);
    let Some(slice) = slice(x, part, t.dtype.bytes()) else { return Ok(()) };
    let (layout, hosts) = (x.layout, x.layout.hosts());
    let before = |steps: usize| (layout.own + hosts - steps) % hosts;
    let (next, previous) = ((layout.own + 1) % hosts, before(1));
    for step in 0..hosts - 1 {
        // The parts of the host that is so many steps before this one; at first its own.
        for q in layout.members(before(step)) {
            let own = if step == 0 {
                at(x.meeting.source(*q), slice.clone())
            } else {
                at(t.target.address, shift(&slice, q * bytes))
            };
            x.send(next, own);
        }
        for q in layout.members(before(step + 1)) {
            x.receive(previous, at(t.target.address, shift(&slice, q * bytes)));
        }
        x.settle()?;
        for q in layout.members(before(step + 1)) {
            copy_to_locals(x, shift(&slice, q * bytes));
        }
    }
    Ok(())
}
