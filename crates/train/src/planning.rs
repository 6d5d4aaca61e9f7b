//! The dry run of every rank, and what is decided from it before the first step.
//!
//! Each rank's init, step, diagnosis, evaluation, loading and saving run on `Meta`. Where ranks share what they hold
//! (ZeRO 1 to 3), step and evaluation run once before, to learn in which order blocks need chunks. From the trace
//! come arena offsets and peaks (`plan::memory`), the proof that all ranks say the same to each other and that every collective is where it
//! belongs (`plan::agreement`), and what the step costs (`plan::cost`). The same [`Rank`] then trains. Of a large
//! world one rank of each place in the pipeline stands for its like.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use phalanx_layers::Network;
use phalanx_plan::{
    Coordinates, Cost, Disagreement, MemoryError, MemoryPlan, Peak, PlacementError, Stage, Textbook, compare,
    faults, plan_memory, textbook, use_order,
};
use phalanx_tensor::Device;
use phalanx_trace::{Event, StaticName, Trace, interned_keys};
use serde::{Deserialize, Serialize};

use crate::groups::{Groups, Source};
use crate::rank::{Batch, Rank};
use crate::spec::Spec;

/// The plan of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankPlan {
    /// The rank. It is not written, so that ranks with equal plans can share what is: the reader sets it.
    #[serde(skip)]
    pub rank: usize,
    /// Offsets and peaks.
    pub memory: MemoryPlan,
    /// For each phase: chunks in order of use.
    #[serde(deserialize_with = "interned_keys")]
    pub orders: BTreeMap<StaticName, Vec<u32>>,
    /// Cost of one step.
    pub step: Cost,
    /// Trained numbers that are here, whole or in part.
    pub parameters: u64,
}

impl RankPlan {
    pub(crate) fn of(
        trace: &Trace,
        orders: BTreeMap<&'static str, Vec<u32>>,
        parameters: u64,
    ) -> Result<RankPlan, MemoryError> {
        let step = Cost::of(trace.phase("step").expect("every dry run has a step"));
        Ok(RankPlan { rank: trace.rank, memory: plan_memory(trace)?, orders, step, parameters })
    }

    /// The peak of a run in which nothing goes wrong: a diagnosis, of the tensors of a step, is planned, too, and its
    /// tensors may pack a little worse.
    pub fn peak(&self) -> Peak {
        let phases = self.memory.phases.iter().filter(|phase| phase.name != "diagnose");
        let larger = |most: Peak, peak: Peak| if peak.bytes > most.bytes { peak } else { most };
        phases.map(|phase| phase.peak).fold(Peak::default(), larger)
    }
}

/// The plan of a run.
pub struct RunPlan {
    /// What was planned.
    pub spec: Spec,
    /// The planned ranks in ascending order: all of them; in a large world one rank of each pipeline stage, which
    /// stands for its like; in the process of one rank ([`RunPlan::of_one_rank`]) that rank alone.
    pub ranks: Vec<RankPlan>,
    totals: Totals,
    /// What papers say the rank with most parameters holds.
    pub textbook: Textbook,
}

/// Sums and maxima over all ranks of a run, which a rank cannot know from its own plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Trained numbers of the model.
    pub parameters: u64,
    /// Trained numbers of the rank that has most.
    pub rank_parameters_max: u64,
    /// Bytes of the largest arena.
    pub arena_bytes_max: u64,
    /// Floating-point operations of one step. Those of 10^12 parameters exceed 64 bits.
    pub flops_per_step: u128,
    /// The same without what is computed again.
    pub model_flops_per_step: u128,
    /// Bytes sent in one step.
    pub collective_bytes_per_step: u64,
}

/// The part of a plan that all ranks need, beside the [`RankPlan`] of each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SharedPlan {
    /// For each pipeline stage: its blocks, the head counting as the last.
    pub stages: Vec<Range<usize>>,
    /// Threads of a rank.
    pub threads: usize,
    /// Windows of one evaluation over all ranks.
    pub evaluated: usize,
    /// Sums and maxima over all ranks.
    pub totals: Totals,
}

/// Why no plan was made.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// Ranks would not say the same to each other.
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    /// A collective is missing, doubled or misplaced: a bug of the engine, or of a model of one's own.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// A gradient would be counted in the norm more or less than once.
    #[error(
        "the gradient norm counts {counted} elements of {parameter}, which has {expected}: every replica but one \
         must leave it out"
    )]
    Counted {
        /// The parameter.
        parameter: String,
        /// Elements that it has.
        expected: u64,
        /// Elements that ranks count, in all.
        counted: u64,
    },
    /// The trace cannot be placed: a bug of the engine.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Most ranks that are all run dry; of more, one of each place in the pipeline.
