//! Ranks as processes of this machine: started, watched, ended together.
//!
//! The launcher starts itself N times, hands each the job's memory by descriptor, and holds a pidfd of
//! each. When one dies it ends the job for all in that rank's name, gives the others a second to leave,
//! kills what is left, and says who it was and what it did. Ranks are told by the system to die with it.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use phalanx_collectives::HostJob;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::output::{TrainOutput, note};
use crate::signals::Signals;
use crate::task::Task;

/// How long ranks may take to leave after one of them died.
const LEAVE: Duration = Duration::from_secs(1);

/// SIGHUP, SIGINT, SIGTERM.
const STOPS: [i32; 3] = [1, 2, 15];

/// Most ranks of one machine.
const MAX_RANKS: usize = 1024;

/// Why a job ended early.
#[derive(Debug)]
pub struct Failure {
    /// The rank that was the cause.
    pub rank: usize,
    /// What it said, or how it died.
    pub reason: String,
    /// What it did last.
    pub activity: String,
    /// Whether it was ended by the signal that was to stop the run, before it could listen to it.
    pub interrupted: bool,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} failed: {}\nit was at: {}", self.rank, self.reason, self.activity)
    }
}

impl std::error::Error for Failure {}

/// The ranks of a job.
pub struct Crew {
    job: HostJob,
    ranks: Vec<Running>,
}

struct Running {
    child: Child,
    pidfd: OwnedFd,
    ended: bool,
    /// What it wrote to standard output, if that is gathered.
    output: Option<JoinHandle<String>>,
    /// Shows what it writes.
    shown: Vec<JoinHandle<()>>,
}

/// Where standard output of the ranks goes.
#[derive(Clone)]
pub enum Output {
    /// Rank 0's as it is, others' with their number before each line on standard error.
    Shown(TrainOutput),
    /// To whoever waits for the crew.
    Gathered,
}

impl Crew {
    /// Starts `world` ranks.
    ///
    /// # Errors
    /// When the system has not that many processes or descriptors; ranks that were started are ended.
    pub fn start(world: usize, task: &Task, output: &Output) -> Result<Crew> {
        if world > MAX_RANKS {
            bail!("{world} ranks: one machine holds at most {MAX_RANKS}");
        }
        let job = HostJob::new(world).context("the memory that ranks share")?;
        let mut crew = Crew { job, ranks: Vec::new() };
        let task = serde_json::to_string(task)?;
        for rank in 0..world {
            let running = crew.start_rank(rank, &task, output).with_context(|| {
                format!("rank {rank} of {world} could not be started; see the limits in `phalanx doctor`")
            })?;
            crew.ranks.push(running);
        }
        Ok(crew)
    }

    fn start_rank(&self, rank: usize, task: &str, output: &Output) -> Result<Running> {
        let fds: Vec<String> = self.job.inherited_fds().iter().map(i32::to_string).collect();
        // The program that runs, even if its file was replaced meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("phalanx").arg("rank");
        command.args(["--rank", &rank.to_string(), "--fds", &fds.join(",")]);
        command.args(["--launcher", &std::process::id().to_string(), "--task", task]);
        command.stdin(Stdio::null());
        command.stdout(Stdio::piped());
        if rank > 0 {
            command.stderr(Stdio::piped());
        }
        self.job.pass_to(&mut command);
        let mut child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a process number")?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let mut shown = Vec::new();
        let stdout = child.stdout.take();
        let gathered = match (output, stdout) {
            (Output::Gathered, Some(stdout)) => Some(std::thread::spawn(move || gather(stdout))),
            (Output::Shown(output), Some(stdout)) => {
                let output = output.clone();
                shown.push(std::thread::spawn(move || match rank {
                    0 => each_line(stdout, |line| output.write(line)),
                    _ => show(rank, stdout),
                }));
                None
            }
            (_, None) => None,
        };
        if let Some(stderr) = child.stderr.take() {
            shown.push(std::thread::spawn(move || show(rank, stderr)));
        }
        Ok(Running { child, pidfd, ended: false, output: gathered, shown })
    }

