//! All_gather by direct exchange: P ranks on H hosts, S bytes, 1 step; each host sends its S/H bytes to every other one,
//! so S(H-1)/H bytes leave it. Members of one host copy each other's parts, as on one host.

use crate::error::CollectiveError;
use crate::network::exchange::Exchange;
use crate::network::parcels::{at, copy_to_locals, shift, slice};
use crate::parts;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(x: &mut Exchange, t: &Transfer) -> Result<(), CollectiveError> {
    let part = parts::equal(t.count, x.meeting.world_size(), 0).len();
    let slice = slice(x, part, t.dtype.bytes());
    let bytes = part * t.dtype.bytes();
    if let Some(slice) = &slice {
        for host in x.layout.others() {
            for q in x.locals() {
                x.send(host, at(x.meeting.source(*q), slice.clone()));
            }
            for q in x.layout.members(host) {
                x.receive(host, at(t.target.address, shift(slice, q * bytes)));
            }
        }
        x.kick()?;
    }
    copy_locals(x, t, bytes);
    x.settle()?;
    if let Some(slice) = &slice {
        for host in x.layout.others() {
            for q in x.layout.members(host) {
                copy_to_locals(x, shift(slice, q * bytes));
            }
        }
    }
    Ok(())
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
