//! The launcher's side of a host: makes the memory that the ranks share, watches, and ends the job.
//!
//! Everything is a memfd: it lives as long as some process has it open, and has no name to clean up.

use std::fs::File;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use phalanx_tensor::Region;
use rustix::fs::MemfdFlags;

use crate::error::Blame;
use crate::hosts::Hosts;
use crate::shared_memory::control::{Abort, Control, MAX_WORLD, cores};
use crate::shared_memory::flight::FlightEvent;
use crate::shared_memory::mirror;
use crate::shared_memory::rank_cell::CHANNELS;
use crate::shared_memory::sealed::seal;

/// The share of this host in a job, whose ranks are processes, as its launcher holds it.
pub struct HostJob {
    hosts: Hosts,
    host: usize,
    control_fd: OwnedFd,
    /// One for each of the host's own ranks.
    arenas: Vec<OwnedFd>,
    /// Listeners of the host's own ranks for ranks of other hosts.
    listeners: Vec<Option<TcpListener>>,
    /// The memory files of [`HostJob::hand_over`] and [`HostJob::shared_file`].
    handed: Vec<OwnedFd>,
    control: Arc<Control>,
}

impl HostJob {
    /// The shared memory of `world_size` ranks on this host; arenas are empty until their ranks size them.
    ///
    /// # Errors
    /// No ranks, or more than a job holds; errors of the system, when it refuses memory or descriptors.
    pub fn new(world_size: usize) -> std::io::Result<HostJob> {
        if world_size == 0 {
            let text = format!("0 ranks: a job has 1 to {MAX_WORLD}");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
        }
        HostJob::on_host(&Hosts::one(world_size), 0)
    }

    /// The shared memory of one host's ranks in a job of several hosts. It has cells for all ranks: the own ranks write
    /// theirs, the launcher writes those of the others ([`HostJob::mirror`]).
    ///
    /// # Errors
    /// More ranks than a job holds; errors of the system, when it refuses memory or descriptors.
    pub fn on_host(hosts: &Hosts, host: usize) -> std::io::Result<HostJob> {
        let world_size = hosts.world_size();
        if world_size > MAX_WORLD || host >= hosts.len() {
            let text =
                format!("host {host} of {} with {world_size} ranks: a job has 1 to {MAX_WORLD}", hosts.len());
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let control_fd = rustix::fs::memfd_create("phalanx-control", flags)?;
        let bytes = Control::bytes(world_size);
        rustix::fs::ftruncate(&control_fd, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&control_fd, rustix::fs::SealFlags::SHRINK)?;
        let region = Region::shared(control_fd.as_fd(), bytes)?;
        let arena = |rank: usize| rustix::fs::memfd_create(format!("phalanx-arena-{rank}"), flags);
        let arenas = hosts.ranks(host).map(arena).collect::<Result<Vec<_>, _>>()?;
        let listeners = arenas.iter().map(|_| None).collect();
        let control = Arc::new(Control::create(region, world_size, cores()));
        Ok(HostJob { hosts: hosts.clone(), host, control_fd, arenas, listeners, handed: Vec::new(), control })
    }

    /// The job of another process of this host, from its descriptors in the order of [`HostJob::descriptors`]. Ranks that are
    /// started here belong to the same job.
    ///
    /// # Errors
    /// Descriptors that are not those of a job of these hosts.
    pub fn adopt(hosts: &Hosts, host: usize, rank: usize, fds: Vec<OwnedFd>) -> std::io::Result<HostJob> {
        let invalid = |text: &str| std::io::Error::new(std::io::ErrorKind::InvalidInput, text.to_string());
        if host >= hosts.len() || !hosts.ranks(host).contains(&rank) {
            return Err(invalid("a rank that is not on this host"));
        }
        let mut fds = fds.into_iter();
        let control_fd = fds.next().ok_or_else(|| invalid("a job without a control block"))?;
        let arenas: Vec<OwnedFd> = fds.by_ref().take(hosts.ranks(host).len()).collect();
        if arenas.len() != hosts.ranks(host).len() {
            return Err(invalid("a job without the arenas of its ranks"));
        }
        let mut listeners: Vec<Option<TcpListener>> = arenas.iter().map(|_| None).collect();
        if hosts.len() > 1 {
            let listener = fds.next().ok_or_else(|| invalid("a rank without a listener"))?;
            listeners[rank - hosts.ranks(host).start] = Some(listener.into());
        }
        let bytes = rustix::fs::fstat(&control_fd)?.st_size as usize;
        let region = Region::shared(control_fd.as_fd(), bytes)?;
        let control = Arc::new(Control::open(region, hosts.world_size())?);
        Ok(HostJob {
            hosts: hosts.clone(),
            host,
            control_fd,
            arenas,
            listeners,
            handed: fds.collect(),
            control,
        })
    }

    /// The descriptors with which another process of this host can start `rank`: the control block, the arenas, the rank's
    /// listener if there are several hosts, and what was handed over.
    pub fn descriptors(&self, rank: usize) -> Vec<BorrowedFd<'_>> {
        let listener = self.listeners[self.own(rank)].as_ref().map(AsFd::as_fd);
        let own = std::iter::once(&self.control_fd).chain(&self.arenas).map(AsFd::as_fd);
        own.chain(listener).chain(self.handed.iter().map(AsFd::as_fd)).collect()
    }