    /// Waits until all ranks have ended; passes signals of this process on. Gives what was gathered.
    ///
    /// # Errors
    /// The first rank that failed.
    pub fn wait(mut self, signals: &Signals) -> Result<Vec<String>, Failure> {
        let mut failure = None;
        let mut passed_on = false;
        let mut kill_at = None;
        while self.ranks.iter().any(|rank| !rank.ended) {
            self.sleep(signals, passed_on, kill_at);
            if signals.came() && !passed_on {
                passed_on = true;
                self.signal(Signal::TERM);
            }
            if let Some(first) = self.look(signals) {
                // The abort record names the cause: this rank, unless one spoke up before it.
                self.job.abort(first.rank, &first.reason);
                failure.get_or_insert(first);
                kill_at.get_or_insert_with(|| Instant::now() + LEAVE);
            }
            if kill_at.is_some_and(|at| Instant::now() >= at) {
                self.signal(Signal::KILL);
            }
        }
        let gathered = self.ranks.iter_mut().map(Running::finish).collect();
        match failure {
            None => Ok(gathered),
            Some(first) => Err(self.cause(first)),
        }
    }

    /// Until a rank ends, a signal comes, or it is time to kill.
    fn sleep(&self, signals: &Signals, passed_on: bool, kill_at: Option<Instant>) {
        let alive = self.ranks.iter().filter(|rank| !rank.ended);
        let mut fds: Vec<PollFd> = alive.map(|rank| PollFd::new(&rank.pidfd, PollFlags::IN)).collect();
        let wake = signals.wake();
        if !passed_on {
            fds.push(PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN));
        }
        let left =
            kill_at.map(|at| at.saturating_duration_since(Instant::now()).max(Duration::from_millis(10)));
        let limit = left.unwrap_or(Duration::from_secs(5));
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Interrupted or timed out: the caller looks at everything in any case.
        let _ = poll(&mut fds, Some(&limit));
    }

    /// Notes who has ended; the first that failed.
    fn look(&mut self, signals: &Signals) -> Option<Failure> {
        let mut failure = None;
        for (rank, running) in self.ranks.iter_mut().enumerate().filter(|(_, running)| !running.ended) {
            let Ok(Some(status)) = running.child.try_wait() else { continue };
            running.ended = true;
            if !status.success() && failure.is_none() {
                let reason = format!("process {} {}", running.child.id(), death(status));
                let interrupted =
                    signals.came() && status.signal().is_some_and(|signal| STOPS.contains(&signal));
                let activity = self.job.last_activity(rank);
                failure = Some(Failure { rank, reason, activity, interrupted });
            }
        }
        failure
    }

    /// What the job's record says about the cause; `first` is who was seen to end first.
    fn cause(&self, first: Failure) -> Failure {
        match self.job.aborted() {
            Some((rank, reason)) if rank != first.rank || reason != first.reason => {
                Failure { rank, reason, activity: self.job.last_activity(rank), interrupted: false }
            }
            _ => first,
        }
    }

    fn signal(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| !rank.ended) {
            // A rank that has just ended needs no signal.
            let _ = pidfd_send_signal(&rank.pidfd, signal);
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| !rank.ended) {
            let _ = rank.child.kill();
            let _ = rank.child.wait();
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
}

/// How a process ended, in words.
fn death(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(9), _) => {
            "was killed by signal 9 (SIGKILL): out of memory? The kernel's log says so (`dmesg`)".into()
        }
        (Some(7), _) => {
            "was killed by signal 7 (SIGBUS): shared memory could not be had; is memory full?".into()
        }
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(101)) => "panicked; its message is above".into(),
        (None, code) => format!("ended with exit code {}", code.unwrap_or(-1)),
    }
}

/// Shows lines on standard error with the number of their rank.
fn show(rank: usize, from: impl Read) {
    each_line(from, |line| note(&format!("[rank {rank}] {}", String::from_utf8_lossy(line).trim_end())));
}

/// Reads to the end, a line at a time, its end of line included: a rank is never held up by a full pipe.
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
    // What was read before an error is still figures.
    let _ = from.read_to_string(&mut text);
    text
}
