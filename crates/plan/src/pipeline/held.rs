//! How many micro-batches' activations a stage, and a rank with all its stages, holds at most.
//!
//! From its forward on a stage holds a micro-batch's activations: until `B`; or until `I` those that the
//! gradient of the input needs, and until `W` those that the gradient of the weights needs. Times do not
//! matter, because a rank does one thing after the other.

use super::action::{Action, Kind};
use super::schedule::Schedule;

/// Most micro-batches held at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// From the beginning of `F` to the end of `I` or `B`.
    pub to_input: usize,
    /// From the beginning of `F` to the end of `W` or `B`.
    pub to_weight: usize,
}

/// What a schedule holds. A rank's number is that of its stages together, each counting 1 a micro-batch, at
/// the moment when it is highest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// By stage.
    pub stages: Vec<Held>,
    /// By rank.
    pub ranks: Vec<Held>,
}

/// Counts what is held, through a schedule that [`super::check()`] accepts.
pub fn in_flight(schedule: &Schedule) -> InFlight {
    let peak = |rank: usize, of_stage: Option<usize>| {
        let counted = |action: &Action| of_stage.is_none_or(|stage| action.stage == stage);
        let until = |last: Kind| max_held(schedule.actions(rank).filter(counted), last);
        Held { to_input: until(Kind::Input), to_weight: until(Kind::Weight) }
    };
    let ranks = (0..schedule.ranks.len()).map(|rank| peak(rank, None)).collect();
    let stages =
        schedule.placement.iter().enumerate().map(|(stage, &rank)| peak(rank, Some(stage))).collect();
    InFlight { stages, ranks }
}

/// The highest number of forwards whose `last` part has not been done.
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
