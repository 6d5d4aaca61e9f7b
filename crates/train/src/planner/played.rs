//! Results of the dry run of a planned rank beside its plan: the time of its step on a machine, and live bytes over a step.

use phalanx_plan::trace::{Memory, PhaseName, Trace};
use phalanx_plan::{Coordinates, Lanes, Machine, PhaseTime, live_bytes, phase_lanes, phase_times};

use crate::engine::rank::Rank;
use crate::planner::dry_run::dry_run;
use crate::planner::planning::{RankPlan, RunPlan};

impl RunPlan {
    /// The time of a step on a machine, for one planned rank of each pipeline stage, which wait for each other; `None` where the machine
    /// lacks a rate that the step needs. The other ranks of a stage do the same.
    pub fn step_times(&self, machine: &Machine) -> Option<Vec<PhaseTime>> {
        let mesh = self.spec.mesh.axes;
        let of_stage = |pipeline| self.of(mesh.rank(Coordinates { pipeline, data: 0, tensor: 0 }));
        let trace = |plan: &RankPlan| dry_run(&self.spec, plan.rank, &Rank::new);
        let traces: Vec<Trace> = (0..mesh.pipeline).map(|pipeline| trace(of_stage(pipeline))).collect();
        phase_times(&traces.iter().collect::<Vec<_>>(), PhaseName::Step, machine)
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
