//! One call of a group of several hosts, in progress, as one rank runs it: what it sends and receives, and the waits.
//!
//! A rank without a lane only meets the members of its host. One with a lane also sends its call to the members that have
//! the same lane, compares theirs, and moves bytes. The loop that moves them never blocks on one connection: it tries all
//! of them, then sleeps until one is ready, for 50 ms at most, and looks around ([`Watch`]). A library that carries messages
//! wakes nobody: there the loop tries again at once for a while, then sleeps for moments.

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use phalanx_plan::trace::Site;
use rustix::event::{PollFd, Timespec, poll};

use super::door::LineKey;
use super::frame;
use super::layout::Layout;
use super::lines::Lines;
use super::link::Link;
use super::node::Node;
use super::peer_path::PeerPath;
use crate::error::CollectiveError;
use crate::shared_memory::descriptor::Descriptor;
use crate::shared_memory::meeting::Meeting;
use crate::shared_memory::memory::MemoryRange;
use crate::shared_memory::participation::{Participation, Patience};
use crate::shared_memory::watch::Watch;

/// Time that the launcher has to say why a rank is gone, before this rank says only that its connection is.
const GRACE: Duration = Duration::from_millis(300);
/// Sleep of a rank that waits for a message: at least and at most. In between, a sixteenth of the time that it waited.
const NAP: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];
/// Counts of a call in every rank of the group, which has announced it with the first: agreed with all hosts; over.
const AGREED: u32 = 2;
const OVER: u32 = 3;

/// The links of a group, by group rank; None until they are needed.
pub(crate) type Links = Vec<Option<Box<Link>>>;

/// One call in progress.
pub(crate) struct Exchange<'a> {
    pub(crate) meeting: Meeting<'a>,
    pub(crate) layout: &'a Layout,
    node: &'a Node,
    links: &'a mut Links,
    own: Descriptor,
    /// The members that this rank exchanges bytes with, by group rank.
    peers: Vec<usize>,
    /// True once this rank knows that all members make the same call.
    agreed: bool,
}

