//! Ranks as processes of this machine: starts them, watches them, and ends them together.
//!
//! The launcher starts its own program N times, passes the job's memory to each rank by descriptor, and holds a pidfd of
//! each. When a rank dies, ends before its work is done, or stalls, the launcher aborts the job in that rank's name, gives
//! the others a second to end, kills those that are left, and reports the rank and its last activity. The system kills the
//! ranks when the launcher dies.

use std::cmp::Reverse;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use phalanx_collectives::HostJob;
use phalanx_host::process::Activity;
use phalanx_tensor::refused_thread;
use phalanx_train::RunPlan;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::output::{self, TrainOutput, note};
use crate::signals::Signals;
use crate::stall::{Observation, StallDetector};
use crate::task::Task;
use crate::{exit_status, machine, task_file};

/// Time that ranks have to end after one of them has failed.
const LEAVE: Duration = Duration::from_secs(1);

/// Time that a process has to end after SIGKILL. One that waits for a disk does not see the signal before the disk
/// answers.
const KILLED: Duration = Duration::from_secs(5);

/// Time for which a rank may be stalled after a signal has asked it to finish its step and save.
const GRACE: Duration = Duration::from_secs(5);

/// The launcher gives up this much later than the ranks, which know better for which rank they wait.
const PRECEDENCE: Duration = Duration::from_millis(500);

/// Shortest and longest time between two checks of the ranks.
const LOOK_EVERY: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// Largest number of stalled ranks that are named beside the first.
const MAX_NAMED: usize = 15;

/// SIGHUP, SIGINT, SIGTERM.
const STOPS: [i32; 3] = [1, 2, 15];

/// Largest number of ranks on one machine.
const MAX_RANKS: usize = 1024;

/// Why a job ended early.
#[derive(Debug)]
pub struct Failure {
    /// The rank that was the cause.
    pub rank: usize,
    /// Its error, or how its process ended.
    pub reason: String,
    /// Its last activity.
    pub activity: String,
    /// Whether the signal that was to stop the run ended it before its handler was installed.
    pub interrupted: bool,
    /// Whether the rank could not use the checkpoint that it was to resume from.
    pub checkpoint_unusable: bool,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} failed: {}\nit was at: {}", self.rank, self.reason, self.activity)
    }
}

impl std::error::Error for Failure {}

/// The ranks of a job.
pub struct RankProcesses {
    job: HostJob,
    ranks: Vec<Running>,
    /// Time for which a rank may be stalled.
    timeout: Duration,
    /// Number of processes that the system had killed because memory ran out, before the ranks started.
    kills: Option<(PathBuf, u64)>,
}

struct Running {
    child: Child,
    /// `None` while the process is being started.
    pidfd: Option<OwnedFd>,
    ended: bool,
    /// Whether it has ended with [`exit_status::CHECKPOINT_UNUSABLE`].
    checkpoint_unusable: bool,
    /// The thread that gathers its standard output, if that is gathered.
    output: Option<JoinHandle<String>>,
    /// Threads that show its output.
    shown: Vec<JoinHandle<()>>,
    /// Whether it writes to the standard error of this process directly.
    shares_stderr: bool,
}

