//! The times of a simulated step: when each action ran on each rank, and how long the ranks were idle.

use super::action::Action;

/// An action with its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The action.
    pub action: Action,
    /// When it began, the step beginning at 0.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// A step in time.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// For each rank: its actions in order.
    pub ranks: Vec<Vec<Span>>,
    /// For each rank: the time that it computes.
    pub busy: Vec<f64>,
    /// When the last action of the last rank ends.
    pub makespan: f64,
}

impl Timeline {
    /// Time in which a rank does not compute: it waits or sends.
    pub fn idle(&self, rank: usize) -> f64 {
        self.makespan - self.busy[rank]
    }

    /// The idle share of the total time of all ranks: `1 - sum(busy) / (ranks * makespan)`, or 0 if nothing takes time.
    ///
    /// For GPipe and 1F1B with equal stages it is (p - 1)/(m + p - 1). Narayanan et al. give idle over busy time
    /// instead, (p - 1)/m.
    pub fn bubble_fraction(&self) -> f64 {
        let total = self.makespan * self.busy.len() as f64;
        if total > 0.0 { 1.0 - self.busy.iter().sum::<f64>() / total } else { 0.0 }
    }
}