impl<'a> Exchange<'a> {
    /// A call in which this rank exchanges bytes with `peers`, which are on other hosts.
    pub(crate) fn new(
        meeting: Meeting<'a>,
        layout: &'a Layout,
        node: &'a Node,
        links: &'a mut Links,
        own: Descriptor,
        peers: Vec<usize>,
    ) -> Exchange<'a> {
        Exchange { meeting, layout, node, links, own, peers, agreed: false }
    }

    /// Connects to the peers where that was not done yet, and sends them this rank's call.
    pub(crate) fn begin(&mut self, site: Site) -> Result<(), CollectiveError> {
        for at in 0..self.peers.len() {
            let q = self.peers[at];
            if self.links[q].is_none() {
                self.links[q] = Some(Box::new(Link::new(Box::new(self.connect(q)?))));
            }
            let participation = self.meeting.participation();
            let name = &participation.slot_of_group(participation.rank).name;
            let link = self.links[q].as_mut().expect("just made");
            link.begin(|frame| frame::write(&self.own, site, name, frame));
        }
        self.kick()
    }

    /// Members of this host in the call, this rank among them.
    pub(crate) fn locals(&self) -> &'a [usize] {
        self.layout.members(self.layout.own)
    }

    /// This rank's lane, and the number of lanes.
    pub(crate) fn lane(&self) -> Option<(usize, usize)> {
        self.layout.lane.map(|lane| (lane, self.layout.lanes))
    }

    /// Sends a buffer to this rank's lane of a host. It stays as it is until [`Exchange::settle`].
    pub(crate) fn send(&mut self, host: usize, buffer: MemoryRange) {
        self.send_to(self.layout.peer(host), buffer);
    }

    /// Receives a buffer from this rank's lane of a host. It is filled after [`Exchange::settle`].
    pub(crate) fn receive(&mut self, host: usize, buffer: MemoryRange) {
        self.receive_from(self.layout.peer(host), buffer);
    }

    /// Sends a buffer to member `q`, one of the peers.
    pub(crate) fn send_to(&mut self, q: usize, buffer: MemoryRange) {
        self.links[q].as_mut().expect("a peer of this call").send(buffer);
    }

    /// Receives a buffer from member `q`, one of the peers.
    pub(crate) fn receive_from(&mut self, q: usize, buffer: MemoryRange) {
        self.links[q].as_mut().expect("a peer of this call").receive(buffer);
    }

    /// Moves what can be moved without waiting.
    pub(crate) fn kick(&mut self) -> Result<(), CollectiveError> {
        let watch = Watch::new(self.meeting.participation());
        self.advance(&watch).map(drop)
    }

    /// Waits until all members are known to make the same call; before that, no buffer is written. One lane knows it from
    /// its peers, because each has met its own host before, and a rank without a lane knows it from the first lane.
    pub(crate) fn agree(&mut self) -> Result<(), CollectiveError> {
        if self.agreed {
            return Ok(());
        }
        if self.peers.is_empty() {
            self.meeting.wait(self.locals()[0], AGREED)?;
        } else {
            self.wait_until(Link::has_agreed)?;
        }
        self.agreed = true;
        self.meeting.tick();
        Ok(())
    }

    /// Waits until everything is sent and received, and every peer's call was compared.
    pub(crate) fn settle(&mut self) -> Result<(), CollectiveError> {
        self.wait_until(|link| link.is_received() && link.is_sent())
    }

    /// Moves bytes until `is_over` for all links of the call.
    fn wait_until(&mut self, is_over: fn(&Link) -> bool) -> Result<(), CollectiveError> {
        let participation = self.meeting.participation();
        let mut watch = Watch::new(participation);
        let mut idle: Option<Idle> = None;
        loop {
            let moved = self.advance(&watch)?;
            let Some(late) = self.late(is_over) else { return Ok(()) };
            if !moved {
                let idle = idle.get_or_insert_with(Idle::begin);
                let spins = self.node.carrier().is_some() && idle.spins(participation.patience);
                if !spins || participation.host.control.is_aborted() {
                    watch.look_around(late, self.awaited())?;
                }
                self.sleep(idle);
            } else if idle.is_some() {
                (watch, idle) = (Watch::new(participation), None);
            } else if participation.host.control.is_aborted() {
                participation.host.aborted()?;
            }
        }
    }

    /// The end of the call, when this rank's part is settled. When this returns, nobody on this host
    /// uses its buffers any more.
    pub(crate) fn leave(&mut self) -> Result<(), CollectiveError> {
        self.agree()?;
        self.meeting.leave()
    }

    /// Moves what can be moved now, and compares the calls that have arrived. Returns whether something has happened.
    fn advance(&mut self, watch: &Watch) -> Result<bool, CollectiveError> {
        let mut moved = false;
        let mut newly_agreed = false;
        for q in &self.peers {
            let Some(link) = &mut self.links[*q] else { continue };
            moved |= link.advance().map_err(|error| self.node.lost(watch, *q, &error))?;
            if let Some(heard) = link.heard() {
                watch.agreed(&self.own, *q, &heard.descriptor, &heard.name)?;
                link.agree();
                newly_agreed = true;
            }
        }
        let links = || self.peers.iter().filter_map(|q| self.links[*q].as_ref());
        if newly_agreed && links().count() == self.peers.len() && links().all(|link| link.has_agreed()) {
            self.peers.iter().for_each(|q| self.links[*q].iter_mut().for_each(|link| link.open()));
        }
        Ok(moved || newly_agreed)
    }

    /// The first peer that this rank still waits for: one whose call has not arrived, for which nothing is taken from the others, or else
    /// one that has not sent everything, or has not taken everything.
    fn late(&self, is_over: fn(&Link) -> bool) -> Option<usize> {
        let open = self.peers.iter().filter(|q| self.links[**q].as_ref().is_some_and(|link| !is_over(link)));
        let state = |link: &Link| (link.has_agreed(), link.is_received());
        open.copied().min_by_key(|q| self.links[*q].as_ref().map(|link| state(link)))
    }

    /// The count that ends the wait for `q`: that of its whole call. A rank that has announced its call may have been stopped
    /// before it sent it.
    fn awaited(&self) -> u32 {
        self.meeting.count_at(OVER)
    }

    /// Sleeps until a connection is ready; without connections, for a moment.
    fn sleep(&self, idle: &mut Idle) {
        if self.node.carrier().is_some() {
            return idle.pause(self.meeting.participation().patience);
        }
        let mut fds: Vec<PollFd> = Vec::new();
        self.peers.iter().filter_map(|q| self.links[*q].as_ref()).for_each(|link| link.add_fds(&mut fds));
        let slice = Timespec { tv_sec: 0, tv_nsec: Watch::SLICE.as_nanos() as i64 };
        // Whether ready, timed out or interrupted: the caller tries again.
        let _ = poll(&mut fds, Some(&slice));
    }

    /// Connects to member `q`: of two ranks, the one with the higher number in the world connects.
    fn connect(&self, q: usize) -> Result<Lines, CollectiveError> {
        let participation = self.meeting.participation();
        let Participation { host, members, channel, .. } = participation;
        let until = self.awaited();
        let watch = RefCell::new(Watch::new(participation));
        let failure = Cell::new(None);
        let look_around = || {
            watch.borrow_mut().look_around(q, until).map_err(|error| {
                failure.set(Some(error));
                std::io::Error::other("the wait is over")
            })
        };
        let line = |stream: usize| {
            let key = LineKey { channel, from: host.rank.max(members[q]), stream };
            if host.rank > members[q] {
                return self.node.connect(key, members[q], &look_around);
            }
            loop {
                if let Some(line) = self.node.take(key, Watch::SLICE) {
                    return Ok(line);
                }
                look_around()?;
            }
        };
        let mut lines = Vec::new();
        for stream in 0..self.node.network.streams {
            match line(stream) {
                Ok(line) => lines.push(line),
                Err(error) => {
                    Lines::new(lines).discard();
                    return Err(failure.take().unwrap_or_else(|| self.node.lost(&watch.borrow(), q, &error)));
                }
            }
        }
        Ok(Lines::new(lines))
    }
}

