//! The launcher of `phalanx`: starts the program once more for each rank of a task (`phalanx rank`), and shows or gathers
//! what the ranks write. Watching and ending them is [`phalanx_launch`]'s.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use phalanx_collectives::{HostJob, Hosts, Network};
use phalanx_launch::{ControlPlane, Failure, Hooks, LocalLeader, own_program};
use phalanx_train::RunPlan;
use serde::{Deserialize, Serialize};

use crate::host::signals::Signals;
use crate::host::{environment, exit_status, machine, output, pinning};
use crate::jobs::rank_output::{Output, RankOutput, connect, shares_stderr};
use crate::jobs::task::Task;
use crate::jobs::task_file;

/// Settings with which the ranks of this host start.
pub struct Start<'a> {
    /// The content of their task file.
    pub task: &'a [u8],
    /// Network to the ranks of other hosts, if there are some.
    pub network: Option<&'a Network>,
    /// Time for which a rank may be stalled.
    pub timeout: Duration,
    /// True if each rank is bound to cores of its own.
    pub pin: bool,
    /// Destination of their output.
    pub output: &'a Output,
    /// The processes that start all ranks of this host but the first, if another launcher has started one for each.
    pub helpers: Option<Arc<LocalLeader>>,
}

/// Data that a helper needs to start its rank, beside the descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// The rank.
    pub rank: usize,
    /// The hosts of the job.
    pub hosts: Hosts,
    /// The number of this host.
    pub host: usize,
    /// Seconds for which a rank may be stalled.
    pub stall_timeout_s: u64,
    /// True if the second of the files that are handed over describes how to reach other hosts.
    pub network: bool,
}

/// The ranks of a task that run on this host.
pub struct RankProcesses {
    processes: phalanx_launch::RankProcesses,
    /// World rank of the first.
    first: usize,
    /// By rank of this host.
    outputs: Vec<RankOutput>,
    /// Number of processes that the system had killed because memory ran out, before the ranks started.
    kills: Option<(PathBuf, u64)>,
    helpers: Option<Arc<LocalLeader>>,
}

impl RankProcesses {
    /// Starts `world` ranks on a task, all on this host, with the plan of its run.
    ///
    /// # Errors
    /// When the system refuses that many processes or descriptors; ranks that were started are ended.
    pub fn start(
        world: usize,
        task: &Task,
        plan: Option<&RunPlan>,
        output: &Output,
    ) -> Result<RankProcesses> {
        let job = HostJob::new(world).context("the memory that ranks share")?;
        let file = task_file::encode(task, plan)?;
        let start = Start {
            task: &file,
            network: None,
            timeout: task.timeout(),
            pin: task.pin(),
            output,
            helpers: None,
        };
        RankProcesses::start_in(job, &start)
    }

    /// Starts the ranks of this host in a job.
    ///
    /// # Errors
    /// As for [`RankProcesses::start`].
    pub fn start_in(mut job: HostJob, start: &Start<'_>) -> Result<RankProcesses> {
        let task_fd = job.hand_over(start.task).context("the memory file of the ranks' task")?;
        let network_fd = match start.network {
            None => None,
            Some(network) => {
                Some(job.hand_over(&serde_json::to_vec(network)?).context("the memory file of the hosts")?)
            }
        };
        let fds: Vec<String> = job.inherited_fds().iter().map(i32::to_string).collect();
        let kills = machine::out_of_memory_kills();
        let ranks = job.ranks();
        let cores = if start.pin { pinning::cores_of_ranks(ranks.len()) } else { Vec::new() };
        let processes = phalanx_launch::RankProcesses::new(job, start.timeout);
        let (fds, first) = (fds.join(","), ranks.start);
        let helpers = start.helpers.clone();
        let mut started = RankProcesses { processes, first, outputs: Vec::new(), kills, helpers };
        if let Some(helpers) = &started.helpers {
            started.begin(helpers, start).context("the processes of the other ranks of this host")?;
        }
        let here = if start.helpers.is_some() { first..first + 1 } else { ranks.clone() };
        for rank in here {
            let own = Inherited { fds: &fds, task_fd, network_fd, cores: cores.get(rank - first) };
            started.start_rank(rank, &own, start.output).with_context(|| {
                format!(
                    "rank {rank} of {} could not be started; see the limits in `phalanx doctor`",
                    ranks.end
                )
            })?;
        }
        Ok(started)
    }

    /// Lets the processes of the other ranks of this host start them.
    fn begin(&self, helpers: &LocalLeader, start: &Start<'_>) -> Result<()> {
        let job = self.processes.job();
        for rank in job.ranks().skip(1) {
            let (hosts, host) = match start.network {
                Some(network) => (network.hosts.clone(), network.host),
                None => (Hosts::one(job.ranks().len()), 0),
            };
            let stall_timeout_s = start.timeout.as_secs();
            let begin = Begin { rank, hosts, host, stall_timeout_s, network: start.network.is_some() };
            helpers.send(rank, &serde_json::to_vec(&Order::Begin(begin))?, &job.descriptors(rank))?;
        }
        Ok(())
    }

