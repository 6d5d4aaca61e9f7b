//! The processes of a job's ranks.

use std::io::Result;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use phalanx_collectives::HostJob;
use phalanx_system::host::process::Activity;
use phalanx_tensor::refused_thread;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A command that starts the program of this process once more, even if its file was replaced meanwhile.
pub fn own_program() -> Command {
    Command::new("/proc/self/exe")
}

/// The processes of a job's ranks. They are killed when this is dropped.
pub struct RankProcesses {
    pub(crate) job: HostJob,
    /// Time for which a rank may stand still.
    pub(crate) timeout: Duration,
    pub(crate) ranks: Vec<RankProcess>,
    /// World rank of the first process.
    first: usize,
    /// True if another process of this host leads: it tells the other hosts and waits for them.
    pub(crate) follows: bool,
}

/// The process of one rank.
pub(crate) struct RankProcess {
    pub(crate) child: Child,
    /// `None` while the process is being started.
    pub(crate) pidfd: Option<OwnedFd>,
    /// `None` while it runs.
    pub(crate) status: Option<ExitStatus>,
    /// True if the launcher no longer waits for it, although it runs.
    pub(crate) given_up: bool,
}

impl RankProcesses {
    /// A job without processes. A rank that stands still for longer than `timeout` ends the job.
    pub fn new(job: HostJob, timeout: Duration) -> RankProcesses {
        let first = job.ranks().start;
        RankProcesses { job, timeout, ranks: Vec::new(), first, follows: false }
    }

    /// A job of another process of this host, of which this one starts `rank` alone. That process waits for the ranks of all.
    pub fn following(job: HostJob, timeout: Duration, rank: usize) -> RankProcesses {
        RankProcesses { job, timeout, ranks: Vec::new(), first: rank, follows: true }
    }

    /// The memory of the job.
    pub fn job(&self) -> &HostJob {
        &self.job
    }

    /// World rank of the first process.
    pub(crate) fn first(&self) -> usize {
        self.first
    }

    /// Returns whether ranks of this host that other processes have started have not done their work yet.
    pub(crate) fn others_work(&self) -> bool {
        let started = self.first..self.first + self.ranks.len();
        !self.follows && self.job.ranks().any(|rank| !started.contains(&rank) && !self.job.is_done(rank))
    }

    /// The process of a world rank, if it runs here.
    pub(crate) fn process(&self, rank: usize) -> Option<&RankProcess> {
        self.ranks.get(rank.checked_sub(self.first())?)
    }

    /// Starts the next rank, beginning with the first one of this host: `command` inherits the descriptors of the job. Returns the process, so
    /// that the caller can take its pipes.
    ///
    /// # Errors
    /// When the system refuses a process or a descriptor.
    pub fn start(&mut self, mut command: Command) -> Result<&mut Child> {
        self.job.pass_to(&mut command);
        let child = command.spawn().map_err(|error| refused_thread("its process", &error))?;
        let pid = Pid::from_child(&child);
        // From here on, dropping `self` ends the process.
        self.ranks.push(RankProcess { child, pidfd: None, status: None, given_up: false });
        let process = self.ranks.last_mut().expect("it has just been added");
        process.pidfd = Some(pidfd_open(pid, PidfdFlags::empty())?);
        Ok(&mut process.child)
    }

    /// The ranks whose processes run, by world rank.
    pub(crate) fn alive(&self) -> impl Iterator<Item = (usize, &RankProcess)> {
        let ranks = (self.first()..).zip(&self.ranks);
        ranks.filter(|(_, process)| process.is_alive())
    }

    /// Sends a signal to the processes of all ranks that run.
    pub(crate) fn signal(&self, signal: Signal) {
        self.alive().for_each(|(_, process)| process.signal(signal));
    }
}

impl RankProcess {
    pub(crate) fn is_alive(&self) -> bool {
        self.status.is_none() && !self.given_up
    }

    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pidfd) = &self.pidfd {
            // Fails if the process has just ended, which is fine.
            let _ = pidfd_send_signal(pidfd, signal);
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn activity(&self) -> Activity {
        Activity::read(self.pid())
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        if self.is_alive() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
