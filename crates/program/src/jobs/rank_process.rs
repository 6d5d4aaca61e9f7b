//! A rank as a process: it ends with its launcher, joins the job and does its task.
//!
//! An error of this rank is recorded in the job, and the launcher prints it. An error of another rank is reported by
//! that rank.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use phalanx_collectives::{Carrier, Network, Options, Wire, join_carried, take_sealed};
use phalanx_launch::begin_rank;
use phalanx_mpi::{LONGEST_MESSAGE, MpiJob};

use crate::arguments::args::RankArgs;
use crate::host::environment::Environment;
use crate::host::exit_status::CHECKPOINT_UNUSABLE;
use crate::host::output::{TrainOutput, note, print_line};
use crate::host::{pinning, signals, system_limits};
use crate::jobs::rank_host::RankHost;
use crate::jobs::task::Task;
use crate::jobs::{bench, task_file, training};

/// Time in which a rank that failed says why.
const TELL: Duration = Duration::from_millis(500);

/// Runs one rank; its exit code tells the launcher of an error that was reported to it.
///
/// # Errors
/// An error from before the rank has joined the job, where it could not be recorded.
pub fn rank(args: &RankArgs, environment: Environment) -> Result<ExitCode> {
    begin_rank(args.rank, args.launcher).context("ending with the launcher")?;
    // Before the first thread, so that all threads are bound.
    pinning::bind(&args.cores);
    let task = take_sealed(args.task_fd).context("the memory file of a rank's task")?;
    let (task, planned) = task_file::read(&task, args.rank).context("the task of a rank")?;
    // The kernels of all ranks are those that the launcher has decided on.
    let environment = match task.run() {
        Some((config, _)) => environment.of_run(&config.device)?,
        None => environment,
    };
    let planned = || planned.context("the task of a rank comes without a plan");
    let Some((control, arenas)) = args.fds.split_first() else { bail!("a rank without descriptors") };
    let network = network(args)?;
    // Before MPI, which waits for all ranks.
    let stop = signals::stop_on_signal()?;
    let mpi = network.as_ref().map(|(network, _)| mpi(args.rank, network)).transpose()?.flatten();
    let carrier = mpi.clone().map(|mpi| mpi as Arc<dyn Carrier>);
    let endpoint = join_carried(*control, arenas, args.rank, network, carrier).context("joining the job")?;
    // Dropped last, so that a rank has reported its error before others see it leave.
    let host = match &task {
        Task::Train(task) => RankHost::in_job(endpoint, &task.config, environment.isa()),
        Task::BenchStep(task) | Task::BenchStrategy(task) | Task::BenchMemory(task) => {
            RankHost::in_job(endpoint, &task.config, environment.isa())
        }
        Task::BenchCollectives(_) => {
            // The caller runs its calls, as those of MPI_Allreduce and gloo do, and as `measure_as` measures other transports.
            let options = Options { isa: environment.isa(), overlap: false, ..Options::default() };
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
        Task::BenchMemory(task) => {
            planned().and_then(|planned| tell(&bench::memory(task, &planned, &host, environment)?))
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
    if let (Ok(()), Some(mpi)) = (&done, &mpi) {
        // Waits for the other ranks. If one of them fails, the launcher ends this process.
        mpi.finish();
    }
    Ok(match &done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if training::is_of_checkpoint(error) => ExitCode::from(CHECKPOINT_UNUSABLE),
        Err(_) => ExitCode::FAILURE,
    })
}

/// Reads the network to the ranks of other hosts, and the socket at which they reach this rank.
fn network(args: &RankArgs) -> Result<Option<(Network, i32)>> {
    let (Some(network), Some(listener)) = (args.network_fd, args.listener_fd) else { return Ok(None) };
    let file = take_sealed(network).context("the memory file of the hosts")?;
    let network =
        serde_json::from_slice(&file.read(0..file.bytes())?).context("the memory file of the hosts")?;
    Ok(Some((network, listener)))
}

/// This process as one of MPI, if that connects the hosts.
fn mpi(rank: usize, network: &Network) -> Result<Option<Arc<MpiJob>>> {
    if network.wire == Wire::Tcp {
        return Ok(None);
    }
    let job = phalanx_mpi::start(rank, network.hosts.world_size(), LONGEST_MESSAGE);
    Ok(Some(Arc::new(job.context("starting MPI")?)))
}

/// Sends figures to the launcher: one line on standard output.
fn tell(figures: &impl serde::Serialize) -> Result<()> {
    Ok(print_line(&serde_json::to_string(figures)?)?)
}

fn tell_error(error: &anyhow::Error, host: &RankHost) {
    let RankHost::Job(endpoint) = host else { return };
    if !training::is_of_another(error, host.rank()) {
        endpoint.abort(&system_limits::explain(error));
        return;
    }
    // Another rank failed and is about to report why; leaving first would look like the cause.
    endpoint.wait_for_abort(TELL);
    if let Err(reason) = endpoint.check() {
        note(&format!("this rank ends: {reason}"));
    }
}
