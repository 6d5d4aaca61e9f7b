//! One rank of a training run, wherever it sits.

use std::sync::atomic::AtomicBool;

use anyhow::Result;
use phalanx_models::Gpt2;
use phalanx_train::run::{Job, Place, Silent, train};
use phalanx_train::{Dataset, RunError};

use crate::environment::Environment;
use crate::planned::Planned;
use crate::progress::{Progress, Records};
use crate::seat::{self, Seat};
use crate::task::{Show, TrainTask};

/// What all ranks of the run have in common, made anew from the task: every rank comes to the same plan.
///
/// # Errors
/// Data that cannot be used, or an engine that cannot be planned.
pub fn job(task: &TrainTask) -> Result<Job> {
    let model = Gpt2::from_config(&task.model)?;
    let data = Dataset::open(&task.config, &task.run)?;
    let Planned { config, plan } = Planned::new(task.config.clone(), model, data.evaluated())?;
    let peak_flops_per_s = Some(task.peak_flops_per_s);
    Ok(Job { config, plan, data, run: task.run.clone(), start: task.start(), peak_flops_per_s })
}

/// Trains one rank to the end; rank 0 shows how it goes as `show` says.
///
/// # Errors
/// Memory that the system does not give, and those of [`train`].
pub fn rank(job: &Job, seat: &Seat, environment: Environment, stop: &AtomicBool, show: Show) -> Result<()> {
    let rank = seat.rank();
    let computing = environment.options(job.plan.spec.threads);
    let seat::Place { device, group, arena_bytes, .. } =
        seat.take(&job.plan.ranks[rank].memory, computing)?;
    let shares_memory = matches!(seat, Seat::Among(_));
    let foreign = || if shares_memory { seat::foreign_bytes(arena_bytes) } else { 0 };
    let note = |step| seat.note_step(step);
    let place = Place { device, group, stop, note_step: &note, foreign_bytes: &foreign };
    match show {
        Show::Progress if rank == 0 => train(job, place, &mut Progress::new(job))?,
        Show::Json if rank == 0 => train(job, place, &mut Records)?,
        _ => train(job, place, &mut Silent)?,
    };
    Ok(())
}

/// Whether an error is another rank's, which tells it itself.
pub fn is_of_another(error: &anyhow::Error, rank: usize) -> bool {
    use phalanx_collectives::CollectiveError::Aborted;
    match error.downcast_ref::<RunError>() {
        Some(RunError::Collective(Aborted { rank: cause, .. })) => *cause != rank,
        Some(RunError::PeerFailed { .. }) => true,
        _ => false,
    }
}
