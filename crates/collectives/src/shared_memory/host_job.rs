//! The launcher's side of a host: makes the memory that the ranks share, watches, and ends the job.
//!
//! Everything is a memfd: it lives as long as some process has it open, and has no name to clean up.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use phalanx_tensor::Region;
use rustix::fs::MemfdFlags;

use crate::shared_memory::control::{Abort, Control, MAX_WORLD, cores};
use crate::shared_memory::sealed::seal;

/// A job whose ranks are processes of this host, as its launcher holds it.
pub struct HostJob {
    control_fd: OwnedFd,
    arenas: Vec<OwnedFd>,
    /// The memory files of [`HostJob::hand_over`] and [`HostJob::shared_file`].
    handed: Vec<OwnedFd>,
    control: Arc<Control>,
}

impl HostJob {
    /// The shared memory of `world_size` ranks; arenas are empty until their ranks size them.
    ///
    /// # Errors
    /// No ranks, or more than one machine holds; errors of the system, when it refuses memory or descriptors.
    pub fn new(world_size: usize) -> std::io::Result<HostJob> {
        if !(1..=MAX_WORLD).contains(&world_size) {
            let text = format!("{world_size} ranks: one machine holds 1 to {MAX_WORLD}");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let control_fd = rustix::fs::memfd_create("phalanx-control", flags)?;
        let bytes = Control::bytes(world_size);
        rustix::fs::ftruncate(&control_fd, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&control_fd, rustix::fs::SealFlags::SHRINK)?;
        let region = Region::shared(control_fd.as_fd(), bytes)?;
        let arena = |rank: usize| rustix::fs::memfd_create(format!("phalanx-arena-{rank}"), flags);
        let arenas = (0..world_size).map(arena).collect::<Result<Vec<_>, _>>()?;
        let control = Arc::new(Control::create(region, world_size, cores()));
        Ok(HostJob { control_fd, arenas, handed: Vec::new(), control })
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

    /// Ends the job for all ranks, naming the one that caused it.
    pub fn abort(&self, rank: usize, reason: &str) {
        self.control.abort(Abort { rank, disagreement: false, reason: reason.to_string() });
    }

    /// The rank that ended the job, and why; None while it runs.
    pub fn aborted(&self) -> Option<(usize, String)> {
        self.control.aborted().map(|a| (a.rank, a.reason))
    }

    /// What a rank did last: its step, its last collective and where that was asked for.
    pub fn last_activity(&self, rank: usize) -> String {
        self.control.last_activity(rank)
    }

    /// How long a rank has given no sign of life; None before it has joined. A rank gives one at every step, at every
    /// collective, and every 50 ms while it waits for another. It gives none while it computes.
    pub fn silent_for(&self, rank: usize) -> Option<Duration> {
        self.control.rank(rank).silent_for()
    }

    /// Whether a rank has said that its work is done ([`crate::Endpoint::finish`]).
    pub fn is_done(&self, rank: usize) -> bool {
        self.control.rank(rank).is_done()
    }
}
