//! The launcher of `phalanx`: starts the program once more for each rank of a task (`phalanx rank`), and shows or gathers
//! what the ranks write. Watching and ending them is [`phalanx_launch`]'s.

use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use phalanx_collectives::HostJob;
use phalanx_launch::{Failure, Hooks, own_program};
use phalanx_train::RunPlan;

use crate::rank_output::{Output, RankOutput, connect, shares_stderr};
use crate::signals::Signals;
use crate::task::Task;
use crate::{exit_status, machine, output, task_file};

/// The ranks of a task.
pub struct RankProcesses {
    processes: phalanx_launch::RankProcesses,
    /// By rank.
    outputs: Vec<RankOutput>,
    /// Number of processes that the system had killed because memory ran out, before the ranks started.
    kills: Option<(PathBuf, u64)>,
}

impl RankProcesses {
    /// Starts `world` ranks on a task, with the plan of its run.
    ///
    /// # Errors
    /// When the system refuses that many processes or descriptors; ranks that were started are ended.
    pub fn start(
        world: usize,
        task: &Task,
        plan: Option<&RunPlan>,
        output: &Output,
    ) -> Result<RankProcesses> {
        let mut job = HostJob::new(world).context("the memory that ranks share")?;
        let task_fd =
            job.hand_over(&task_file::encode(task, plan)?).context("the memory file of the ranks' task")?;
        let fds: Vec<String> = job.inherited_fds().iter().map(i32::to_string).collect();
        let kills = machine::out_of_memory_kills();
        let processes = phalanx_launch::RankProcesses::new(job, task.timeout());
        let mut started = RankProcesses { processes, outputs: Vec::new(), kills };
        for rank in 0..world {
            started.start_rank(rank, &fds.join(","), task_fd, output).with_context(|| {
                format!("rank {rank} of {world} could not be started; see the limits in `phalanx doctor`")
            })?;
        }
        Ok(started)
    }

    fn start_rank(&mut self, rank: usize, fds: &str, task_fd: i32, output: &Output) -> Result<()> {
        let mut command = own_program();
        // What `ps` shows: `phalanx rank 3 ...`. The task is not shown: it may hold a prompt.
        command.arg0("phalanx").args(["rank", &rank.to_string(), "--fds", fds]);
        command.args(["--launcher", &std::process::id().to_string(), "--task-fd", &task_fd.to_string()]);
        connect(rank, &mut command);
        let child = self.processes.start(command)?;
        self.outputs.push(RankOutput::read(rank, child, output)?);
        Ok(())
    }

    /// Waits until all ranks have ended, and passes signals of this process on. Returns the output that was gathered.
    ///
    /// # Errors
    /// The first rank that failed, ended early, or stalled; the others have been ended then.
    pub fn wait(self, signals: &Signals) -> Result<Vec<String>, Failure> {
        let RankProcesses { processes, outputs, kills } = self;
        let ended = processes.wait(&Watched { signals, kills });
        let left = ended.as_ref().err().map_or(&[][..], |failure| &failure.left);
        // What a process holds open that SIGKILL has not ended is not read to its end.
        let outputs = outputs.into_iter().enumerate().filter(|(rank, _)| !left.contains(rank));
        let gathered = outputs.map(|(_, output)| output.finish()).collect();
        ended.map(|()| gathered)
    }
}

/// What the program knows about its ranks.
struct Watched<'a> {
    signals: &'a Signals,
    kills: Option<(PathBuf, u64)>,
}

impl Hooks for Watched<'_> {
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

    fn timeout_setting(&self, timeout: Duration) -> String {
        format!("parallel.timeout_s = {}", timeout.as_secs())
    }
}