    /// The numbers of the descriptors that were handed over, in their order.
    pub fn handed_fds(&self) -> Vec<RawFd> {
        self.handed.iter().map(AsRawFd::as_raw_fd).collect()
    }

    /// The world ranks of this host.
    pub fn ranks(&self) -> std::ops::Range<usize> {
        self.hosts.ranks(self.host)
    }

    /// Opens the listener of an own rank, on a port that the system chooses: ranks of other hosts connect to the address
    /// that is returned. [`HostJob::pass_listener`] hands it to the rank.
    ///
    /// # Errors
    /// The system's, when the address is not one of this host's.
    pub fn listen(&mut self, rank: usize, ip: IpAddr) -> std::io::Result<SocketAddr> {
        let own = self.own(rank);
        let listener = TcpListener::bind((ip, 0))?;
        let address = listener.local_addr()?;
        self.listeners[own] = Some(listener);
        Ok(address)
    }

    /// Lets the child that `command` will start as `rank` inherit the rank's listener; returns its number.
    pub fn pass_listener(&self, rank: usize, command: &mut Command) -> Option<RawFd> {
        let fd = self.listeners[self.own(rank)].as_ref()?.as_raw_fd();
        keep_open(command, vec![fd]);
        Some(fd)
    }

    /// The index of an own rank on this host.
    fn own(&self, rank: usize) -> usize {
        let ranks = self.ranks();
        assert!(ranks.contains(&rank), "rank {rank} is not on host {} with ranks {ranks:?}", self.host);
        rank - ranks.start
    }

    /// The descriptors that a rank needs, by their numbers in this process: the control block, then the
    /// arena of each rank. They are closed on exec unless [`HostJob::pass_to`] keeps them open.
    pub fn inherited_fds(&self) -> Vec<RawFd> {
        std::iter::once(&self.control_fd).chain(&self.arenas).map(|fd| fd.as_raw_fd()).collect()
    }

    /// Puts `bytes` into a memory file that only ranks which are started later can read, with [`crate::take_sealed`].
    /// Returns the number of the descriptor that they inherit.
    ///
    /// # Errors
    /// Errors of the system, when it refuses memory or descriptors.
    pub fn hand_over(&mut self, bytes: &[u8]) -> std::io::Result<RawFd> {
        let fd = seal(bytes)?;
        let number = fd.as_raw_fd();
        self.handed.push(fd);
        Ok(number)
    }

    /// An empty memory file that ranks which are started later may write to, after they have taken it with
    /// [`crate::take_file`]: the number of the descriptor that they inherit, and the file for this process to read.
    ///
    /// # Errors
    /// The system's, when it refuses memory or descriptors.
    pub fn shared_file(&mut self) -> std::io::Result<(RawFd, File)> {
        let fd = rustix::fs::memfd_create("phalanx-results", MemfdFlags::CLOEXEC)?;
        let (number, file) = (fd.as_raw_fd(), File::from(fd.try_clone()?));
        self.handed.push(fd);
        Ok((number, file))
    }

