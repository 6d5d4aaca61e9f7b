//! Results of the dry run of a planned rank beside its plan: the time of its step on a machine, and live bytes over a step.

use phalanx_plan::trace::{Memory, PhaseName};
use phalanx_plan::{Lanes, Machine, PhaseTime, live_bytes, phase_lanes, phase_time};

use crate::engine::rank::Rank;
use crate::planner::dry_run::dry_run;
use crate::planner::planning::{RankPlan, RunPlan};

impl RunPlan {
    /// The time of a step on a machine, for each planned rank; `None` where the machine lacks a rate that the step needs.
    pub fn step_times(&self, machine: &Machine) -> Vec<Option<PhaseTime>> {
        let time = |plan: &RankPlan| {
            let trace = dry_run(&self.spec, plan.rank, &Rank::new);
            phase_time(&trace, PhaseName::Step, machine)
        };
        self.ranks.iter().map(time).collect()
    }

    /// When each stream of a planned rank works in a step on a machine; `None` where the machine lacks a rate.
    pub fn step_lanes(&self, rank: usize, machine: &Machine) -> Option<Lanes> {
        let own = self.of(rank);
        phase_lanes(&dry_run(&self.spec, own.rank, &Rank::new), PhaseName::Step, machine)
    }

    /// Bytes that a planned rank has in a memory over a step: at its beginning, and after each allocation and free.
    pub fn live_bytes(&self, rank: usize, memory: Memory) -> Vec<u64> {
        let own = self.of(rank);
        live_bytes(&dry_run(&self.spec, own.rank, &Rank::new), PhaseName::Step, memory)
    }
}
