//! All_gather by direct exchange: P ranks on H hosts, S bytes, 1 step; each host sends its S/H bytes to every other one,
//! so S(H-1)/H bytes leave it. Members of one host copy each other's parts, as on one host.

use crate::error::CollectiveError;
use crate::network::exchange::Exchange;
use crate::network::parcels::{at, copy_locals, copy_to_locals, shift, slice};
use crate::network::{choice, ring_all_gather};
use crate::parts;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(x: &mut Exchange, t: &Transfer) -> Result<(), CollectiveError> {
    let part = parts::equal(t.count, x.meeting.world_size(), 0).len();
    let slice = slice(x, part, t.dtype.bytes());
    // A rank without a lane only copies what others write and read: the same with both algorithms.
    let received = slice.as_ref().map_or(0, |slice| slice.len() * x.meeting.world_size());
    if choice::gathers_in_ring(x.layout, received) {
        return ring_all_gather::run(x, t);
    }
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
    x.agree()?;
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
