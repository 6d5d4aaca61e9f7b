//! Results of the dry run of a planned rank beside its plan: the time of its step on a machine, and live bytes over a step.

use phalanx_plan::trace::{Memory, PhaseName, Trace};
use phalanx_plan::{Coordinates, Machine, PhaseTime, Stretch, live_bytes, phase_stretches, phase_times};

use crate::engine::rank::Rank;
use crate::planner::dry_run::{DryRuns, dry_run};
use crate::planner::planning::RunPlan;

impl RunPlan {
    /// The time of a step on a machine, for one planned rank of each pipeline stage, which wait for each other; `None` where the machine
    /// lacks a rate that the step needs. The other ranks of a stage do the same.
    pub fn step_times(&self, machine: &Machine) -> Option<Vec<PhaseTime>> {
        let traces = self.traces_of_stages();
        phase_times(&traces.iter().collect::<Vec<_>>(), PhaseName::Step, machine)
    }

    /// What the streams of the same ranks do in a step, by rank.
    pub fn step_stretches(&self, machine: &Machine) -> Option<Vec<(usize, Vec<Stretch>)>> {
        let traces = self.traces_of_stages();
        let all = phase_stretches(&traces.iter().collect::<Vec<_>>(), PhaseName::Step, machine)?;
        Some(traces.iter().map(|trace| trace.rank).zip(all).collect())
    }

    /// Traces of one planned rank of each pipeline stage.
    fn traces_of_stages(&self) -> Vec<Trace> {
        let mesh = self.spec.mesh.axes;
        let of_stage = |pipeline| self.of(mesh.rank(Coordinates { pipeline, data: 0, tensor: 0 }));
        let runs = DryRuns::of(&self.spec, &Rank::new).without_diagnosis();
        (0..mesh.pipeline).map(|pipeline| runs.trace(of_stage(pipeline).rank)).collect()
    }

    /// Bytes that a planned rank has in a memory over a step: at its beginning, and after each allocation and free.
    pub fn live_bytes(&self, rank: usize, memory: Memory) -> Vec<u64> {
        let own = self.of(rank);
        live_bytes(&dry_run(&self.spec, own.rank, &Rank::new), PhaseName::Step, memory)
    }
}
