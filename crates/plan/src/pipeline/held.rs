//! The largest number of micro-batches whose activations a stage, or a rank with all its stages, holds.
//!
//! A stage holds the activations of a micro-batch from its forward to `B`. Where backward is split, it holds those that
//! the gradient of the input needs until `I`, and those that the gradient of the weights needs until `W`. The durations
//! of actions do not matter, because a rank runs one action after the other.

use super::action::{Action, Kind};
use super::schedule::PipelineSchedule;

/// The largest number of micro-batches whose activations are held at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldMicroBatches {
    /// From the beginning of `F` to the end of `I` or `B`.
    pub to_input: usize,
    /// From the beginning of `F` to the end of `W` or `B`.
    pub to_weight: usize,
}

/// The micro-batches whose activations a schedule holds. A rank's value is the largest sum over its stages, where each
/// stage counts 1 per micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// For each stage.
    pub stages: Vec<HeldMicroBatches>,
    /// For each rank.
    pub ranks: Vec<HeldMicroBatches>,
}

/// Counts the held micro-batches of a schedule that [`super::check()`] accepts.
pub fn in_flight(schedule: &PipelineSchedule) -> InFlight {
    let peak = |rank: usize, of_stage: Option<usize>| {
        let counted = |action: &Action| of_stage.is_none_or(|stage| action.stage == stage);
        let until = |last: Kind| max_held(schedule.actions(rank).filter(counted), last);
        HeldMicroBatches { to_input: until(Kind::Input), to_weight: until(Kind::Weight) }
    };
    let ranks = (0..schedule.ranks.len()).map(|rank| peak(rank, None)).collect();
    let stages =
        schedule.placement.iter().enumerate().map(|(stage, &rank)| peak(rank, Some(stage))).collect();
    InFlight { stages, ranks }
}

/// The largest number of micro-batches with a finished forward and an unfinished `last` part.
fn max_held(actions: impl Iterator<Item = Action>, last: Kind) -> usize {
    let (mut held, mut max) = (0, 0);
    for action in actions {
        if action.kind == Kind::Forward {
            held += 1;
            max = max.max(held);
        } else if action.kind.parts().contains(&last) {
            held -= 1;
        }
    }
    max
}
