//! Generates the schedules that have a name.
//!
//! A generator gives the order of one rank's actions. This module turns the orders into rows of cells, one cell per
//! action. The actions in a column run at the same time if all actions take the same time.

use super::action::Action;
use super::check::check;
use super::depth::UNLIMITED;
use super::error::ScheduleError;
use super::names::Plan;
use super::schedule::PipelineSchedule;
use super::simulate::{Costs, StageCost, simulate_with_depth};
use super::{MAX_CELLS, MAX_RANKS, interleaved, one_chunk, zero_bubble};

/// Generates the schedule `plan` for `ranks` pipeline ranks and `micro_batches` per step; it passes [`check()`].
///
/// # Errors
/// A size of 0; fewer micro-batches than ranks (except for `model`); for `interleaved`, a number of micro-batches that
/// cannot be divided into rounds.
pub fn generate(plan: Plan, ranks: usize, micro_batches: usize) -> Result<PipelineSchedule, ScheduleError> {
    for (number, what) in [(ranks, "ranks"), (micro_batches, "micro-batches"), (plan.chunks(), "chunks")] {
        if number == 0 {
            return Err(ScheduleError::Zero { what });
        }
    }
    if !is_planned(plan, ranks, micro_batches) {
        return Err(ScheduleError::TooLarge { ranks, micro_batches, chunks: plan.chunks() });
    }
    if micro_batches < ranks && plan != Plan::ModelParallel {
        return Err(ScheduleError::TooFewMicroBatches { plan, ranks, micro_batches });
    }
    if let Plan::Interleaved { .. } = plan {
        interleaved::equal_rounds(ranks, micro_batches)?;
    }
    let order = |rank| match plan {
        Plan::ModelParallel => one_chunk::model_parallel(rank, micro_batches),
        Plan::GPipe => one_chunk::gpipe(rank, micro_batches),
        Plan::OneForwardOneBackward => one_chunk::one_forward_one_backward(rank, ranks, micro_batches),
        Plan::Interleaved { chunks } => interleaved::order(rank, ranks, chunks, micro_batches),
        Plan::ZeroBubbleH1 => zero_bubble::h(1, rank, ranks, micro_batches),
        Plan::ZeroBubbleH2 => zero_bubble::h(2, rank, ranks, micro_batches),
        Plan::ZeroBubbleV => zero_bubble::v(rank, ranks, micro_batches),
    };
    let mut schedule = PipelineSchedule {
        name: plan.name().to_string(),
        ranks: (0..ranks).map(|rank| order(rank).into_iter().map(Some).collect()).collect(),
        placement: plan.placement(ranks),
        micro_batches,
    };
    check(&schedule)?;
    schedule.ranks = cells(&schedule);
    Ok(schedule)
}

/// Returns whether a schedule of these sizes is small enough. With `model`, a rank has a cell, empty or not, for each action of
/// every rank; with the others, cells for its own actions and a bubble of as many cells as ranks.
fn is_planned(plan: Plan, ranks: usize, micro_batches: usize) -> bool {
    let length = match plan {
        Plan::ModelParallel => micro_batches.checked_mul(ranks),
        _ => micro_batches.checked_add(ranks),
    };
    let cells = length.and_then(|length| length.checked_mul(ranks)?.checked_mul(plan.chunks()));
    ranks <= MAX_RANKS && cells.is_some_and(|cells| cells <= MAX_CELLS)
}

/// Each rank's actions, placed in the cells in which they start if each takes one cell.
fn cells(schedule: &PipelineSchedule) -> Vec<Vec<Option<Action>>> {
    let parts = if schedule.splits_backward() { 1.0 } else { 0.5 };
    let cost = StageCost { forward: 1.0, input: parts, weight: parts };
    let costs = Costs { stages: vec![cost; schedule.stages()], message: 0.0 };
    let timeline = simulate_with_depth(schedule, &costs, UNLIMITED);
    let mut ranks = Vec::new();
    for spans in timeline.ranks {
        let mut row = Vec::new();
        for span in spans {
            row.resize(span.start as usize, None);
            row.push(Some(span.action));
        }
        ranks.push(row);
    }
    ranks
}