    /// Starts the rank of this process, for a job that another process of this host has made.
    ///
    /// # Errors
    /// Descriptors that are not those of such a job; as for [`RankProcesses::start`].
    pub fn start_own(begin: &Begin, fds: Vec<OwnedFd>, output: &Output) -> Result<RankProcesses> {
        let Begin { rank, hosts, host, stall_timeout_s, network } = begin;
        let job = HostJob::adopt(hosts, *host, *rank, fds).context("the memory that ranks share")?;
        let fds: Vec<String> = job.inherited_fds().iter().map(i32::to_string).collect();
        let handed = job.handed_fds();
        let task_fd = *handed.first().context("a job without a task")?;
        let network_fd =
            if *network { Some(*handed.get(1).context("a job without its hosts")?) } else { None };
        let timeout = Duration::from_secs(*stall_timeout_s);
        let processes = phalanx_launch::RankProcesses::following(job, timeout, *rank);
        let kills = machine::out_of_memory_kills();
        let mut started =
            RankProcesses { processes, first: *rank, outputs: Vec::new(), kills, helpers: None };
        let own = Inherited { fds: &fds.join(","), task_fd, network_fd, cores: None };
        started
            .start_rank(*rank, &own, output)
            .with_context(|| format!("rank {rank} could not be started"))?;
        Ok(started)
    }

    fn start_rank(&mut self, rank: usize, inherited: &Inherited<'_>, output: &Output) -> Result<()> {
        let mut command = own_program();
        let Inherited { fds, task_fd, network_fd, cores } = inherited;
        // What `ps` shows: `phalanx rank 3 ...`. The task is not shown: it may hold a prompt.
        command.arg0("phalanx").args(["rank", &rank.to_string(), "--fds", fds]);
        command.args(["--launcher", &std::process::id().to_string(), "--task-fd", &task_fd.to_string()]);
        if let Some(network_fd) = network_fd {
            let listener = self.processes.job().pass_listener(rank, &mut command);
            let listener = listener.context("a rank without a listener")?;
            command.args(["--network-fd", &network_fd.to_string(), "--listener-fd", &listener.to_string()]);
        }
        if let Some(cores) = cores {
            command.args(["--cores", &pinning::list(cores)]);
        }
        connect(rank, &mut command);
        environment::give_queues(&mut command);
        let child = self.processes.start(command)?;
        self.outputs.push(RankOutput::read(rank, child, output)?);
        Ok(())
    }

    /// Waits until all ranks have ended, and passes signals of this process on. Returns the output that was gathered.
    ///
    /// # Errors
    /// The first rank that failed, ended early, or stalled; the others have been ended then.
    pub fn wait(self, signals: &Signals) -> Result<Vec<String>, Failure> {
        self.wait_for(signals, None)
    }

    /// The same for the ranks of one of several hosts.
    ///
    /// # Errors
    /// As for [`RankProcesses::wait`], on any host; also a host that is lost.
    pub fn wait_with(self, signals: &Signals, plane: &mut ControlPlane) -> Result<Vec<String>, Failure> {
        self.wait_for(signals, Some(plane))
    }

    fn wait_for(self, signals: &Signals, plane: Option<&mut ControlPlane>) -> Result<Vec<String>, Failure> {
        let RankProcesses { processes, first, outputs, kills, helpers } = self;
        let hooks = Watched { signals, kills, helpers };
        let ended = match plane {
            None => processes.wait(&hooks),
            Some(plane) => processes.wait_with(&hooks, plane),
        };
        let left = ended.as_ref().err().map_or(&[][..], |failure| &failure.left);
        // What a process holds open that SIGKILL has not ended is not read to its end.
        let outputs = (first..).zip(outputs).filter(|(rank, _)| !left.contains(rank));
        let gathered = outputs.map(|(_, output)| output.finish()).collect();
        ended.map(|()| gathered)
    }
}

/// Message of the process that leads those of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum Order {
    /// Start the rank.
    Begin(Begin),
    /// The run is over.
    Finish {
        /// Its exit code.
        code: u8,
    },
}

/// Descriptors and cores that one rank inherits.
struct Inherited<'a> {
    fds: &'a str,
    task_fd: i32,
    network_fd: Option<i32>,
    cores: Option<&'a Vec<usize>>,
}

/// Information of the program about its ranks.
struct Watched<'a> {
    signals: &'a Signals,
    kills: Option<(PathBuf, u64)>,
    helpers: Option<Arc<LocalLeader>>,
}

impl Hooks for Watched<'_> {
    fn lost_ranks(&self) -> Vec<usize> {
        self.helpers.as_ref().map(|helpers| helpers.lost()).unwrap_or_default()
    }

    fn stop_event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.signals.wake())
    }

    fn killed(&self) -> String {
        exit_status::sigkill(&self.kills, &machine::out_of_memory_kills())
    }

    fn waits_for(&self, rank: usize) -> Option<String> {
        let unread = shares_stderr(rank) && output::stderr_is_unread();
        unread.then(|| "its standard error to be read".to_string())
    }

    fn note(&self, line: &str) {
        output::note(line);
    }

    fn timeout_setting(&self, timeout: Duration) -> String {
        format!("run.stall_timeout_s = {}", timeout.as_secs())
    }
}
