//! The calls of one group in one rank, in their order: the algorithm of each.

use phalanx_plan::trace::CollectiveOp;

use crate::call;
use crate::error::CollectiveError;
use crate::mover::Mover;
use crate::shared_memory::meeting::{Meeting, Tables};
use crate::shared_memory::membership::{Announced, Membership};
use crate::shared_memory::memory::MemoryRange;
use crate::shared_memory::participation::Patience;
use crate::shared_memory::transfer::Transfer;
use crate::shared_memory::{
    all_gather, all_reduce, all_to_all, broadcast, gather, point_to_point, reduce, reduce_scatter, scatter,
};

/// The collectives of one group, as one rank runs them: how bytes move depends on where the members run.
pub(crate) trait Channel: Send {
    fn membership(&self) -> &Membership;

    /// Runs one call to its end; `mover` moves the bytes of one that devices move.
    fn attempt(
        &mut self,
        t: &Transfer,
        mover: Option<&mut dyn Mover>,
        patience: Patience,
    ) -> Result<(), CollectiveError>;

    /// Runs one call to its end; returns the bytes that peers have read here. A failure ends the job for
    /// everybody.
    fn execute(
        &mut self,
        t: &Transfer,
        mover: Option<&mut dyn Mover>,
        patience: Patience,
    ) -> Result<u64, CollectiveError> {
        let result = self.membership().host.aborted().and_then(|()| self.attempt(t, mover, patience));
        let Membership { host, rank, members, .. } = self.membership();
        match result {
            Ok(()) => Ok(call::sent_bytes(t.op, t.dtype, t.count, t.root, *rank, members.len())),
            Err(error) => {
                host.abort_because(&error);
                Err(error)
            }
        }
    }
}

/// The collectives of a group whose members all run on this host.
pub(crate) struct HostChannel {
    membership: Membership,
    tables: Tables,
}

impl HostChannel {
    pub(crate) fn new(membership: Membership) -> HostChannel {
        let tables = Tables::new(membership.members.len());
        HostChannel { membership, tables }
    }
}

impl Channel for HostChannel {
    fn membership(&self) -> &Membership {
        &self.membership
    }

    fn attempt(
        &mut self,
        t: &Transfer,
        mover: Option<&mut dyn Mover>,
        patience: Patience,
    ) -> Result<(), CollectiveError> {
        let Announced { descriptor, pair } = self.membership.begin(t, MemoryRange::EMPTY)?;
        let participation = self.membership.participation(pair, patience);
        let offered = t.offered(participation.rank, participation.members.len());
        let mut meeting = Meeting::new(participation, &mut self.tables);
        meeting.meet(&descriptor, t.site, offered.address)?;
        if let Some(mover) = mover {
            meeting.run_mover(mover)?;
            self.membership.end(&descriptor);
            return Ok(());
        }
        let m = &mut meeting;
        match t.op {
            CollectiveOp::AllReduce => all_reduce::run(m, t),
            CollectiveOp::ReduceScatter => reduce_scatter::run(m, t),
            CollectiveOp::AllGather => all_gather::run(m, t),
            CollectiveOp::Broadcast => broadcast::run(m, t),
            CollectiveOp::Reduce => reduce::run(m, t),
            CollectiveOp::Gather => gather::run(m, t),
            CollectiveOp::Scatter => scatter::run(m, t),
            CollectiveOp::AllToAll => all_to_all::run(m, t),
            CollectiveOp::Send | CollectiveOp::Recv => point_to_point::run(m, t),
            // All members have arrived, so the barrier is done.
            CollectiveOp::Barrier => Ok(()),
        }?;
        self.membership.end(&descriptor);
        Ok(())
    }
}
