//! The collectives of a group whose members run on several hosts: shared memory within a host; between hosts TCP,
//! or a library that carries messages.
//!
//! A call, seen from one rank: (1) meet the members on the own host, as on one host; (2) with a lane, exchange calls with
//! the same lane of the other hosts and compare; since each has met its own host before, all members make the same call;
//! (3) move the bytes, of which none is written before the comparison; (4) leave together with the members of the host.
//! Counters advance by three in every call, by four where devices move the bytes, so they are the same on all hosts, and a report can follow
//! waits from host to host.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use phalanx_plan::trace::CollectiveOp;

use super::carrier::{Carrier, Messenger};
use super::exchange::{Exchange, Links};
use super::layout::Layout;
use super::link::Link;
use super::messages::Messages;
use super::node::Node;
use super::partial_sums::PartialSums;
use super::{all_gather, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter};
use crate::error::CollectiveError;
use crate::mover::Mover;
use crate::shared_memory::channel::Channel;
use crate::shared_memory::meeting::{Meeting, Tables};
use crate::shared_memory::membership::{Announced, Membership};
use crate::shared_memory::participation::Patience;
use crate::shared_memory::point_to_point;
use crate::shared_memory::transfer::Transfer;
use crate::shared_memory::watch::Watch;

/// The collectives of a group of several hosts, as one rank runs them.
pub(crate) struct HostsChannel {
    membership: Membership,
    tables: Tables,
    node: Arc<Node>,
    layout: Layout,
    links: Links,
    sums: PartialSums,
    /// True from the begin of a call until it succeeds.
    failed: bool,
}

impl HostsChannel {
    /// The channel of a group. Where a library carries messages, this waits for the other members. If that fails, the job
    /// ends.
    pub(crate) fn new(membership: Membership, node: Arc<Node>) -> HostsChannel {
        let world_size = membership.members.len();
        let layout = Layout::new(&node.network.hosts, &membership.members, membership.rank);
        let (tables, sums) = (Tables::new(world_size), PartialSums::default());
        let links = links(&membership, &node);
        HostsChannel { membership, tables, node, layout, links, sums, failed: false }
    }

    fn run(
        &mut self,
        t: &Transfer,
        mover: Option<&mut dyn Mover>,
        patience: Patience,
    ) -> Result<(), CollectiveError> {
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
            match mover {
                Some(mover) => meeting.run_mover(mover)?,
                None => point_to_point::run(&mut meeting, t)?,
            }
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
        match mover {
            Some(mover) => {
                x.settle()?;
                x.agree()?;
                x.meeting.run_mover(mover)?;
            }
            None => {
                run(&mut x, t, &mut self.sums)?;
                x.leave()?;
            }
        }
        self.membership.end(&descriptor);
        Ok(())
    }
}

impl Channel for HostsChannel {
    fn membership(&self) -> &Membership {
        &self.membership
    }

    fn attempt(
        &mut self,
        t: &Transfer,
        mover: Option<&mut dyn Mover>,
        patience: Patience,
    ) -> Result<(), CollectiveError> {
        let mut call = Unfinished { node: Arc::clone(&self.node), is_over: false };
        self.failed = true;
        self.run(t, mover, patience)?;
        (call.is_over, self.failed) = (true, false);
        Ok(())
    }
}

impl Drop for HostsChannel {
    fn drop(&mut self) {
        if self.membership.host.control.is_aborted() {
            self.links.iter_mut().flatten().for_each(|link| link.discard());
        }
        // A library may have messages in flight to frames and staging, and threads of its own that move them.
        if self.failed && self.node.carrier().is_some() {
            std::mem::forget((std::mem::take(&mut self.links), std::mem::take(&mut self.sums)));
        }
    }
}

/// The links of a group that need no connection: none over TCP, where each is made when it is needed.
fn links(membership: &Membership, node: &Node) -> Links {
    let Membership { host, group, members, .. } = membership;
    let Some(carrier) = node.carrier() else { return members.iter().map(|_| None).collect() };
    let messenger = open(membership, carrier).map_err(|why| {
        host.abort(&format!(
            "{} opens no messages for group {group} of ranks {members:?}: {why}",
            carrier.name()
        ))
    });
    let link = |q: usize| {
        let (messenger, longest) = (messenger.as_ref().ok()?, carrier.max_message_bytes());
        let path = Messages::new(Arc::clone(messenger), q, longest);
        (!membership.is_here(q)).then(|| Box::new(Link::new(Box::new(path))))
    };
    (0..members.len()).map(link).collect()
}

/// Members come to a new group at different times, and nobody sees whether one that has not come yet works: a new group gets so
/// many times the time after which a rank that stands still is given up.
const OPENING_DEADLINES: u32 = 10;

/// The messenger of a group. The library waits for the other members and knows no other end of the job, so a thread of its own
/// asks it, and is left alone when the job ends or the deadline passes.
fn open(membership: &Membership, carrier: &Arc<dyn Carrier>) -> Result<Arc<dyn Messenger>, String> {
    let Membership { host, options, index, members, .. } = membership;
    let (answer, answered) = std::sync::mpsc::channel();
    let (asked, index, members) = (Arc::clone(carrier), *index, members.clone());
    let ask = move || {
        // Fails when nobody waits any more.
        let _ = answer.send(asked.open(index, &members));
    };
    let thread = std::thread::Builder::new().name("messages".into()).spawn(ask);
    thread.map_err(|error| format!("no thread: {error}"))?;
    let mut waited = Duration::ZERO;
    loop {
        match answered.recv_timeout(Watch::SLICE) {
            Ok(messenger) => return messenger.map_err(|error| error.to_string()),
            Err(RecvTimeoutError::Disconnected) => return Err("its thread has ended".to_string()),
            Err(RecvTimeoutError::Timeout) => waited += Watch::SLICE,
        }
        host.control.rank(host.rank).sign();
        host.aborted().map_err(|error| error.to_string())?;
        if waited >= options.deadline * OPENING_DEADLINES {
            return Err(format!("not all members have come within {:.1} s", waited.as_secs_f64()));
        }
    }
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

fn run(x: &mut Exchange, t: &Transfer, sums: &mut PartialSums) -> Result<(), CollectiveError> {
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
