//! Send and recv: one message of S bytes between two ranks, 1 step; the receiver copies from the sender's
//! buffer. A rendezvous: the sender is done when the receiver is, and both keep the order of their calls.

use phalanx_plan::trace::CollectiveOp;

use crate::error::CollectiveError;
use crate::shared_memory::meeting::Meeting;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(m: &mut Meeting, t: &Transfer) -> Result<(), CollectiveError> {
    if t.op == CollectiveOp::Send {
        return m.leave();
    }
    // SAFETY: the sender keeps its whole buffer (Meeting::meet checked) until this rank's tick; the target
    // is this rank's alone.
    unsafe { t.target.fill_from(m.isa(), m.source(t.root())) };
    m.tick();
    Ok(())
}