/// Destination of the ranks' standard output.
#[derive(Clone)]
pub enum Output {
    /// Rank 0's output unchanged; that of others on standard error, with the rank number before each line.
    Shown(TrainOutput),
    /// To the caller of [`RankProcesses::wait`].
    Gathered,
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
        if world > MAX_RANKS {
            bail!("{world} ranks: one machine holds at most {MAX_RANKS}");
        }
        let mut job = HostJob::new(world).context("the memory that ranks share")?;
        let task_fd =
            job.hand_over(&task_file::encode(task, plan)?).context("the memory file of the ranks' task")?;
        let kills = machine::out_of_memory_kills();
        let mut processes = RankProcesses { job, ranks: Vec::new(), timeout: task.timeout(), kills };
        for rank in 0..world {
            let running = processes.start_rank(rank, task_fd, output).with_context(|| {
                format!("rank {rank} of {world} could not be started; see the limits in `phalanx doctor`")
            })?;
            processes.ranks.push(running);
        }
        Ok(processes)
    }

    fn start_rank(&self, rank: usize, task_fd: i32, output: &Output) -> Result<Running> {
        let fds: Vec<String> = self.job.inherited_fds().iter().map(i32::to_string).collect();
        // The running program, even if its file was replaced meanwhile.
        let mut command = Command::new("/proc/self/exe");
        // What `ps` shows: `phalanx rank 3 ...`. The task is not shown: it may hold a prompt.
        command.arg0("phalanx").args(["rank", &rank.to_string(), "--fds", &fds.join(",")]);
        command.args(["--launcher", &std::process::id().to_string(), "--task-fd", &task_fd.to_string()]);
        command.stdin(Stdio::null());
        command.stdout(Stdio::piped());
        let shares_stderr = rank == 0;
        if !shares_stderr {
            command.stderr(Stdio::piped());
        }
        self.job.pass_to(&mut command);
        let child = command.spawn().map_err(|error| refused_thread("its process", &error))?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a process number")?;
        // From here on, dropping `running` ends the process.
        let mut running = Running {
            child,
            pidfd: None,
            ended: false,
            checkpoint_unusable: false,
            output: None,
            shown: Vec::new(),
            shares_stderr,
        };
        running.pidfd = Some(pidfd_open(pid, PidfdFlags::empty()).context("a descriptor of its process")?);
        if let Some(stdout) = running.child.stdout.take() {
            match output {
                Output::Gathered => running.output = Some(reader(rank, move || gather(stdout))?),
                Output::Shown(output) if rank == 0 => {
                    let output = output.clone();
                    let forward = move || each_line(stdout, |line| output.write(line));
                    running.shown.push(reader(rank, forward)?);
                }
                Output::Shown(_) => running.shown.push(reader(rank, move || show(rank, stdout))?),
            }
        }
        if let Some(stderr) = running.child.stderr.take() {
            running.shown.push(reader(rank, move || show(rank, stderr))?);
        }
        Ok(running)
    }

    /// Waits until all ranks have ended, and passes signals of this process on. Returns the output that was gathered.
    ///
    /// # Errors
    /// The first rank that failed, ended early, or stalled; the others have been ended then.
    pub fn wait(mut self, signals: &Signals) -> Result<Vec<String>, Failure> {
        let mut failure = None;
        let mut passed_on = false;
        let mut kill_at = None;
        let mut stalls = StallDetector::new(self.ranks.len());
        let mut looked = Instant::now();
        while self.ranks.iter().any(|rank| !rank.ended) {
            self.sleep(signals, passed_on, kill_at);
            if signals.came() && !passed_on {
                passed_on = true;
                self.signal(Signal::TERM);
                // Stopped ranks must get the signal too, so that they finish their step and save.
                self.signal(Signal::CONT);
                stalls = StallDetector::new(self.ranks.len());
            }
            let since = looked.elapsed();
            looked += since;
            let ended = self.look(signals);
            if failure.is_none()
                && let Some(first) =
                    ended.or_else(|| self.stalled(&mut stalls, since, passed_on)).or_else(|| self.told())
            {
                // The abort record names the cause: this rank, unless another has reported an error before it.
                self.job.abort(first.rank, &first.reason);
                failure = Some(self.cause(first));
                kill_at = Some(looked + LEAVE);
            }
            if let Some(at) = kill_at.filter(|at| looked >= *at) {
                self.signal(Signal::KILL);
                if looked >= at + KILLED {
                    self.abandon(failure.as_mut());
                }
            }
        }
        let gathered = self.ranks.iter_mut().map(Running::finish).collect();
        if let Some(failure) = &mut failure {
            let running = self.ranks.get(failure.rank);
            failure.checkpoint_unusable = running.is_some_and(|running| running.checkpoint_unusable);
        }
        failure.map_or(Ok(gathered), Err)
    }

    /// Waits until a rank ends, a signal arrives, or it is time to look at the ranks or to kill them.
    fn sleep(&self, signals: &Signals, passed_on: bool, kill_at: Option<Instant>) {
        let alive = self.ranks.iter().filter(|rank| !rank.ended);
        let mut fds: Vec<PollFd> =
            alive.filter_map(|rank| Some(PollFd::new(rank.pidfd.as_ref()?, PollFlags::IN))).collect();
        let wake = signals.wake();
        if !passed_on {
            fds.push(PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN));
        }
        let left =
            kill_at.map(|at| at.saturating_duration_since(Instant::now()).max(Duration::from_millis(10)));
        let [min, max] = LOOK_EVERY;
        let limit = left.unwrap_or((self.timeout / 8).clamp(min, max));
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Whether interrupted or timed out, the caller checks everything again.
        let _ = poll(&mut fds, Some(&limit));
    }

    /// Records which ranks have ended; returns the first that failed.
    fn look(&mut self, signals: &Signals) -> Option<Failure> {
        let mut failure = None;
        for (rank, running) in self.ranks.iter_mut().enumerate().filter(|(_, running)| !running.ended) {
            let Ok(Some(status)) = running.child.try_wait() else { continue };
            running.ended = true;
            running.checkpoint_unusable = status.code() == Some(exit_status::CHECKPOINT_UNUSABLE.into());
            if failure.is_none()
                && let Some(how) = exit_status::unexpected_end(status, self.job.is_done(rank), || {
                    exit_status::sigkill(&self.kills, &machine::out_of_memory_kills())
                })
            {
                let reason = format!("process {} {how}", running.child.id());
                let interrupted =
                    signals.came() && status.signal().is_some_and(|signal| STOPS.contains(&signal));
                let activity = self.job.last_activity(rank);
                failure = Some(Failure { rank, reason, activity, interrupted, checkpoint_unusable: false });
            }
        }
        failure
    }

    /// Looks for stalled ranks ([`stall`](crate::stall)). After a signal was passed on, a rank that only waits gets less
    /// time: it should be finishing its step.
    fn stalled(&self, stalls: &mut StallDetector, since: Duration, signalled: bool) -> Option<Failure> {
        let timeout = if signalled { self.timeout.min(GRACE) } else { self.timeout };
        let mut still = Vec::new();
        for (rank, running) in self.ranks.iter().enumerate().filter(|(_, running)| !running.ended) {
            let process = Activity::read(running.child.id());
            stalls.note(rank, &Observation { silent: self.job.silent_for(rank), process }, since);
            // A disk may be as slow after a signal as without one.
            let limit = if process.in_disk { self.timeout } else { timeout };
            if stalls.time(rank) >= limit.saturating_add(PRECEDENCE) {
                still.push((rank, process));
            }
        }
        // The rank that has been silent longest is named first: it may be what the others wait for.
        still.sort_by_key(|(rank, _)| Reverse(self.job.silent_for(*rank)));
        let (rank, first) = still.first()?;
        let others = still[1..].iter().take(MAX_NAMED).map(|(rank, process)| {
            format!(
                "\nso does rank {rank}: {}; {}",
                self.job.last_activity(*rank),
                self.held_up_by(*rank, process)
            )
        });
        let more = match still.len().saturating_sub(1 + MAX_NAMED) {
            0 => String::new(),
            more => format!("\nand {more} more"),
        };
        let asked = if signalled { "; a signal has asked the run to end" } else { "" };
        let reason = format!(
            "it is stalled: {}; for {:.1} s it has given no sign of life and has used no processor time \
             (parallel.timeout_s = {}{asked}){}{more}",
            self.held_up_by(*rank, first),
            stalls.time(*rank).as_secs_f64(),
            self.timeout.as_secs(),
            others.collect::<String>(),
        );
        Some(Failure {
            rank: *rank,
            reason,
            activity: self.job.last_activity(*rank),
            interrupted: false,
            checkpoint_unusable: false,
        })
    }

    /// A failure that a rank has reported before it ended.
    fn told(&self) -> Option<Failure> {
        let (rank, reason) = self.job.aborted()?;
        Some(Failure {
            rank,
            reason,
            activity: self.job.last_activity(rank),
            interrupted: false,
            checkpoint_unusable: false,
        })
    }

    /// What a stalled process waits for, as far as is visible from outside.
    fn held_up_by(&self, rank: usize, process: &Activity) -> String {
        let pid = self.ranks[rank].child.id();
        match (process.stopped, self.ranks[rank].is_unread(), process.in_disk) {
            (true, _, _) => {
                format!(
                    "process {pid} is stopped, by a signal or a debugger; `kill -CONT {pid}` lets it continue"
                )
            }
            (false, true, _) => format!("process {pid} waits for its standard error to be read"),
            (false, false, true) => format!("process {pid} waits for a disk or for memory"),
            (false, false, false) => format!("process {pid} sleeps"),
        }
    }

    /// The cause of the failure according to the job's record; `first` is the rank that was first seen to end or stall.
    fn cause(&self, first: Failure) -> Failure {
        let mut cause = match self.job.aborted() {
            Some((rank, reason)) if rank != first.rank || reason != first.reason => Failure {
                rank,
                reason,
                activity: self.job.last_activity(rank),
                interrupted: false,
                checkpoint_unusable: false,
            },
            _ => first,
        };
        // A rank that named another one could not see why that one does not arrive. The number comes from a rank, so it
        // is checked.
        let Some(running) = self.ranks.get(cause.rank) else { return cause };
        let process = Activity::read(running.child.id());
        if !running.ended && (process.stopped || running.is_unread()) {
            cause.activity = format!("{}; {}", cause.activity, self.held_up_by(cause.rank, &process));
        }
        cause
    }

    /// Stops waiting for processes that SIGKILL has not ended.
    fn abandon(&mut self, failure: Option<&mut Failure>) {
        let left = self.ranks.iter_mut().filter(|rank| !rank.ended);
        let pids: Vec<String> = left
            .map(|rank| {
                (rank.ended, rank.output) = (true, None);
                rank.shown.clear();
                rank.child.id().to_string()
            })
            .collect();
        if let Some(failure) = failure.filter(|_| !pids.is_empty()) {
            let pids = pids.join(", ");
            failure
                .reason
                .push_str(&format!("; processes that SIGKILL has not ended: {pids} (a disk that hangs?)"));
        }
    }

    fn signal(&self, signal: Signal) {
        for pidfd in self.ranks.iter().filter(|rank| !rank.ended).filter_map(|rank| rank.pidfd.as_ref()) {
            // Fails if the rank has just ended, which is fine.
            let _ = pidfd_send_signal(pidfd, signal);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Running {
    fn finish(&mut self) -> String {
        for thread in self.shown.drain(..) {
            let _ = thread.join();
        }
        self.output.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }

    /// Whether it blocks in a write to standard error because nobody reads it.
    fn is_unread(&self) -> bool {
        self.shares_stderr && output::stderr_is_unread()
    }
}

/// Starts a thread that reads the output of a rank.
fn reader<T: Send + 'static>(
    rank: usize,
    read: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let builder = std::thread::Builder::new().name(format!("rank-{rank}"));
    Ok(builder.spawn(read).map_err(|error| refused_thread("the thread that reads what it writes", &error))?)
}

/// Shows lines on standard error with the number of their rank.
fn show(rank: usize, from: impl Read) {
    each_line(from, |line| note(&format!("[rank {rank}] {}", String::from_utf8_lossy(line).trim_end())));
}

/// Reads to the end, line by line (with line ends), so that a rank is never blocked by a full pipe.
fn each_line(from: impl Read, mut take: impl FnMut(&[u8])) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        take(&line);
        line.clear();
    }
}

fn gather(mut from: impl Read) -> String {
    let mut text = String::new();
    // Text that was read before an error is kept.
    let _ = from.read_to_string(&mut text);
    text
}
