//! A rank as a process: it ends with its launcher, joins the job and does its task.
//!
//! An error of this rank is recorded in the job, and the launcher prints it. An error of another rank is reported by
//! that rank.

use std::ffi::CString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use phalanx_collectives::{Options, join, take_sealed};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::args::RankArgs;
use crate::environment::Environment;
use crate::exit_status::CHECKPOINT_UNUSABLE;
use crate::output::{TrainOutput, print_line};
use crate::rank_host::RankHost;
use crate::task::Task;
use crate::{bench, file_size, signals, task_file, training};

/// Runs one rank; its exit code tells the launcher of an error that was reported to it.
///
/// # Errors
/// An error from before the rank has joined the job, where it could not be recorded.
pub fn rank(args: &RankArgs, environment: Environment) -> Result<ExitCode> {
    end_with(args.launcher)?;
    name(args.rank);
    let task = take_sealed(args.task_fd).context("the memory file of a rank's task")?;
    let (task, planned) = task_file::read(&task, args.rank).context("the task of a rank")?;
    let planned = || planned.context("the task of a rank comes without a plan");
    let Some((control, arenas)) = args.fds.split_first() else { bail!("a rank without descriptors") };
    let endpoint = join(*control, arenas, args.rank, arenas.len()).context("joining the job")?;
    let stop = signals::stop_on_signal()?;
    // Dropped last, so that a rank has reported its error before others see it leave.
    let host = match &task {
        Task::Train(task) => RankHost::in_job(endpoint, &task.config, environment.isa()),
        Task::BenchStep(task) | Task::BenchStrategy(task) => {
            RankHost::in_job(endpoint, &task.config, environment.isa())
        }
        Task::BenchCollectives(_) => {
            let options = Options { isa: environment.isa(), ..Options::default() };
            RankHost::Job(endpoint.with_options(options))
        }
    };
    let done = match &task {
        Task::Train(task) => planned().and_then(|planned| {
            let job = training::job(task, &planned)?;
            let output = TrainOutput::default();
            let done = training::rank(&job, &host, environment, &stop, task.show, &output);
            output.finish();
            done
        }),
        Task::BenchStep(task) => {
            planned().and_then(|planned| tell(&bench::steps(task, &planned, &host, environment)?))
        }
        Task::BenchStrategy(task) => {
            planned().and_then(|planned| tell(&bench::strategy(task, &planned, &host, environment)?))
        }
        Task::BenchCollectives(task) => {
            bench::collectives(task, &host, environment).and_then(|figures| tell(&figures))
        }
    };
    match (&done, &host) {
        (Err(error), _) => tell_error(error, &host),
        (Ok(()), RankHost::Job(endpoint)) => endpoint.finish(),
        (Ok(()), RankHost::Alone) => {}
    }
    Ok(match &done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if training::is_of_checkpoint(error) => ExitCode::from(CHECKPOINT_UNUSABLE),
        Err(_) => ExitCode::FAILURE,
    })
}

/// Makes this process end when its launcher does.
fn end_with(launcher: i32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("ending with the launcher")?;
    if getppid() != Pid::from_raw(launcher) {
        bail!("the launcher {launcher} has ended");
    }
    Ok(())
}

/// Sets the name of this process for `top`, `ps` and the kernel's log; otherwise it would be `exe`, the name of the
/// link that started it. The system keeps 15 bytes.
fn name(rank: usize) {
    let long = format!("phalanx-rank-{rank}");
    let name = if long.len() <= 15 { long } else { format!("phalanx-{rank}") };
    // If this fails, the process only has a worse name.
    let _ = CString::new(name).map(|name| rustix::thread::set_name(&name));
}

/// Sends figures to the launcher: one line on standard output.
fn tell(figures: &impl serde::Serialize) -> Result<()> {
    Ok(print_line(&serde_json::to_string(figures)?)?)
}

fn tell_error(error: &anyhow::Error, host: &RankHost) {
    let RankHost::Job(endpoint) = host else { return };
    if !training::is_of_another(error, host.rank()) {
        endpoint.abort(&file_size::explain(error));
        return;
    }
    // Another rank failed and is about to report why; leaving first would look like the cause.
    let timeout = Instant::now() + Duration::from_millis(500);
    while endpoint.check().is_ok() && Instant::now() < timeout {
        std::thread::sleep(Duration::from_millis(5));
    }
}
