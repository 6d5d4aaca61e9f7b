//! The calls of one group in one rank, in their order: numbers them, announces them, and runs the
//! algorithm of each.

use std::sync::Arc;

use phalanx_trace::CollectiveOp;

use crate::call;
use crate::error::CollectiveError;
use crate::shared_memory::control::LastCall;
use crate::shared_memory::descriptor::Descriptor;
use crate::shared_memory::host::Host;
use crate::shared_memory::meeting::{Meeting, Tables};
use crate::shared_memory::options::Options;
use crate::shared_memory::participation::{Participation, Patience};
use crate::shared_memory::transfer::Transfer;
use crate::shared_memory::{
    all_gather, all_reduce, all_to_all, broadcast, gather, point_to_point, reduce, reduce_scatter, scatter,
};

/// The collectives of one group, as one rank runs them.
pub(crate) struct GroupChannel {
    pub(crate) host: Arc<Host>,
    options: Options,
    pub(crate) group: &'static str,
    hash: u32,
    pub(crate) index: usize,
    pub(crate) members: Vec<usize>,
    rank: usize,
    /// Calls of the whole group so far.
    calls: u64,
    /// Messages with each member so far.
    messages: Vec<u64>,
    tables: Tables,
}

impl GroupChannel {
    /// `members` are world ranks, among them this host's.
    pub(crate) fn new(
        host: Arc<Host>,
        options: Options,
        group: &'static str,
        index: usize,
        members: Vec<usize>,
    ) -> GroupChannel {
        let rank = members.iter().position(|m| *m == host.rank);
        let rank =
            rank.unwrap_or_else(|| panic!("rank {} is not a member of group {group} {members:?}", host.rank));
        host.control.open_channel(index);
        host.control.slot(index, host.rank).name.write(group, 0);
        let (messages, tables) = (vec![0; members.len()], Tables::new(members.len()));
        let hash = hash(group, &members);
        GroupChannel { host, options, group, hash, index, members, rank, calls: 0, messages, tables }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn world_size(&self) -> usize {
        self.members.len()
    }

    /// Runs one call to its end; returns the bytes that peers have read here. A failure ends the job for
    /// everybody.
    pub(crate) fn execute(&mut self, t: &Transfer, patience: Patience) -> Result<u64, CollectiveError> {
        let result = self.host.aborted().and_then(|()| self.attempt(t, patience));
        if let Err(error) = &result {
            self.host.abort_because(error);
        }
        result
    }

    fn attempt(&mut self, t: &Transfer, patience: Patience) -> Result<u64, CollectiveError> {
        let pair = if matches!(t.op, CollectiveOp::Send | CollectiveOp::Recv) { t.root } else { None };
        let number = pair.map_or(&mut self.calls, |peer| &mut self.messages[peer]);
        *number += 1;
        let (rank, world_size) = (self.rank, self.members.len());
        let offered = t.offered(rank, world_size);
        let descriptor = Descriptor {
            group: self.hash,
            sequence: *number,
            op: t.op,
            dtype: t.dtype,
            accumulate: t.accumulate,
            count: t.count as u64,
            root: t.root,
            tag: t.tag,
            source: self.host.memory.offer(self.host.rank, offered)?,
            source_bytes: offered.bytes as u64,
            target: 0,
        };
        let peer = pair.map(|q| self.members[q]);
        let call = LastCall { channel: self.index, peer, parity: descriptor.parity() };
        self.host.control.rank(self.host.rank).begin(call);
        let flight = self.host.control.flight(self.host.rank);
        flight.begin(self.index, &descriptor, t.site);
        let participation = Participation {
            host: &self.host,
            options: &self.options,
            group: self.group,
            channel: self.index,
            members: &self.members,
            rank,
            pair,
            patience,
        };
        let mut meeting = Meeting::new(participation, &mut self.tables);
        meeting.meet(&descriptor, t.site, offered.address)?;
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
        flight.end(self.index, &descriptor);
        Ok(call::sent_bytes(t.op, t.dtype, t.count, t.root, rank, world_size))
    }
}

/// FNV-1a over the name and the members.
fn hash(group: &str, members: &[usize]) -> u32 {
    let members = members.iter().flat_map(|m| (*m as u32).to_le_bytes());
    let bytes = group.bytes().chain([0]).chain(members);
    bytes.fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}
