//! What a search asks of many runs before it plans one: the work of a replica that is not divided yet ([`ReplicaWork`]), from which times
//! of any mesh are estimated, and the plan of one rank of each pipeline stage with the step that they play together ([`RunPlan::appraised`]).

use std::collections::HashMap;

use phalanx_plan::trace::{Category, Event, Memory, PhaseName, Rate, Trace};
use phalanx_plan::{Coordinates, Cost, Machine, MemoryError, PhaseTime, category_peak, faults, phase_times};

use crate::engine::rank::Rank;
use crate::engine::rules::states_per_element;
use crate::engine::spec::Spec;
use crate::planner::dry_run::DryRuns;
use crate::planner::planning::{PlanError, RankPlan, RunPlan, parameters_at};

/// Equal calls of a kernel.
#[derive(Clone, Copy, Debug)]
struct Calls {
    name: &'static str,
    flops: u64,
    bytes: u64,
    rate: Rate,
    count: u64,
}

/// The work of a replica in a step of one micro-batch with one sequence, all of whose stages are on one pipeline rank.
#[derive(Clone, Debug)]
pub struct ReplicaWork {
    /// Kernels of the micro-batch.
    micro_batch: Vec<Calls>,
    /// Kernels behind it: norm and update.
    update: Vec<Calls>,
    /// Collectives of the tensor axis.
    tensor: Vec<phalanx_plan::trace::Collective>,
    /// The most bytes of activations at a time.
    pub activations: u64,
    /// Numbers that the optimizer keeps for each trained parameter.
    pub states: u64,
}

impl ReplicaWork {
    /// The work of `spec`, whose mesh has one pipeline rank and one replica, by a dry run of one rank.
    pub fn of(spec: &Spec) -> ReplicaWork {
        let runs = DryRuns::of(spec, &Rank::new).without_diagnosis();
        let trace = runs.short_trace(0);
        let step = trace.phase(PhaseName::Step).expect("every dry run has a step");
        let behind = step.events.iter().rposition(|event| matches!(event, Event::Step { .. }));
        let (program, update) = step.events.split_at(behind.unwrap_or(step.events.len()));
        let tensor = program.iter().filter_map(|event| match event {
            Event::Collective(collective) if collective.group == "tensor" => Some((**collective).clone()),
            _ => None,
        });
        ReplicaWork {
            micro_batch: calls(program),
            update: calls(update),
            tensor: tensor.collect(),
            states: states_per_element(&spec.update.optimizer, &spec.model.whole()),
            activations: category_peak(&trace, PhaseName::Step, Memory::Device, Category::Activations),
        }
    }

    /// Seconds of the kernels of a micro-batch of so many sequences.
    pub fn kernels_s(&self, machine: &Machine, sequences: u64) -> f64 {
        seconds(&self.micro_batch, machine, sequences)
    }

    /// Seconds of the collectives of the tensor axis in a micro-batch of so many sequences; `None` where no link joins its ranks.
    pub fn tensor_s(&self, machine: &Machine, sequences: u64) -> Option<f64> {
        let scaled = |of: &phalanx_plan::trace::Collective| {
            let mut of = of.clone();
            (of.count, of.sent_bytes) = (of.count * sequences, of.sent_bytes * sequences);
            machine.collective_s(&of)
        };
        self.tensor.iter().map(scaled).sum()
    }

    /// Seconds of the update of all parameters of the replica.
    pub fn update_s(&self, machine: &Machine) -> f64 {
        seconds(&self.update, machine, 1)
    }
}

fn seconds(calls: &[Calls], machine: &Machine, sequences: u64) -> f64 {
    let one = |of: &Calls| {
        of.count as f64 * machine.kernel_s(of.name, of.flops * sequences, of.bytes * sequences, of.rate)
    };
    calls.iter().map(one).sum()
}

fn calls(events: &[Event]) -> Vec<Calls> {
    let mut counts: HashMap<(&'static str, u64, u64, Rate), u64> = HashMap::new();
    for event in events {
        if let Event::Kernel { name, flops, bytes, rate, .. } = event {
            *counts.entry((name, *flops, *bytes, *rate)).or_default() += 1;
        }
    }
    let mut calls: Vec<Calls> = counts
        .into_iter()
        .map(|((name, flops, bytes, rate), count)| Calls { name, flops, bytes, rate, count })
        .collect();
    calls.sort_by_key(|calls| (calls.name, calls.flops, calls.bytes, calls.rate));
    calls
}

/// The time of a step: of one rank of each pipeline stage, which wait for each other.
pub type StepTimes = Option<Vec<PhaseTime>>;

impl RunPlan {
    /// The plan of one rank of each pipeline stage, without offsets and diagnosis, and the time of a step on a machine that these ranks play together;
    /// `None` where the machine lacks a rate. Other ranks of a stage may need a little more, and are not compared.
    ///
    /// # Errors
    /// The errors of [`RunPlan::new`], but for disagreements between ranks.
    pub fn appraised(spec: Spec, machine: &Machine) -> Result<(RunPlan, StepTimes), PlanError> {
        let (spec, _) = spec.with_chosen_chunks(&Rank::new);
        let spec = spec.with_placed_chunks(&Rank::new, 0)?;
        let mesh = spec.mesh.axes;
        let runs = DryRuns::of(&spec, &Rank::new).without_diagnosis();
        let whole = spec.model.whole();
        let (mut traces, mut ranks) = (Vec::new(), Vec::new());
        for pipeline in 0..mesh.pipeline {
            let rank = mesh.rank(Coordinates { pipeline, data: 0, tensor: 0 });
            let (short, all) = runs.short_and_whole(rank);
            let parameters = parameters_at(&spec, &whole, pipeline);
            // As much is live at once in both.
            let plan = RankPlan::of(&short, parameters).map(RankPlan::without_offsets);
            let trace = all.unwrap_or(short);
            let step = Cost::of(trace.phase(PhaseName::Step).expect("every dry run has a step"));
            ranks.push(plan.map(|plan| RankPlan { step, ..plan }));
            traces.push(timed(trace));
        }
        faults(&traces)?;
        let ranks = ranks.into_iter().collect::<Result<Vec<_>, MemoryError>>()?;
        let times = phase_times(&traces.iter().collect::<Vec<_>>(), PhaseName::Step, machine);
        Ok((RunPlan::of_ranks(spec, ranks, &whole), times))
    }
}

/// A trace with what a step's time reads.
fn timed(mut trace: Trace) -> Trace {
    for phase in &mut trace.phases {
        let is_step = phase.name == PhaseName::Step;
        phase.events.retain(|event| match event {
            Event::Collective(_) => true,
            Event::Alloc { .. }
            | Event::Free { .. }
            | Event::Use { .. }
            | Event::Counted { .. }
            | Event::Step { .. } => false,
            _ => is_step,
        });
        phase.events.shrink_to_fit();
    }
    trace
}
