//! Gather: P ranks on H hosts, S bytes in all, 1 step; every host sends its S/H bytes to the root's host, each lane its
//! slices, straight into the root's buffer.

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
                    x.receive(other, at(x.meeting.target(root), shift(&slice, q * bytes)));
                }
            }
        } else {
            x.locals().iter().for_each(|q| x.send(host, at(x.meeting.source(*q), slice.clone())));
        }
        x.kick()?;
    }
    x.agree()?;
    if own == root {
        for q in x.locals() {
            // SAFETY: the source is a whole part (Meeting compared) that its owner keeps until the root leaves; these
            // bytes of the target are the root's alone.
            unsafe { t.target.range(q * bytes, bytes).fill_from(x.meeting.isa(), x.meeting.source(*q)) };
        }
    }
    x.settle()
}
