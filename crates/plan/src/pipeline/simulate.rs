//! Simulates a schedule: when each action runs, given the cost of each stage; makespan, busy time and bubble.
//!
//! The times are those of [`super::walk`]: a rank waits for its messages, and for room on a channel, which holds as many
//! messages as in a run ([`super::depth()`]). Times have the unit of the costs.

use super::action::{Action, Kind};
use super::depth::depth;
use super::lower::lower;
use super::schedule::PipelineSchedule;
use super::timeline::Timeline;
use super::walk::{Stuck, walk};

/// Time that one stage takes for one micro-batch; a whole backward takes `input + weight`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageCost {
    /// Forward.
    pub forward: f64,
    /// The gradient of its input.
    pub input: f64,
    /// The gradient of its weights.
    pub weight: f64,
}

impl StageCost {
    /// Time of an action.
    pub fn of(&self, kind: Kind) -> f64 {
        match kind {
            Kind::Forward => self.forward,
            Kind::Backward => self.input + self.weight,
            Kind::Input => self.input,
            Kind::Weight => self.weight,
        }
    }
}

/// Cost of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// For each stage.
    pub stages: Vec<StageCost>,
    /// Time from the sending of a message to its arrival. The sender computes meanwhile; the receiver waits, if it has
    /// nothing else to do.
    pub message: f64,
}

impl Costs {
    /// The papers' unit: F = I = W = 1 for each stage, B = 2, messages free.
    pub fn unit(stages: usize) -> Costs {
        let cost = StageCost { forward: 1.0, input: 1.0, weight: 1.0 };
        Costs { stages: vec![cost; stages], message: 0.0 }
    }

    /// Time of an action.
    pub fn of(&self, action: Action) -> f64 {
        self.stages[action.stage].of(action.kind)
    }
}

/// Runs a schedule that [`super::check()`] accepts, with channels of the depth that a run gives them.
///
/// # Panics
/// If a stage has no cost, or on a schedule that `check` refuses.
pub fn simulate(schedule: &PipelineSchedule, costs: &Costs) -> Timeline {
    simulate_with_depth(schedule, costs, depth(schedule))
}

/// The same with channels of another depth.
///
/// # Panics
/// As [`simulate`], and on a depth with which ranks wait for each other.
pub fn simulate_with_depth(schedule: &PipelineSchedule, costs: &Costs, depth: usize) -> Timeline {
    let (stages, given) = (schedule.stages(), costs.stages.len());
    assert_eq!(stages, given, "`{}` has {stages} stages, but there are costs for {given}", schedule.name);
    let run = walk(&lower(schedule), |action| costs.of(action), costs.message, depth);
    let ranks = run.unwrap_or_else(|stuck| {
        let stuck: Vec<String> = stuck.iter().map(Stuck::to_string).collect();
        panic!("`{}` was not checked and deadlocks: {}", schedule.name, stuck.join("; "))
    });
    let busy = ranks.iter().map(|spans| spans.iter().map(|span| costs.of(span.action)).sum()).collect();
    let ends = ranks.iter().filter_map(|spans| spans.last()).map(|span| span.end);
    let makespan = ends.fold(0.0, f64::max);
    Timeline { ranks, busy, makespan }
}
