//! A rank's access to its job: joins it, gets an arena that peers can read, makes groups.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use phalanx_simd::Isa;
use phalanx_tensor::Region;

use crate::error::CollectiveError;
use crate::group::Group;
use crate::hosts::Hosts;
use crate::network::channel::HostsChannel;
use crate::network::node::Node;
use crate::network::{Carrier, Network, Wire};
use crate::shared_memory::channel::{Channel, HostChannel};
use crate::shared_memory::control::{Control, cores};
use crate::shared_memory::host::Host;
use crate::shared_memory::inherited::take_over;
use crate::shared_memory::membership::Membership;
use crate::shared_memory::memory::{Arenas, Memory};
use crate::shared_memory::options::Options;
use crate::shared_memory::rank_cell::CHANNELS;
use crate::shared_memory::rank_group::RankGroup;

/// One rank's access to the job that it belongs to. Dropping it while its thread panics ends the job.
pub struct Endpoint {
    host: Arc<Host>,
    /// Connections of this rank with those of other hosts; None in a job of one host.
    node: Option<Arc<Node>>,
    options: Options,
    channels: AtomicUsize,
}

/// One endpoint per rank of a job whose ranks are threads of this process. Their groups take tensors of
/// any host memory.
pub fn threads(world_size: usize) -> Vec<Endpoint> {
    let region = Region::anonymous(Control::bytes(world_size)).expect("memory for a control block");
    let control = Arc::new(Control::create(region, world_size, cores()));
    let host = |rank| Host::new(Arc::clone(&control), Memory::Threads, rank, 0..world_size);
    (0..world_size).map(|rank| Endpoint::new(host(rank), None)).collect()
}

/// The endpoint of the world rank `rank` in a process that a launcher started with the descriptors of
/// [`crate::HostJob::inherited_fds`], which it takes over: once per process. They are closed to programs
/// that this one starts. In a job of several hosts the launcher also hands over what the rank needs to reach the others,
/// and the rank's listener ([`crate::HostJob::pass_listener`]).
///
/// # Errors
/// When a descriptor is not open, the control block was made for another world, or the parts do not fit.
pub fn join(
    control_fd: RawFd,
    arena_fds: &[RawFd],
    rank: usize,
    network: Option<(Network, RawFd)>,
) -> std::io::Result<Endpoint> {
    join_carried(control_fd, arena_fds, rank, network, None)
}

/// The same, with what carries messages between hosts if [`Network::wire`] is not TCP.
///
/// # Errors
/// As for [`join`].
pub fn join_carried(
    control_fd: RawFd,
    arena_fds: &[RawFd],
    rank: usize,
    network: Option<(Network, RawFd)>,
    carrier: Option<Arc<dyn Carrier>>,
) -> std::io::Result<Endpoint> {
    let invalid = |text: String| std::io::Error::new(std::io::ErrorKind::InvalidInput, text);
    if let Some((network, _)) = &network {
        network.check()?;
        if (network.wire == Wire::Mpi) != carrier.is_some() {
            return Err(invalid(format!(
                "hosts that are connected by {:?}, and another carrier",
                network.wire
            )));
        }
    }
    let hosts = network.as_ref().map(|(network, _)| network.hosts.clone());
    let (hosts, host) = match hosts {
        Some(hosts) => (hosts, network.as_ref().map_or(0, |(network, _)| network.host)),
        None if arena_fds.is_empty() => return Err(invalid("a job without arenas".into())),
        None => (Hosts::one(arena_fds.len()), 0),
    };
    let own = hosts.ranks(host);
    if !own.contains(&rank) || arena_fds.len() != own.len() {
        let text = format!("rank {rank} of {} ranks {own:?} with {} arenas", own.len(), arena_fds.len());
        return Err(invalid(text));
    }
    let control_fd = take_over(control_fd)?;
    let arenas = arena_fds.iter().map(|fd| take_over(*fd)).collect::<std::io::Result<Vec<_>>>()?;
    let bytes = rustix::fs::fstat(&control_fd)?.st_size as usize;
    if bytes < Control::bytes(1) {
        return Err(invalid(format!("a control block of {bytes} bytes")));
    }
    let control = Control::open(Region::shared(control_fd.as_fd(), bytes)?, hosts.world_size())?;
    let memory = Memory::Processes(Arenas::new(own.start, arenas));
    let node = network.map(|(network, listener_fd)| {
        let listener = TcpListener::from(take_over(listener_fd)?);
        std::io::Result::Ok(Arc::new(match carrier {
            Some(carrier) => Node::carried(network, carrier),
            None => Node::new(network, rank, listener)?,
        }))
    });
    let host = Host::new(Arc::new(control), memory, rank, own);
    Ok(Endpoint::new(host, node.transpose()?))
}