pub(crate) const ALL_RANKS: usize = 16;

impl RunPlan {
    /// Runs every rank dry, or one of each kind.
    ///
    /// # Errors
    /// When the ranks disagree, a collective is wrong, or a phase keeps what it must give back.
    pub fn new(spec: Spec) -> Result<RunPlan, PlanError> {
        let mesh = spec.mesh;
        let first_of = |pipeline| mesh.rank(Coordinates { pipeline, data: 0, tensor: 0 });
        let kinds: Vec<usize> = (0..mesh.pipeline).map(first_of).collect();
        // Where every rank holds everything, nothing is fetched, and no order is needed to trace the rank.
        let learns = spec.stage != Stage::Zero;
        let orders: Vec<Orders> = kinds
            .iter()
            .map(|rank| if learns { orders_of(&learning_run(&spec, *rank)) } else { Orders::new() })
            .collect();
        let all = mesh.world() <= ALL_RANKS;
        let traced = if all { (0..mesh.world()).collect() } else { kinds };
        let of = |rank: &usize| dry_run(&spec, *rank, &orders[mesh.coordinates(*rank).pipeline]);
        let traces: Vec<Trace> = traced.iter().map(of).collect();
        faults(&traces)?;
        compare(&traces)?;
        let whole = spec.whole();
        if all {
            check_counted(&whole, &traces)?;
        }
        let plan = |trace: &Trace| {
            let pipeline = mesh.coordinates(trace.rank).pipeline;
            let orders = if learns { orders[pipeline].clone() } else { orders_of(trace) };
            RankPlan::of(trace, orders, parameters_at(&spec, &whole, pipeline))
        };
        let ranks = traces.iter().map(plan).collect::<Result<Vec<_>, MemoryError>>()?;
        Ok(RunPlan::of_ranks(spec, ranks, &whole))
    }

    /// From the plans of its ranks.
    pub(crate) fn of_ranks(spec: Spec, ranks: Vec<RankPlan>, whole: &Network) -> RunPlan {
        let each = (spec.world() / ranks.len()) as u128;
        let sum = |of: &dyn Fn(&Cost) -> u64| {
            ranks.iter().map(|rank| u128::from(of(&rank.step))).sum::<u128>() * each
        };
        let max = |of: &dyn Fn(&RankPlan) -> u64| ranks.iter().map(of).max().unwrap_or(0);
        let totals = Totals {
            parameters: whole.elements() as u64,
            rank_parameters_max: max(&|rank| rank.parameters),
            arena_bytes_max: max(&|rank| rank.memory.arena_bytes),
            flops_per_step: sum(&|step| step.flops),
            model_flops_per_step: sum(&Cost::model_flops),
            collective_bytes_per_step: sum(&|step| step.sent_bytes) as u64,
        };
        RunPlan::with_totals(spec, ranks, totals)
    }

    fn with_totals(spec: Spec, ranks: Vec<RankPlan>, totals: Totals) -> RunPlan {
        let replicas = spec.mesh.data as u64;
        let textbook = textbook(totals.rank_parameters_max, replicas, spec.stage, spec.precision);
        RunPlan { ranks, totals, textbook, spec }
    }

    /// The plan as the process of one rank has it, which did not make it: `spec` with the stages of the plan, the
    /// totals, and the rank's own plan.
    pub fn of_one_rank(spec: Spec, totals: Totals, own: RankPlan) -> RunPlan {
        RunPlan::with_totals(spec, vec![own], totals)
    }

    /// What all ranks need of this plan, beside the plan of each.
    pub fn shared(&self) -> SharedPlan {
        let Spec { stages, threads, evaluation_batches, micro, mesh, .. } = &self.spec;
        let evaluated = evaluation_batches * micro * mesh.data;
        SharedPlan { stages: stages.clone(), threads: *threads, evaluated, totals: self.totals }
    }

