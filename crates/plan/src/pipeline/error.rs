//! Errors in a schedule, or in the parameters of one.
//!
//! Ranks, stages, micro-batches and cells count from 0, as in the schedule itself; lines and columns of a
//! text count from 1, as in an editor.

use super::action::Action;
use super::names::{Plan, UnknownSchedule};
use super::walk::Stuck;
use super::{MAX_CELLS, MAX_RANKS};

/// Number of waiting ranks that a deadlock error names.
const STUCK_SHOWN: usize = 4;

/// An error of a pipeline schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// An unknown name.
    #[error(transparent)]
    UnknownName(#[from] UnknownSchedule),
    /// A size of 0.
    #[error("a pipeline schedule needs at least one of each: got 0 {what}")]
    Zero {
        /// Which size.
        what: &'static str,
    },
    /// A schedule that is too large.
    #[error(
        "a pipeline schedule of {ranks} ranks x {micro_batches} micro-batches x {chunks} stages per rank is larger \
         than is planned: at most {MAX_RANKS} ranks and {MAX_CELLS} cells; use fewer of them"
    )]
    TooLarge {
        /// Pipeline ranks.
        ranks: usize,
        /// Micro-batches asked for.
        micro_batches: usize,
        /// Stages of each rank.
        chunks: usize,
    },
    /// A text that is too long.
    #[error(
        "line {line}: the schedule is too long: at most {MAX_RANKS} lines (one per pipeline rank) and \
         {MAX_CELLS} cells"
    )]
    TooLong {
        /// The line at which the limit is exceeded, from 1.
        line: usize,
    },
    /// Fewer micro-batches than ranks.
    #[error(
        "schedule `{plan}` on {ranks} ranks needs at least {ranks} micro-batches, one for each rank to work \
         on, and has {micro_batches}: raise the number of micro-batches to {ranks} or more, use at most \
         {micro_batches} pipeline ranks, or take the schedule `model`, which runs any number one by one"
    )]
    TooFewMicroBatches {
        /// The schedule.
        plan: Plan,
        /// Pipeline ranks.
        ranks: usize,
        /// Micro-batches asked for.
        micro_batches: usize,
    },
    /// A number of micro-batches that cannot be divided into rounds.
    #[error(
        "schedule `interleaved` on {ranks} ranks runs its micro-batches in rounds of equal size, as many as there \
         can be of at least {ranks} each, and {micro_batches} do not fall into {} such rounds: the nearest number of \
         micro-batches that works is {nearest}",
        micro_batches / ranks
    )]
    UnequalRounds {
        /// Pipeline ranks.
        ranks: usize,
        /// Micro-batches asked for.
        micro_batches: usize,
        /// The nearest valid number; the larger of two equally near.
        nearest: usize,
    },
    /// A cell that is not an action.
    #[error(
        "line {line}, column {column}: cell `{cell}` cannot be read: {problem}; expected a stage, one of F, \
         B, I, W, and a micro-batch, such as `2F0`, or nothing for an empty cell"
    )]
    Cell {
        /// Line, from 1.
        line: usize,
        /// Column of the cell's first letter, from 1.
        column: usize,
        /// The cell.
        cell: String,
        /// Description of the problem.
        problem: String,
    },
    /// No action at all.
    #[error("the schedule is empty: expected a line of cells for each rank, such as `0F0,0B0`")]
    Empty,
    /// A rank without actions.
    #[error("rank {rank} has no action: each rank runs at least one stage; remove its line, or give it one")]
    EmptyRank {
        /// The rank.
        rank: usize,
    },
    /// A stage number left out.
    #[error("there is a stage {stage} but no stage {missing}: stages are numbered from 0 without gaps")]
    NoSuchStage {
        /// The lowest missing stage.
        missing: usize,
        /// The next stage that exists.
        stage: usize,
    },
    /// A stage on a second rank.
    #[error(
        "rank {rank}, cell {cell}: `{action}` runs stage {} here, which lives on rank {home}: a stage lives \
         on one rank",
        action.stage
    )]
    Elsewhere {
        /// Rank of the action.
        rank: usize,
        /// Its cell.
        cell: usize,
        /// The action.
        action: Action,
        /// Rank of its stage.
        home: usize,
    },
    /// A stage or micro-batch outside the schedule, or a stage without a rank.
    #[error(
        "rank {rank}, cell {cell}: `{action}` is outside of the schedule's {stages} stages and \
         {micro_batches} micro-batches"
    )]
    Outside {
        /// Rank of the action.
        rank: usize,
        /// Its cell.
        cell: usize,
        /// The action.
        action: Action,
        /// Stages of the schedule.
        stages: usize,
        /// Micro-batches of the schedule.
        micro_batches: usize,
    },
    /// Something is computed twice.
    #[error(
        "rank {rank}, cell {cell}: `{action}` repeats `{first}` in cell {first_cell}: \
         each stage has one F and either one B or one I and one W for each micro-batch"
    )]
    Doubled {
        /// Rank of both.
        rank: usize,
        /// Cell of the second.
        cell: usize,
        /// The second.
        action: Action,
        /// The first.
        first: Action,
        /// Its cell.
        first_cell: usize,
    },
    /// Something is never computed.
    #[error(
        "`{action}` is missing on rank {rank}: each stage has one F and either one B or one I and one W for \
         each of the {micro_batches} micro-batches"
    )]
    Missing {
        /// The missing action.
        action: Action,
        /// Rank of its stage.
        rank: usize,
        /// Micro-batches of the schedule.
        micro_batches: usize,
    },
    /// A rank would wait for itself.
    #[error(
        "rank {rank}, cell {cell}: `{action}` waits for `{needed}`, which the same rank runs only in cell \
         {needed_cell}: move `{needed}` before it"
    )]
    WaitsForLater {
        /// The rank.
        rank: usize,
        /// Cell of the waiting action.
        cell: usize,
        /// The waiting action.
        action: Action,
        /// The action that it waits for.
        needed: Action,
        /// The cell of that action.
        needed_cell: usize,
    },
    /// Ranks wait for each other.
    #[error("the schedule deadlocks: {}", list(stuck))]
    Deadlock {
        /// Every rank that cannot continue, lowest first.
        stuck: Vec<Stuck>,
    },
    /// Micro-batches of a stage are out of order.
    #[error(
        "rank {rank}, cell {cell}: `{action}` comes after `{before}`: each stage takes its micro-batches in \
         ascending order, so that gradients are added up in the same order under every schedule"
    )]
    Descending {
        /// The rank.
        rank: usize,
        /// Cell of the later one.
        cell: usize,
        /// The later one.
        action: Action,
        /// The one before, of a higher micro-batch.
        before: Action,
    },
}

fn list(stuck: &[Stuck]) -> String {
    let mut shown: Vec<String> = stuck.iter().take(STUCK_SHOWN).map(Stuck::to_string).collect();
    if stuck.len() > STUCK_SHOWN {
        shown.push(format!("and {} more ranks wait", stuck.len() - STUCK_SHOWN));
    }
    shown.join("; ")
}