impl Endpoint {
    pub(crate) fn new(host: Arc<Host>, node: Option<Arc<Node>>) -> Endpoint {
        Endpoint { host, node, options: Options::default(), channels: AtomicUsize::new(0) }
    }

    /// The same endpoint, with other options for the groups that it will make.
    pub fn with_options(mut self, options: Options) -> Endpoint {
        let isa = options.isa.limit(Isa::detect());
        self.options = Options { isa, ..options };
        self
    }

    /// This rank's number in the job.
    pub fn rank(&self) -> usize {
        self.host.rank
    }

    /// Address at which ranks of other hosts reach this one; None in a job of one host.
    pub fn address(&self) -> Option<SocketAddr> {
        self.node.as_ref().map(|node| node.network.addresses[self.rank()])
    }

    /// The instruction set that the groups sum and copy with.
    pub fn isa(&self) -> Isa {
        self.options.isa
    }

    /// Ranks of the job.
    pub fn world_size(&self) -> usize {
        self.host.control.world_size()
    }

    /// Allocates this rank's memory, which peers can read. Called once per rank, before its first collective. Ranks
    /// that are threads get private memory.
    ///
    /// # Errors
    /// When the system refuses, or has not that much memory to give.
    pub fn arena(&self, bytes: usize) -> std::io::Result<Region> {
        let available = phalanx_system::host::available_bytes().unwrap_or(u64::MAX);
        if bytes as u64 > available {
            let text = format!("cannot allocate an arena of {bytes} bytes: {available} are available");
            return Err(std::io::Error::new(std::io::ErrorKind::OutOfMemory, text));
        }
        let region = match &self.host.memory {
            Memory::Threads => Region::anonymous(bytes)?,
            Memory::Processes(arenas) => arenas.create(self.host.rank, bytes)?,
        };
        let cell = self.host.control.rank(self.host.rank);
        cell.arena_bytes.store(region.bytes() as u64, Ordering::Release);
        Ok(region)
    }

    /// A group of all ranks. All ranks make the same groups in the same order.
    pub fn group(&self, name: &'static str) -> Arc<dyn Group> {
        self.sub_group(name, &Vec::from_iter(0..self.world_size()))
    }

    /// A group of the ranks in `members`, this one among them; a member's place there is its rank. Every
    /// rank of the job makes as many groups, each rank its own.
    pub fn sub_group(&self, name: &'static str, members: &[usize]) -> Arc<dyn Group> {
        self.sub_group_with(name, members, self.options.overlap)
    }

    /// The same, but calls always run on a thread of the group: for messages that two ranks send each other at the same
    /// time.
    pub fn sub_group_beside(&self, name: &'static str, members: &[usize]) -> Arc<dyn Group> {
        self.sub_group_with(name, members, true)
    }

    /// Called in place of `sub_group` when other ranks create a group of which this rank is not a member.
    pub fn no_group(&self) {
        self.channels.fetch_add(1, Ordering::Relaxed);
    }

    fn sub_group_with(&self, name: &'static str, members: &[usize], overlap: bool) -> Arc<dyn Group> {
        assert!(members.iter().all(|m| *m < self.world_size()), "{members:?} of {}", self.world_size());
        let index = self.channels.fetch_add(1, Ordering::Relaxed);
        assert!(index < CHANNELS, "an endpoint makes at most {CHANNELS} groups");
        let host = Arc::clone(&self.host);
        let membership = Membership::new(host, self.options.clone(), name, index, members.to_vec());
        let here = members.iter().all(|member| self.host.ranks.contains(member));
        let channel: Box<dyn Channel> = match &self.node {
            Some(node) if !here => Box::new(HostsChannel::new(membership, Arc::clone(node))),
            _ => Box::new(HostChannel::new(membership)),
        };
        Arc::new(RankGroup::new(channel, overlap))
    }

    /// Notes the step of this rank, for error messages of other ranks.
    pub fn note(&self, step: u64) {
        self.host.note_step(step);
    }

    /// This rank has done its work. A process that ends before it has said so has failed, whatever its exit code.
    pub fn finish(&self) {
        self.host.control.rank(self.host.rank).finish();
    }

    /// Ends the job for all ranks, with this rank as the cause. Every wait returns the error within a second.
    pub fn abort(&self, reason: &str) {
        let _ = self.host.abort(reason);
    }

    /// Checks that the job still runs. Long work without collectives should call this from time to time.
    ///
    /// # Errors
    /// The reason why it has ended.
    pub fn check(&self) -> Result<(), CollectiveError> {
        self.host.aborted()
    }

    /// Waits until the job ends, for `limit` at most; returns whether it has ended. For a rank that knows that another one
    /// is about to say why it failed.
    pub fn wait_for_abort(&self, limit: Duration) -> bool {
        self.host.control.wait_aborted(limit)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.host.abort_if_panicking();
    }
}