/// A wait in which nothing has moved yet.
struct Idle {
    since: Instant,
    tries: u32,
}

impl Idle {
    fn begin() -> Idle {
        Idle { since: Instant::now(), tries: 0 }
    }

    /// Returns whether the next try follows without a pause.
    fn spins(&self, patience: Patience) -> bool {
        self.tries < patience.spins
    }

    /// Passes a moment before the next try: first nothing, then the time of a yield, then of a sleep.
    fn pause(&mut self, patience: Patience) {
        if self.spins(patience) {
            self.tries += 1;
            return std::hint::spin_loop();
        }
        let waited = self.since.elapsed();
        if waited < patience.yields {
            std::thread::yield_now();
        } else {
            std::thread::sleep((waited / 16).clamp(NAP[0], NAP[1]));
        }
    }
}

impl Node {
    /// The error for a connection to member `q` that broke: what the launcher says about it, if it says so soon.
    fn lost(&self, watch: &Watch, q: usize, error: &std::io::Error) -> CollectiveError {
        let Participation { host, members, .. } = watch.participation();
        if host.control.wait_aborted(GRACE)
            && let Err(told) = host.aborted()
        {
            return told;
        }
        let rank = members[q];
        let on = self.network.hosts.host_of(rank);
        let path = match self.carrier() {
            None => format!("on the connection to host {on} at {}", self.network.addresses[rank]),
            Some(carrier) => format!("in a message of {} to or from host {on}", carrier.name()),
        };
        let report = format!("{error}, {path}; {}", watch.describe(rank));
        match error.kind() {
            // Nobody has closed the connection: the system has no way to the peer.
            ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::NetworkDown
            | ErrorKind::TimedOut => CollectiveError::Cut { rank: host.rank, peer: rank, report },
            _ => CollectiveError::Disconnected { rank, report },
        }
    }
}
