//! All_to_all by direct exchange: P ranks on H hosts, S bytes each, 1 step; each lane sends its slice of every part that
//! goes from its host to another one, straight into the buffer of the member: PS(H-1)/H² bytes leave each host.

use crate::error::CollectiveError;
use crate::network::exchange::Exchange;
use crate::network::parcels::{at, shift, slice};
use crate::parts;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(x: &mut Exchange, t: &Transfer) -> Result<(), CollectiveError> {
    let part = parts::equal(t.count, x.meeting.world_size(), 0).len();
    let bytes = part * t.dtype.bytes();
    let (own, locals) = (x.meeting.rank(), x.locals());
    if let Some(slice) = slice(x, part, t.dtype.bytes()) {
        for host in x.layout.others() {
            let members = x.layout.members(host);
            for (from, to) in locals.iter().flat_map(|from| members.iter().map(move |to| (*from, *to))) {
                x.send(host, at(x.meeting.source(from), shift(&slice, to * bytes)));
            }
            for (from, to) in members.iter().flat_map(|from| locals.iter().map(move |to| (*from, *to))) {
                x.receive(host, at(x.meeting.target(to), shift(&slice, from * bytes)));
            }
        }
        x.kick()?;
    }
    x.agree()?;
    for q in locals {
        let source = x.meeting.source(*q).wrapping_add(own * bytes);
        // SAFETY: the source holds the whole (Meeting compared) and its owner keeps it until this rank leaves; these
        // bytes of the target are this rank's alone.
        unsafe { t.target.range(q * bytes, bytes).fill_from(x.meeting.isa(), source) };
    }
    x.settle()
}
