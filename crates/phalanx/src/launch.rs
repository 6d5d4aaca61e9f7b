//! Ranks as processes: a program starts itself once more for each rank.
//!
//! The launcher makes the memory that the ranks share, starts the processes with the same arguments, and watches them. In
//! a rank's process the same call of [`Launcher::run`] runs the body and ends the process. A rank that fails ends the
//! job: the others' collectives return its reason, and what has not left a second later is killed. Ranks end with their
//! launcher.

use std::cell::Cell;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{Read, Seek, Write};
use std::os::fd::RawFd;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use phalanx_collectives::{Endpoint, HostJob, join, take_file};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Which rank a process is, for the processes that a launcher starts.
const VARIABLE: &str = "PHALANX_RANK";

/// Time that ranks have to end after one of them has failed.
const LEAVE: Duration = Duration::from_secs(1);

/// Time between two looks at the ranks.
const LOOK_EVERY: Duration = Duration::from_millis(5);

thread_local! {
    /// Calls of [`Launcher::run`] on this thread so far.
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

/// Why ranks did not return their results.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The system refuses memory, descriptors or processes.
    #[error("ranks cannot be started: {0}")]
    Start(#[from] std::io::Error),
    /// A rank failed, and the others were ended.
    #[error("rank {rank} failed: {reason}; it was at: {activity}")]
    Rank {
        /// The rank that was the cause.
        rank: usize,
        /// Its error, or how its process ended.
        reason: String,
        /// Its last activity.
        activity: String,
    },
    /// The program launches ranks several times.
    #[error(
        "in the process of a rank, this is call {call} that launches ranks, and the rank belongs to call {expected}: a rank \
         runs the program from its start to the call that launched it, so that call must be the first that it reaches"
    )]
    Nested {
        /// The number of this call, from 1.
        call: usize,
        /// The number of the call that launched the rank.
        expected: usize,
    },
    /// A result of a rank cannot be read.
    #[error("the result of rank {rank}: {cause}")]
    Result {
        /// The rank.
        rank: usize,
        /// What is wrong.
        cause: serde_json::Error,
    },
}

/// Starts ranks as processes.
#[derive(Clone, Debug)]
pub struct Launcher {
    world_size: usize,
    arguments: Vec<OsString>,
}

/// Runs `body` on `world_size` ranks, each a process of its own, and returns their results in the order of the ranks.
///
/// The processes run this program with its arguments from the start, and end in this call. So a program calls it once, and
/// does the same before it in every process.
///
/// # Errors
/// The first rank that failed. In the process of a rank the call does not return, unless it is not the first one.
pub fn processes<T, E>(
    world_size: usize,
    body: impl FnOnce(&Endpoint) -> Result<T, E>,
) -> Result<Vec<T>, LaunchError>
where
    T: Serialize + DeserializeOwned,
    E: Display,
{
    Launcher::new(world_size).run(body)
}

impl Launcher {
    /// Starts `world_size` ranks with the arguments of this process.
    pub fn new(world_size: usize) -> Launcher {
        Launcher { world_size, arguments: std::env::args_os().skip(1).collect() }
    }

    /// The same with other arguments for the ranks: those of one test, where a test harness runs several.
    #[must_use]
    pub fn with_arguments<S: Into<OsString>>(self, arguments: impl IntoIterator<Item = S>) -> Launcher {
        Launcher { arguments: arguments.into_iter().map(Into::into).collect(), ..self }
    }

    /// As [`processes`].
    ///
    /// # Errors
    /// As [`processes`].
    pub fn run<T, E>(&self, body: impl FnOnce(&Endpoint) -> Result<T, E>) -> Result<Vec<T>, LaunchError>
    where
        T: Serialize + DeserializeOwned,
        E: Display,
    {
        let call = CALLS.get() + 1;
        CALLS.set(call);
        if let Ok(text) = std::env::var(VARIABLE) {
            let place = Place::parse(&text)?;
            if place.call != call {
                return Err(LaunchError::Nested { call, expected: place.call });
            }
            let done = place.run(body);
            std::process::exit(if done { 0 } else { 1 });
        }
        let mut job = HostJob::new(self.world_size)?;
        let results: Vec<_> =
            (0..self.world_size).map(|_| job.shared_file()).collect::<std::io::Result<_>>()?;
        let mut ranks = Ranks { job, running: Vec::new() };
        for (rank, (result, _)) in results.iter().enumerate() {
            let running = self.start(&ranks.job, rank, *result, call)?;
            ranks.running.push(Some(running));
        }
        ranks.wait()?;
        let read = |(rank, (_, mut file)): (usize, (RawFd, std::fs::File))| {
            let mut text = String::new();
            file.rewind()?;
            file.read_to_string(&mut text)?;
            serde_json::from_str(&text).map_err(|cause| LaunchError::Result { rank, cause })
        };
        results.into_iter().enumerate().map(read).collect()
    }

