//! One rank of a training run, on any host.

use std::sync::atomic::AtomicBool;

use anyhow::Result;
use phalanx_bench::baselines::asynchronous;
use phalanx_train::config::Updates;
use phalanx_train::job::Job;
use phalanx_train::run::{Observer, RankEnvironment, Silent, train};
use phalanx_train::{Dataset, RunError};

use crate::arguments::train_args::Show;
use crate::host::card_needs::CardNeeds;
use crate::host::environment::Environment;
use crate::host::output::{self, TrainOutput};
use crate::jobs::rank_host::{self, RankDevice, RankHost};
use crate::jobs::task::TrainTask;
use crate::plans::planned::Planned;
use crate::reports::progress::{Progress, Records};

/// The job of all ranks of this process: the plan and the data.
///
/// # Errors
/// Data that cannot be used.
pub fn job(task: &TrainTask, planned: &Planned) -> Result<Job> {
    let data = Dataset::open(&task.config, &task.run)?;
    let Planned { config, plan, .. } = planned.clone();
    // A card may not say how fast it is.
    let peak_flops_per_s = Some(task.peak_flops_per_s).filter(|peak| *peak > 0.0);
    let (run, digests) = (task.run.clone(), task.digests.clone());
    let (start, evaluates_first) = (task.start(), task.evaluates_first);
    Ok(Job { config, plan, data: Box::new(data), run, digests, start, evaluates_first, peak_flops_per_s })
}

/// Trains one rank to the end. Rank 0 shows progress as `show` says, and writes records to `output`.
///
/// # Errors
/// When the system refuses memory, and errors of [`train`].
pub fn rank(
    job: &Job,
    host: &RankHost,
    environment: Environment,
    stop_requested: &AtomicBool,
    show: Show,
    output: &TrainOutput,
) -> Result<()> {
    let rank = host.rank();
    if matches!(host, RankHost::Alone) {
        // This process has prepared the run before.
        phalanx_tensor::return_freed_memory();
    }
    let factory = environment.device_factory(&job.config.device, CardNeeds::of(&job.plan.spec), output::note);
    let RankDevice { device, shared_bytes } =
        host.make_device(job.plan.of(rank), &job.plan.spec.device, &*factory)?;
    let shares_memory = matches!(host, RankHost::Job(_));
    let foreign = || if shares_memory { rank_host::foreign_bytes(shared_bytes) } else { 0 };
    let note = |step| host.note_step(step);
    let mut observer: Box<dyn Observer> = match show {
        Show::Progress if rank == 0 => Box::new(Progress::new(job)),
        Show::Json if rank == 0 => Box::new(Records::new(output)),
        _ => Box::new(Silent),
    };
    match job.config.parallel.updates {
        Updates::Synchronous => {
            let groups = host.groups(&job.plan.spec, environment.isa());
            let place =
                RankEnvironment { device, groups, stop_requested, note_step: &note, foreign_bytes: &foreign };
            train(job, place, &mut *observer)?;
        }
        Updates::Asynchronous => {
            let links = host.links(&job.plan.spec, environment.isa());
            let place = RankEnvironment {
                device,
                groups: links,
                stop_requested,
                note_step: &note,
                foreign_bytes: &foreign,
            };
            asynchronous::train(job, place, &mut *observer)?;
        }
    }
    Ok(())
}

/// Returns whether an error is that of another rank, which reports it itself.
pub fn is_of_another(error: &anyhow::Error, rank: usize) -> bool {
    use phalanx_collectives::CollectiveError::Aborted;
    match error.downcast_ref::<RunError>() {
        Some(RunError::Collective(Aborted { rank: cause, .. })) => *cause != rank,
        Some(RunError::PeerFailed { .. }) => true,
        _ => false,
    }
}

/// Returns whether an error says that the checkpoint to resume from cannot be used.
pub fn is_of_checkpoint(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<RunError>(), Some(RunError::Restore { .. }))
}
