//! Ranks as processes: a program starts itself once more for each rank.
//!
//! The launcher starts the processes with the same arguments, and watches them with [`phalanx_launch`], as the program
//! `phalanx` does. In a rank's process the same call of [`Launcher::run`] runs the body and ends the process. A rank that
//! fails or stands still ends the job: the others' collectives return its reason, and a rank that has not left a second
//! later is killed. Ranks end with their launcher.

use std::cell::Cell;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{Read, Seek, Write};
use std::os::fd::RawFd;
use std::process::Command;
use std::time::Duration;

use phalanx_collectives::{Endpoint, HostJob, Options, join, take_file};
use phalanx_launch::{Failure, Hooks, RankProcesses, begin_rank, own_program};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Which rank a process is, for the processes that a launcher starts.
const VARIABLE: &str = "PHALANX_RANK";

/// Time for which a rank may stand still, unless [`Launcher::with_stall_timeout`] gives another. It is long because a body may
/// wait for anything.
const STALL_TIMEOUT: Duration = Duration::from_secs(300);

thread_local! {
    /// Calls of [`Launcher::run`] on this thread so far.
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

/// Why ranks did not return their results.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// No ranks or too many, or the system refuses memory, descriptors or processes.
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
        /// Error in the result.
        cause: serde_json::Error,
    },
}

impl From<Failure> for LaunchError {
    fn from(failure: Failure) -> LaunchError {
        let Failure { rank, reason, activity, .. } = failure;
        LaunchError::Rank { rank, reason, activity: activity.into() }
    }
}

/// Starts ranks as processes.
#[derive(Clone, Debug)]
pub struct Launcher {
    world_size: usize,
    arguments: Vec<OsString>,
    stall_timeout: Duration,
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
        let arguments = std::env::args_os().skip(1).collect();
        Launcher { world_size, arguments, stall_timeout: STALL_TIMEOUT }
    }

    /// The same with other arguments for the ranks: those of one test, where a test harness runs several.
    #[must_use]
    pub fn with_arguments<S: Into<OsString>>(self, arguments: impl IntoIterator<Item = S>) -> Launcher {
        Launcher { arguments: arguments.into_iter().map(Into::into).collect(), ..self }
    }

    /// The same with another time for which a rank may stand still; the default is 300 seconds.
    ///
    /// A rank that for longer than this has neither used processor time nor made a collective is named as the cause and ends
    /// the job, and so is one for which others wait that does not work. A rank that computes is never stalled.
    #[must_use]
    pub fn with_stall_timeout(self, stall_timeout: Duration) -> Launcher {
        Launcher { stall_timeout, ..self }
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
            let place = ThisRank::parse(&text)?;
            if place.call != call {
                return Err(LaunchError::Nested { call, expected: place.call });
            }
            let done = place.run(self.stall_timeout, body);
            std::process::exit(if done { 0 } else { 1 });
        }
        let mut job = HostJob::new(self.world_size)?;
        let results: Vec<_> =
            (0..self.world_size).map(|_| job.shared_file()).collect::<std::io::Result<_>>()?;
        let commands: Vec<Command> = (results.iter().enumerate())
            .map(|(rank, (result, _))| self.command(&job, rank, *result, call))
            .collect();
        let mut ranks = RankProcesses::new(job, self.stall_timeout);
        for command in commands {
            ranks.start(command)?;
        }
        ranks.wait(&StallTimeout)?;
        let read = |(rank, (_, mut file)): (usize, (RawFd, std::fs::File))| {
            let mut text = String::new();
            file.rewind()?;
            file.read_to_string(&mut text)?;
            serde_json::from_str(&text).map_err(|cause| LaunchError::Result { rank, cause })
        };
        results.into_iter().enumerate().map(read).collect()
    }

    /// The command that starts a rank.
    fn command(&self, job: &HostJob, rank: usize, result: RawFd, call: usize) -> Command {
        let numbers = [std::process::id() as usize, call, rank, self.world_size];
        let fds = job.inherited_fds().into_iter().chain([result]).map(|fd| fd as usize);
        let text: Vec<String> = numbers.into_iter().chain(fds).map(|number| number.to_string()).collect();
        let mut command = own_program();
        command.args(&self.arguments).env(VARIABLE, text.join(","));
        command
    }
}

/// Names the limit in errors.
struct StallTimeout;

impl Hooks for StallTimeout {
    fn timeout_setting(&self, timeout: Duration) -> String {
        format!("Launcher::with_stall_timeout: {timeout:?}")
    }
}

/// The rank that this process is.
struct ThisRank {
    launcher: i32,
    call: usize,
    rank: usize,
    /// The control block, then the arena of each rank.
    fds: Vec<RawFd>,
    result: RawFd,
}

impl ThisRank {
    fn parse(text: &str) -> std::io::Result<ThisRank> {
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
        Ok(ThisRank { launcher, call, rank, fds: fds.to_vec(), result })
    }

    /// Runs the body and writes its result; false, after the job was ended, when it failed.
    fn run<T: Serialize, E: Display>(
        self,
        deadline: Duration,
        body: impl FnOnce(&Endpoint) -> Result<T, E>,
    ) -> bool {
        let joined = begin_rank(self.rank, self.launcher)
            .and_then(|()| join(self.fds[0], &self.fds[1..], self.rank, None));
        // Without the memory of the job, the launcher sees only how the process ends; the panic says why.
        let endpoint =
            joined.unwrap_or_else(|cause| panic!("rank {} cannot join its job: {cause}", self.rank));
        let endpoint = endpoint.with_options(Options { deadline, ..Options::default() });
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
        let result = body(endpoint).map_err(|error| error.to_string())?;
        let text = serde_json::to_vec(&result).map_err(|error| format!("its result: {error}"))?;
        let written = take_file(self.result).and_then(|mut file| file.write_all(&text));
        written.map_err(|error| format!("its result: {error}"))
    }
}
