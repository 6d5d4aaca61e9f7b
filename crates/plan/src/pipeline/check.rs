//! Refuses a schedule that cannot train: wrong stages, missing or repeated actions, deadlocks. A user's schedule is
//! checked before anything is allocated.
//!
//! The order of micro-batches is checked separately ([`check_order`]): every order gives correct gradients, but only the
//! ascending one gives the same bits with every schedule.

use std::collections::HashMap;

use super::action::{Action, Kind};
use super::depth::UNLIMITED;
use super::error::ScheduleError;
use super::lower::lower;
use super::schedule::PipelineSchedule;
use super::walk::walk;

/// Maps each part of the work, (stage, micro-batch, `F` or `I` or `W`), to rank, cell and action.
type Found = HashMap<(usize, usize, Kind), (usize, usize, Action)>;

/// Checks that a schedule can run and computes everything exactly once.
///
/// # Errors
/// The first problem: rank, cell, action, and what it waits for or conflicts with.
pub fn check(schedule: &PipelineSchedule) -> Result<(), ScheduleError> {
    check_stages(schedule)?;
    let found = check_complete(schedule)?;
    check_own_rank(schedule, &found)?;
    let cost = |_: Action| 0.0;
    match walk(&lower(schedule), cost, 0.0, UNLIMITED) {
        Ok(_) => Ok(()),
        Err(mut stuck) => {
            for entry in &mut stuck {
                entry.cell = cell_of(schedule, entry.rank, entry.cell);
            }
            Err(ScheduleError::Deadlock { stuck })
        }
    }
}

/// Checks that each stage takes its micro-batches in ascending order, in `F`, in `B` or `I`, and in `W`.
///
/// # Errors
/// The first action that is out of order.
pub fn check_order(schedule: &PipelineSchedule) -> Result<(), ScheduleError> {
    let mut last: HashMap<(usize, Kind), Action> = HashMap::new();
    for rank in 0..schedule.ranks.len() {
        for (cell, action) in schedule.cells(rank) {
            for &part in action.kind.parts() {
                let before = last.insert((action.stage, part), action);
                if let Some(before) = before.filter(|before| before.micro_batch > action.micro_batch) {
                    return Err(ScheduleError::Descending { rank, cell, action, before });
                }
            }
        }
    }
    Ok(())
}

/// The cell of a rank's `number`-th action.
fn cell_of(schedule: &PipelineSchedule, rank: usize, number: usize) -> usize {
    schedule.cells(rank).nth(number).map_or(0, |(cell, _)| cell)
}

/// Checks that every action runs on the rank of its stage.
fn check_stages(schedule: &PipelineSchedule) -> Result<(), ScheduleError> {
    let (stages, micro_batches) = (schedule.stages(), schedule.micro_batches);
    if schedule.ranks.is_empty() || stages == 0 || micro_batches == 0 {
        return Err(ScheduleError::Empty);
    }
    for rank in 0..schedule.ranks.len() {
        if schedule.cells(rank).next().is_none() {
            return Err(ScheduleError::EmptyRank { rank });
        }
        for (cell, action) in schedule.cells(rank) {
            if action.stage >= stages || action.micro_batch >= micro_batches {
                return Err(ScheduleError::Outside { rank, cell, action, stages, micro_batches });
            }
            let home = schedule.placement[action.stage];
            if home != rank {
                return Err(ScheduleError::Elsewhere { rank, cell, action, home });
            }
        }
    }
    Ok(())
}

/// Checks that everything is computed once. The work is bounded by the number of cells, not by the numbers in them.
fn check_complete(schedule: &PipelineSchedule) -> Result<Found, ScheduleError> {
    let mut found = Found::new();
    for rank in 0..schedule.ranks.len() {
        for (cell, action) in schedule.cells(rank) {
            for &part in action.kind.parts() {
                let before = found.insert((action.stage, action.micro_batch, part), (rank, cell, action));
                if let Some((_, first_cell, first)) = before {
                    return Err(ScheduleError::Doubled { rank, cell, action, first, first_cell });
                }
            }
        }
    }
    let micro_batches = schedule.micro_batches;
    for (stage, &rank) in schedule.placement.iter().enumerate() {
        for micro_batch in 0..micro_batches {
            let has = |kind| found.contains_key(&(stage, micro_batch, kind));
            let kind = match [Kind::Forward, Kind::Input, Kind::Weight].map(has) {
                [true, true, true] => continue,
                [false, _, _] => Kind::Forward,
                [_, false, false] => Kind::Backward,
                [_, false, true] => Kind::Input,
                [_, true, false] => Kind::Weight,
            };
            let action = Action { stage, kind, micro_batch };
            return Err(ScheduleError::Missing { action, rank, micro_batches });
        }
    }
    Ok(found)
}

/// Checks that the results that a rank needs from itself come before their use.
fn check_own_rank(schedule: &PipelineSchedule, found: &Found) -> Result<(), ScheduleError> {
    for rank in 0..schedule.ranks.len() {
        for (cell, action) in schedule.cells(rank) {
            for part in needs(schedule, action).into_iter().flatten() {
                let (needed_rank, needed_cell, needed) = found[&part];
                if needed_rank == rank && needed_cell > cell {
                    return Err(ScheduleError::WaitsForLater { rank, cell, action, needed, needed_cell });
                }
            }
        }
    }
    Ok(())
}

/// The parts that an action needs: from its own stage, and from the neighbouring stage.
fn needs(schedule: &PipelineSchedule, action: Action) -> [Option<(usize, usize, Kind)>; 2] {
    let Action { stage, kind, micro_batch } = action;
    let above = (stage + 1 < schedule.stages()).then_some((stage + 1, micro_batch, Kind::Input));
    match kind {
        Kind::Forward => [stage.checked_sub(1).map(|below| (below, micro_batch, Kind::Forward)), None],
        Kind::Backward | Kind::Input => [Some((stage, micro_batch, Kind::Forward)), above],
        Kind::Weight => [Some((stage, micro_batch, Kind::Input)), None],
    }
}
