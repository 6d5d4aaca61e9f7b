//! Errors in a schedule, or in the parameters of one.
//!
//! Ranks, stages, micro-batches and cells count from 0, as in the schedule itself; lines and columns of a
//! text count from 1, as in an editor.

use super::action::Action;
use super::names::Plan;
use super::walk::Stuck;
use super::{MAX_CELLS, MAX_RANKS};

/// How many of the ranks that wait for each other an error names.
const STUCK_SHOWN: usize = 4;

/// Why there is no schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// A name that no schedule has.
    #[error("there is no pipeline schedule `{given}`: expected one of {}", Plan::NAMES.join(", "))]
    UnknownName {
        /// What was given.
        given: String,
    },
    /// Zero of something.
    #[error("a pipeline schedule needs at least one of each: got 0 {what}")]
    Zero {
        /// The thing of which there are none.
        what: &'static str,
    },
    /// More than is planned.
    #[error(
        "a pipeline schedule of {ranks} ranks x {micro_batches} micro-batches x {chunks} stages a rank is larger \
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
    /// A text of more than is planned.
    #[error(
        "line {line}: the schedule is longer than is planned, at most {MAX_RANKS} lines (a line a pipeline rank) and \
         {MAX_CELLS} cells"
    )]
    TooLong {
        /// The line that goes beyond, from 1.
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
    /// Micro-batches that do not fall into rounds.
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
        /// A number that works; the larger of two as near.
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
        /// What is wrong with it.
        problem: String,
    },
    /// No action at all.
    #[error("the schedule is empty: expected a line of cells for each rank, such as `0F0,0B0`")]
    Empty,
    /// A rank that does nothing.
    #[error("rank {rank} has no action: each rank runs at least one stage; remove its line, or give it one")]
    EmptyRank {
        /// The rank.
        rank: usize,
    },
    /// A stage number left out.
    #[error("there is a stage {stage} but no stage {missing}: stages are numbered from 0 without gaps")]
    NoSuchStage {
        /// The lowest that is missing.
        missing: usize,
        /// The next that exists.
        stage: usize,
    },
    /// A stage on a second rank.
    #[error(
        "rank {rank}, cell {cell}: `{action}` runs stage {} here, which lives on rank {home}: a stage lives \
         on one rank",
        action.stage
    )]
    Elsewhere {
        /// Where the action is.
        rank: usize,
        /// Its cell.
        cell: usize,
        /// The action.
        action: Action,
        /// Where its stage lives.
        home: usize,
    },
    /// A stage or micro-batch beyond the schedule's own numbers, or a placement on no rank.
    #[error(
        "rank {rank}, cell {cell}: `{action}` is outside of the schedule's {stages} stages and \
         {micro_batches} micro-batches"
    )]
    Outside {
        /// Where the action is.
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
        "rank {rank}, cell {cell}: `{action}` computes again what `{first}` in cell {first_cell} computed: \
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
        /// What is missing.
        action: Action,
        /// Where its stage lives.
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
        /// Cell of what waits.
        cell: usize,
        /// What waits.
        action: Action,
        /// What it waits for.
        needed: Action,
        /// The cell of that.
        needed_cell: usize,
    },
    /// Ranks wait for each other.
    #[error("the schedule deadlocks: {}", list(stuck))]
    Deadlock {
        /// Every rank that cannot go on, lowest first.
        stuck: Vec<Stuck>,
    },
    /// Micro-batches of a stage out of order.
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
        shown.push(format!("and {} ranks more wait", stuck.len() - STUCK_SHOWN));
    }
    shown.join("; ")
}
