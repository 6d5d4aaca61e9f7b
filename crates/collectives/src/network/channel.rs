//! The collectives of a group whose members run on several hosts: shared memory within a host; between hosts TCP,
//! or a library that carries messages.
//!
//! A call, seen from one rank: (1) meet the members on the own host, as on one host; (2) with a lane, exchange calls with
//! the same lane of the other hosts and compare; since each has met its own host before, all members make the same call;
//! (3) move the bytes, of which none is written before the comparison; (4) leave together with the members of the host.
//! Counters advance by three in every call, so they are the same on all hosts, and a report can follow waits from host to
//! host.

use std::sync::Arc;

use phalanx_trace::CollectiveOp;

use super::exchange::{Exchange, Links};
use super::layout::Layout;
use super::link::Link;
use super::messages::Messages;
use super::node::Node;
use super::partial_sums::Sums;
use super::{all_gather, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter};
use crate::error::CollectiveError;
use crate::shared_memory::channel::Channel;
use crate::shared_memory::meeting::{Meeting, Tables};
use crate::shared_memory::membership::{Announced, Membership};
use crate::shared_memory::participation::Patience;
use crate::shared_memory::point_to_point;
use crate::shared_memory::transfer::Transfer;

/// The collectives of a group of several hosts, as one rank runs them.
pub(crate) struct HostsChannel {
    membership: Membership,
    tables: Tables,
    node: Arc<Node>,
    layout: Layout,
    links: Links,
    sums: Sums,
}

impl HostsChannel {
    /// The channel of a group. Where a library carries messages, this waits for the other members. If that fails, the job
    /// ends.
    pub(crate) fn new(membership: Membership, node: Arc<Node>) -> HostsChannel {
        let world_size = membership.members.len();
        let layout = Layout::new(&node.network.hosts, &membership.members, membership.rank);
        let (tables, sums) = (Tables::new(world_size), Sums::default());
        let links = links(&membership, &node);
        HostsChannel { membership, tables, node, layout, links, sums }
    }

    fn run(&mut self, t: &Transfer, patience: Patience) -> Result<(), CollectiveError> {
        let (rank, world_size) = (self.membership.rank, self.membership.members.len());
        let written = t.written(rank, world_size);
        let Announced { descriptor, pair } = self.membership.begin(t, written)?;
        let participation = self.membership.participation(pair, patience);
        let offered = t.offered(rank, world_size);
        let mut meeting = Meeting::new(participation, &mut self.tables);
        meeting.announce(&descriptor, t.site);
        let far_end = pair.filter(|q| !self.membership.is_here(*q));
        if far_end.is_none() {
            meeting.meet_announced(&descriptor, offered.address, written.address)?;
        }
        if pair.is_some() && far_end.is_none() {
            point_to_point::run(&mut meeting, t)?;
            self.membership.end(&descriptor);
            return Ok(());
        }
        let lanes = || self.layout.others().map(|host| self.layout.peer(host)).collect();
        let peers = match (far_end, self.layout.lane) {
            (Some(q), _) => vec![q],
            (None, Some(_)) => lanes(),
            (None, None) => Vec::new(),
        };
        let mut x = Exchange::new(meeting, &self.layout, &self.node, &mut self.links, descriptor, peers);
        x.begin(t.site)?;
        run(&mut x, t, &mut self.sums)?;
        x.leave()?;
        self.membership.end(&descriptor);
        Ok(())
    }
}

impl Channel for HostsChannel {
    fn membership(&self) -> &Membership {
        &self.membership
    }

    fn attempt(&mut self, t: &Transfer, patience: Patience) -> Result<(), CollectiveError> {
        let mut call = Unfinished { node: Arc::clone(&self.node), is_over: false };
        self.run(t, patience)?;
        call.is_over = true;
        Ok(())
    }
}

/// The links of a group that need no connection: none over TCP, where each is made when it is needed.
fn links(membership: &Membership, node: &Node) -> Links {
    let Membership { host, group, index, members, .. } = membership;
    let Some(carrier) = node.carrier() else { return members.iter().map(|_| None).collect() };
    let messenger = carrier.open(*index, members).map_err(|error| {
        host.abort(&format!("{} opens no messages for group {group}: {error}", carrier.name()))
    });
    let link = |q: usize| {
        let (messenger, longest) = (messenger.as_ref().ok()?, carrier.max_message_bytes());
        let path = Messages::new(Arc::clone(messenger), q, longest);
        (!membership.is_here(q)).then(|| Box::new(Link::new(Box::new(path))))
    };
    (0..members.len()).map(link).collect()
}

/// A call that has not come to its end. If it never does, by an error or a panic, nothing may touch its buffers any more.
struct Unfinished {
    node: Arc<Node>,
    is_over: bool,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.is_over
            && let Some(carrier) = self.node.carrier()
        {
            carrier.close();
        }
    }
}

fn run(x: &mut Exchange, t: &Transfer, sums: &mut Sums) -> Result<(), CollectiveError> {
    match t.op {
        CollectiveOp::AllReduce => all_reduce::run(x, t, sums),
        CollectiveOp::ReduceScatter => reduce_scatter::run(x, t, sums),
        CollectiveOp::Reduce => reduce::run(x, t, sums),
        CollectiveOp::AllGather => all_gather::run(x, t),
        CollectiveOp::Broadcast => broadcast::run(x, t),
        CollectiveOp::Gather => gather::run(x, t),
        CollectiveOp::Scatter => scatter::run(x, t),
        CollectiveOp::AllToAll => all_to_all::run(x, t),
        // One message of S bytes, 1 step, straight from buffer to buffer. Both ends wait for the other's call.
        CollectiveOp::Send => {
            x.send_to(t.root(), t.source);
            x.settle()
        }
        CollectiveOp::Recv => {
            x.receive_from(t.root(), t.target);
            x.settle()
        }
        CollectiveOp::Barrier => x.settle(),
    }
}