    fn start(&self, job: &HostJob, rank: usize, result: RawFd, call: usize) -> std::io::Result<Child> {
        let numbers = [std::process::id() as usize, call, rank, self.world_size];
        let fds = job.inherited_fds().into_iter().chain([result]).map(|fd| fd as usize);
        let text: Vec<String> = numbers.into_iter().chain(fds).map(|number| number.to_string()).collect();
        // The program that runs, even if its file was replaced meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.args(&self.arguments).env(VARIABLE, text.join(","));
        job.pass_to(&mut command);
        command.spawn()
    }
}

/// The rank that this process is.
struct Place {
    launcher: i32,
    call: usize,
    rank: usize,
    world_size: usize,
    /// The control block, then the arena of each rank.
    fds: Vec<RawFd>,
    result: RawFd,
}

impl Place {
    fn parse(text: &str) -> std::io::Result<Place> {
        let wrong = || {
            let text = format!("{VARIABLE}={text:?}: only a launcher sets this variable; unset it");
            std::io::Error::new(std::io::ErrorKind::InvalidInput, text)
        };
        let numbers: Vec<i32> = text.split(',').filter_map(|number| number.parse().ok()).collect();
        let [launcher, call, rank, world_size, ref fds @ .., result] = numbers[..] else {
            return Err(wrong());
        };
        let size = |number: i32| usize::try_from(number).map_err(|_| wrong());
        let (call, rank, world_size) = (size(call)?, size(rank)?, size(world_size)?);
        if fds.len() != world_size + 1 || rank >= world_size {
            return Err(wrong());
        }
        Ok(Place { launcher, call, rank, world_size, fds: fds.to_vec(), result })
    }

    /// Runs the body and writes its result; false, after the job was ended, when it failed.
    fn run<T: Serialize, E: Display>(self, body: impl FnOnce(&Endpoint) -> Result<T, E>) -> bool {
        let Ok(endpoint) = join(self.fds[0], &self.fds[1..], self.rank, self.world_size) else {
            return false;
        };
        let done = self.try_run(&endpoint, body);
        match &done {
            Ok(()) => endpoint.finish(),
            Err(reason) => endpoint.abort(reason),
        }
        done.is_ok()
    }

    fn try_run<T: Serialize, E: Display>(
        &self,
        endpoint: &Endpoint,
        body: impl FnOnce(&Endpoint) -> Result<T, E>,
    ) -> Result<(), String> {
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| error.to_string())?;
        if getppid() != Pid::from_raw(self.launcher) {
            return Err(format!("the launcher {} has gone", self.launcher));
        }
        let result = body(endpoint).map_err(|error| error.to_string())?;
        let text = serde_json::to_vec(&result).map_err(|error| format!("its result: {error}"))?;
        let written = take_file(self.result).and_then(|mut file| file.write_all(&text));
        written.map_err(|error| format!("its result: {error}"))
    }
}

/// The processes of a job, ended when this is dropped.
struct Ranks {
    job: HostJob,
    /// By rank; None for one that has ended.
    running: Vec<Option<Child>>,
}

impl Ranks {
    /// Waits until all have ended.
    fn wait(&mut self) -> Result<(), LaunchError> {
        let mut failed_at = None;
        while self.running.iter().any(Option::is_some) {
            if let Some((rank, reason)) = self.look()
                && failed_at.is_none()
            {
                // The first reason counts: this one, unless a rank has reported another before.
                self.job.abort(rank, &reason);
                failed_at = Some(Instant::now());
            }
            if failed_at.is_some_and(|at: Instant| at.elapsed() > LEAVE) {
                self.kill();
            }
            std::thread::sleep(LOOK_EVERY);
        }
        match self.job.aborted() {
            Some((rank, reason)) => {
                Err(LaunchError::Rank { rank, reason, activity: self.job.last_activity(rank) })
            }
            None => Ok(()),
        }
    }

    /// Notes which ranks have ended; the first that failed, and how.
    fn look(&mut self) -> Option<(usize, String)> {
        let mut failed = None;
        for (rank, running) in self.running.iter_mut().enumerate() {
            let Some(status) = running.as_mut().and_then(|child| child.try_wait().ok()?) else { continue };
            *running = None;
            if !status.success() || !self.job.is_done(rank) {
                let reason = match status.success() {
                    true => "its process ended before its work was done".to_string(),
                    false => format!("its process ended with {status}"),
                };
                failed = failed.or(Some((rank, reason)));
            }
        }
        failed
    }

    fn kill(&mut self) {
        for child in self.running.iter_mut().flatten() {
            // One that has just ended needs no signal.
            let _ = child.kill();
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
        for child in self.running.iter_mut().flatten() {
            let _ = child.wait();
        }
    }
}