    /// The exact plan of a rank. A rank for which another stands is run dry here: its parts may be smaller, where parts
    /// are uneven.
    ///
    /// # Errors
    /// As [`RunPlan::new`].
    pub fn exact(&self, rank: usize) -> Result<Cow<'_, RankPlan>, PlanError> {
        let like = self.of(rank);
        if like.rank == rank {
            return Ok(Cow::Borrowed(like));
        }
        let trace = dry_run(&self.spec, rank, &like.orders);
        faults(std::slice::from_ref(&trace))?;
        Ok(Cow::Owned(RankPlan::of(&trace, like.orders.clone(), like.parameters)?))
    }

    /// The plan of a rank, or of the one that stands for it.
    pub fn of(&self, rank: usize) -> &RankPlan {
        let pipeline = |rank| self.spec.mesh.coordinates(rank).pipeline;
        let exact = self.ranks.iter().find(|plan| plan.rank == rank);
        let like = || self.ranks.iter().find(|plan| pipeline(plan.rank) == pipeline(rank));
        exact.or_else(like).expect("a rank of each pipeline stage was run dry")
    }

    /// Trained numbers of the model.
    pub fn parameters(&self) -> u64 {
        self.totals.parameters
    }

    /// Bytes of the largest arena.
    pub fn arena_bytes_max(&self) -> u64 {
        self.totals.arena_bytes_max
    }

    /// Floating-point operations of one step over all ranks.
    pub fn flops_per_step(&self) -> u128 {
        self.totals.flops_per_step
    }

    /// The same without what is computed again.
    pub fn model_flops_per_step(&self) -> u128 {
        self.totals.model_flops_per_step
    }

    /// Bytes that all ranks together send in one step.
    pub fn collective_bytes_per_step(&self) -> u64 {
        self.totals.collective_bytes_per_step
    }
}

/// Trained numbers on a rank of one place in the pipeline.
pub(crate) fn parameters_at(spec: &Spec, whole: &Network, pipeline: usize) -> u64 {
    let stages = spec.stages.iter().zip(&spec.schedule.placement).filter(|(_, at)| **at == pipeline);
    let mut sum = 0;
    for (blocks, _) in stages {
        let mut used: Vec<usize> = whole.uses[blocks.clone()].concat();
        used.sort_unstable();
        used.dedup();
        sum += used.iter().map(|p| whole.parameters[*p].elements() as u64).sum::<u64>();
    }
    sum / spec.mesh.tensor as u64
}

/// The norm counts each element of each parameter once, over all ranks.
fn check_counted(whole: &Network, traces: &[Trace]) -> Result<(), PlanError> {
    let mut counted = vec![0u64; whole.parameters.len()];
    for event in traces.iter().filter_map(|trace| trace.phase("step")).flat_map(|phase| &phase.events) {
        if let Event::Counted { parameter, elements } = event {
            counted[*parameter as usize] += elements;
        }
    }
    for (spec, counted) in whole.parameters.iter().zip(counted) {
        let expected = spec.elements() as u64;
        if counted != expected {
            return Err(PlanError::Counted { parameter: spec.name.clone(), expected, counted });
        }
    }
    Ok(())
}

/// By phase: chunks in order of use.
type Orders = BTreeMap<&'static str, Vec<u32>>;

fn orders_of(trace: &Trace) -> Orders {
    ["step", "evaluate"].map(|phase| (phase, use_order(trace, phase))).into()
}

/// A rank on `Meta`.
fn on_meta(spec: &Spec, rank: usize, orders: &Orders) -> (Device, Rank) {
    let device = Device::meta(spec.threads);
    let recorder = Arc::clone(device.recorder().expect("Meta records"));
    let groups = Groups::new(&Source::Meta(recorder, rank), spec);
    let engine = Rank::new(device.clone(), groups, spec, orders);
    (device, engine)
}

/// What of one rank's life uses chunks in an order that has to be learned.
fn learning_run(spec: &Spec, rank: usize) -> Trace {
    let (device, mut engine) = on_meta(spec, rank, &Orders::new());
    let never = "nothing fails on Meta";
    engine.load(|_, _, _, _, _| Ok(())).expect(never);
    engine.step(1, &Batch::with_rows(spec.micro * spec.micro_batches, spec.seq), false).expect(never);
    if spec.evaluation_batches > 0 {
        let windows = Batch::with_rows(spec.micro * spec.evaluation_batches, spec.seq);
        engine.evaluate(&windows).expect(never);
    }
    device.take_trace(rank)
}

/// One rank's life on `Meta`.
fn dry_run(spec: &Spec, rank: usize, orders: &Orders) -> Trace {
    let (device, mut engine) = on_meta(spec, rank, orders);
    let batch = Batch::with_rows(spec.micro * spec.micro_batches, spec.seq);
    let windows = Batch::with_rows(spec.micro * spec.evaluation_batches, spec.seq);
    let never = "nothing fails on Meta";
    engine.load(|_, _, _, _, _| Ok(())).expect(never);
    engine.step(1, &batch, false).expect(never);
    engine.diagnose(1, &batch, 1.0).expect(never);
    if spec.evaluation_batches > 0 {
        engine.evaluate(&windows).expect(never);
    }
    engine.save(|_, _| Ok(())).expect(never);
    engine.report(|_| Ok(())).expect(never);
    device.take_trace(rank)
}
