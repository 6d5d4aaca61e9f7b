//! Scatter: P ranks on H hosts, S bytes in all, 1 step; the root's host sends S(H-1)/H bytes, each lane its slices,
//! straight into the buffers of the members.

use crate::error::CollectiveError;
use crate::network::exchange::Exchange;
use crate::network::parcels::{at, shift, slice};
use crate::parts;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(x: &mut Exchange, t: &Transfer) -> Result<(), CollectiveError> {
    let (root, own) = (t.root(), x.meeting.rank());
    let part = parts::equal(t.count, x.meeting.world_size(), 0).len();
    let bytes = part * t.dtype.bytes();
    let host = x.layout.host_of(root);
    if let Some(slice) = slice(x, part, t.dtype.bytes()) {
        if host == x.layout.own {
            for other in x.layout.others() {
                for q in x.layout.members(other) {
                    x.send(other, at(x.meeting.source(root), shift(&slice, q * bytes)));
                }
            }
        } else {
            x.locals().iter().for_each(|q| x.receive(host, at(x.meeting.target(*q), slice.clone())));
        }
        x.kick()?;
    }
    x.agree()?;
    if host == x.layout.own {
        let part = x.meeting.source(root).wrapping_add(own * bytes);
        // SAFETY: the root keeps its whole buffer (Meeting compared) until this rank leaves; the target is this rank's
        // alone.
        unsafe { t.target.range(0, bytes).fill_from(x.meeting.isa(), part) };
    }
    x.settle()
}