    /// Lets the child that `command` will start inherit [`HostJob::inherited_fds`], and what is handed over, under the
    /// same numbers. Other children of this process do not get them.
    pub fn pass_to(&self, command: &mut Command) {
        let handed = self.handed.iter().map(|fd| fd.as_raw_fd());
        let fds: Vec<RawFd> = self.inherited_fds().into_iter().chain(handed).collect();
        keep_open(command, fds);
    }

    /// Ends the job for all ranks, naming the one that caused it.
    pub fn abort(&self, rank: usize, reason: &str) {
        self.control.abort(Abort { rank, blame: Blame::Rank, reason: reason.to_string() });
    }

    /// The same for a reason that comes from another host, or that a link is to blame for.
    pub fn abort_as(&self, rank: usize, reason: &str, blame: Blame) {
        self.control.abort(Abort { rank, blame, reason: reason.to_string() });
    }

    /// The rank that ended the job, why, and what is to blame; None while it runs.
    pub fn aborted(&self) -> Option<(usize, String, Blame)> {
        self.control.aborted().map(|a| (a.rank, a.reason, a.blame))
    }

    /// Waits until the job ends, for `limit` at most; returns whether it has ended.
    pub fn wait_aborted(&self, limit: Duration) -> bool {
        self.control.wait_aborted(limit)
    }

    /// The state of an own rank as the launchers of other hosts pass it to [`HostJob::mirror`]: what it does, its calls
    /// and waits, and how long it has been silent.
    pub fn activity(&self, rank: usize) -> Vec<u8> {
        self.own(rank);
        mirror::write(&self.control, rank)
    }

    /// Takes over the state of a rank of another host, so that reports of this host name what it does. The bytes come
    /// from another machine: what makes no sense is ignored.
    pub fn mirror(&self, rank: usize, activity: &[u8]) {
        if rank < self.hosts.world_size() && !self.ranks().contains(&rank) {
            mirror::read(&self.control, rank, activity);
        }
    }

    /// The last thousand events of an own rank, also of one that is gone.
    pub fn flight_record(&self, rank: usize) -> Vec<FlightEvent> {
        self.own(rank);
        let name = |channel: usize| match channel < CHANNELS {
            true => self.control.slot(channel, rank).name.read(),
            false => format!("{channel}?"),
        };
        self.control.flight(rank).read(&name)
    }

    /// Describes the last activity of a rank: its step, its last collective and the call site of that.
    pub fn last_activity(&self, rank: usize) -> String {
        self.control.last_activity(rank)
    }

    /// Time since the last sign of life of a rank; None before it has joined. A rank gives one at every step, at every
    /// collective, and every 50 ms while it waits for another. It gives none while it computes.
    pub fn silent_for(&self, rank: usize) -> Option<Duration> {
        self.control.rank(rank).silent_for()
    }

    /// Notes that an own rank was seen to work: to compute, to make calls or to wait for a disk. Ranks that wait for it, also
    /// on other hosts, are patient then.
    pub fn note_work(&self, rank: usize) {
        self.control.rank(rank).note_work();
    }

    /// Number of events in the flight record of an own rank so far: it changes with each call and each step.
    pub fn events(&self, rank: usize) -> u64 {
        self.control.flight(rank).count()
    }

    /// Returns whether a rank has reported that its work is done ([`crate::Endpoint::finish`]).
    pub fn is_done(&self, rank: usize) -> bool {
        self.control.rank(rank).is_done()
    }
}

/// Lets the child that `command` will start keep these descriptors, under the same numbers.
fn keep_open(command: &mut Command, fds: Vec<RawFd>) {
    let keep = move || {
        for fd in &fds {
            // SAFETY: only borrowed for this call; the child has its own copy of the parent's table,
            // where the number is open because the HostJob outlived the fork.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(*fd) };
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls only; it neither allocates nor
    // locks.
    unsafe { command.pre_exec(keep) };
}
