//! Broadcast: P ranks on H hosts, S bytes, 1 step; the root's host sends S(H-1) bytes, each lane its slice. Members of one
//! host copy from the root, or from the lane that has received.

use crate::error::CollectiveError;
use crate::network::exchange::Exchange;
use crate::network::parcels::{at, copy_to_locals, slice};
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(x: &mut Exchange, t: &Transfer) -> Result<(), CollectiveError> {
    let host = x.layout.host_of(t.root());
    let slice = slice(x, t.count, t.dtype.bytes());
    if host == x.layout.own {
        if let Some(slice) = slice {
            let buffer = at(x.meeting.source(t.root()), slice);
            x.layout.others().for_each(|other| x.send(other, buffer));
            x.kick()?;
        }
        x.agree()?;
        if x.meeting.rank() != t.root() {
            // SAFETY: the root keeps its whole buffer (Meeting compared) until this rank leaves; the target is this
            // rank's alone, and nobody reads it.
            unsafe { t.source.fill_from(x.meeting.isa(), x.meeting.source(t.root())) };
        }
        return x.settle();
    }
    let Some(slice) = slice else { return Ok(()) };
    x.receive(host, at(t.source.address, slice.clone()));
    x.settle()?;
    copy_to_locals(x, slice);
    Ok(())
}
