//! A schedule: the actions of each rank in order, with empty cells where it waits.
//!
//! Only the order matters. Empty cells make the rows line up, as in the figures of the papers; when a rank really starts
//! an action follows from its messages ([`super::walk`]).

use super::action::{Action, Kind};

/// Actions of each rank in one step. `stages == placement.len()`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineSchedule {
    /// Name in reports.
    pub name: String,
    /// For each rank: its cells; `None` is a bubble. Rows may have different lengths.
    pub ranks: Vec<Vec<Option<Action>>>,
    /// For each stage: its rank.
    pub placement: Vec<usize>,
    /// Micro-batches of a step.
    pub micro_batches: usize,
}

impl PipelineSchedule {
    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.placement.len()
    }

    /// The actions of a rank in order, without the empty cells.
    pub fn actions(&self, rank: usize) -> impl Iterator<Item = Action> + '_ {
        self.ranks[rank].iter().flatten().copied()
    }

    /// The actions of a rank with the numbers of their cells.
    pub fn cells(&self, rank: usize) -> impl Iterator<Item = (usize, Action)> + '_ {
        self.ranks[rank].iter().enumerate().filter_map(|(cell, action)| action.map(|action| (cell, action)))
    }

    /// The stages of a rank, lowest first.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.stages()).filter(move |&stage| self.placement[stage] == rank)
    }

    /// The chunk number of a stage: its index among the stages of its rank, lowest first.
    pub fn chunk(&self, stage: usize) -> usize {
        self.stages_of(self.placement[stage]).take_while(|&other| other < stage).count()
    }

    /// Returns whether some rank has more than one stage.
    pub fn has_chunks(&self) -> bool {
        self.stages() > self.ranks.len()
    }

    /// Returns whether any backward is split into `I` and `W`.
    pub fn splits_backward(&self) -> bool {
        self.ranks.iter().flatten().flatten().any(|action| matches!(action.kind, Kind::Input | Kind::Weight))
    }
}
