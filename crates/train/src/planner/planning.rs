//! The dry run of every rank, and what is decided from it before the first step.
//!
//! Each rank's init, step, diagnosis, evaluation, loading and saving run on `Meta`. Under ZeRO 1 to 3, step and
//! evaluation run once before, to record in which order blocks use chunks. From the trace come arena offsets and
//! peaks (`plan::memory`), the proof that all ranks start the same collectives and that none is missing or misplaced
//! (`plan::agreement`), and the cost of a step (`plan::cost`). The same [`Rank`] then trains. In a large world only one
//! rank of each pipeline stage runs dry; its plan stands for the other ranks of the stage.

use std::borrow::Cow;
use std::ops::Range;

use phalanx_layers::{Network, ParameterSpec};
use phalanx_parallel::zero::{ChunkResidence, Residence};
use phalanx_plan::trace::{Event, Memory, PhaseName, Trace};
use phalanx_plan::{
    ChunkSize, Coordinates, Cost, Disagreement, MemoryError, PlacementError, Textbook, compare, faults,
    textbook,
};
use phalanx_tensor::DType;
use serde::{Deserialize, Serialize};

use crate::config::PlacementRule;
use crate::config::bounds::ALL_RANKS;
use crate::engine::error::ProgramError;
use crate::engine::rank::Rank;
use crate::engine::rules::states_per_element;
use crate::engine::spec::Spec;
pub use crate::planner::budget::BudgetError;
pub use crate::planner::chunk_choice::TriedChunks;
use crate::planner::chunk_programs::ChunkPrograms;
pub use crate::planner::dry_run::MakeRank;
use crate::planner::dry_run::{DryRuns, dry_run, on_meta};
pub use crate::planner::rank_plan::RankPlan;

/// The plan of a run.
pub struct RunPlan {
    /// The specification that was planned.
    pub spec: Spec,
    /// The planned ranks in ascending order: all of them; in a large world one rank of each pipeline stage, which
    /// stands for the other ranks of the stage; in the process of one rank ([`RunPlan::of_one_rank`]) that rank
    /// alone.
    pub ranks: Vec<RankPlan>,
    totals: Totals,
    /// The memory of the rank with most parameters, by the formulas of the papers.
    pub textbook: Textbook,
    /// The chunk sizes that were planned to choose that of `spec`.
    pub tried_chunks: Vec<TriedChunks>,
}

/// Sums and maxima over all ranks of a run, which a rank cannot know from its own plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Number of those that are trained.
    pub trained: u64,
    /// Number of parameters, by their bytes, and of those that are trained, of the rank that has most.
    pub rank_parameters_max: [u64; 2],
    /// Bytes of the largest arena.
    pub arena_bytes_max: u64,
    /// Floating-point operations of one step. For 10^12 parameters they exceed 64 bits.
    pub flops_per_step: u128,
    /// Floating-point operations of one step, without recomputation.
    pub model_flops_per_step: u128,
    /// Bytes sent in one step.
    pub collective_bytes_per_step: u64,
}

/// Part of the plan that the launcher sends to every rank, beside its [`RankPlan`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanForAllRanks {
    /// For each pipeline stage: its blocks; the head counts as the last block.
    pub stages: Vec<Range<usize>>,
    /// Size of chunks; for `auto` in the configuration, the choice of the plan.
    pub chunks: ChunkSize,
    /// For each pipeline stage: the memories of its chunks.
    pub residence: Vec<Residence>,
    /// Number of threads of a rank.
    pub threads: usize,
    /// Number of windows of one evaluation, over all ranks.
    pub evaluated: usize,
    /// Sums and maxima over all ranks.
    pub totals: Totals,
}

/// Why no plan was made.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// Ranks would start different collectives.
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    /// A collective is missing, doubled or misplaced: a bug of the engine, or of a custom model.
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
    /// The programs of a rank's chunks are wrong.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A budget is too small for any placement of chunks.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// The trace cannot be placed: a bug of the engine.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl RunPlan {
    /// Runs every rank dry, or in a large world one rank of each pipeline stage.
    ///
    /// # Errors
    /// When ranks disagree, a collective is wrong, or a phase does not free what it must.
    pub fn new(spec: Spec) -> Result<RunPlan, PlanError> {
        RunPlan::with_ranks(spec, &Rank::new)
    }

    /// Like [`RunPlan::new`], for engines that `make_rank` makes: with groups or layers of the caller.
    ///
    /// # Errors
    /// The errors of [`RunPlan::new`].
    pub fn with_ranks(spec: Spec, make_rank: &MakeRank) -> Result<RunPlan, PlanError> {
        RunPlan::of_dry_runs(spec, make_rank, true, |plan| plan)
    }

    /// Like [`RunPlan::new`], without the offsets of allocations: for a plan that is only looked at.
    ///
    /// # Errors
    /// The errors of [`RunPlan::new`].
    pub fn without_offsets(spec: Spec) -> Result<RunPlan, PlanError> {
        RunPlan::of_dry_runs(spec, &Rank::new, true, RankPlan::without_offsets)
    }

    /// Like [`RunPlan::new`], from dry runs of every micro-batch: what tests compare with.
    ///
    /// # Errors
    /// The errors of [`RunPlan::new`].
    pub fn unabridged(spec: Spec) -> Result<RunPlan, PlanError> {
        RunPlan::of_dry_runs(spec, &Rank::new, false, |plan| plan)
    }

    /// The refusal `error` of a plan of `spec`, with budgets that do: they were planned.
    pub fn with_budgets_that_do(spec: &Spec, error: BudgetError) -> BudgetError {
        let PlacementRule::Auto(given) = spec.placement else { return error };
        error.with_budgets_that_do(given, |auto| {
            let raised = Spec { placement: PlacementRule::Auto(auto), ..spec.clone() };
            match RunPlan::without_offsets(raised) {
                Err(PlanError::Budget(error)) => Err(error),
                // Other errors are faults of the engine, and not of a budget.
                Ok(_) | Err(_) => Ok(()),
            }
        })
    }

    fn of_dry_runs(
        spec: Spec,
        make_rank: &MakeRank,
        abridges: bool,
        keep: fn(RankPlan) -> RankPlan,
    ) -> Result<RunPlan, PlanError> {
        let (spec, tried_chunks) = spec.with_chosen_chunks(make_rank);
        let mut reserve = 0;
        loop {
            let placed = spec.clone().with_placed_chunks(make_rank, reserve)?;
            let plan = RunPlan::of_placed(placed, make_rank, abridges, keep)?;
            match plan.excess() {
                0 => return Ok(RunPlan { tried_chunks, ..plan }),
                excess => reserve += excess,
            }
        }
    }

    /// Bytes by which the largest rank exceeds the device budget of `placement = "auto"`. A placement is decided on one rank
    /// of each pipeline coordinate; others may differ by a little.
    fn excess(&self) -> u64 {
        match self.spec.placement {
            PlacementRule::Auto(auto) => self.arena_bytes_max().saturating_sub(auto.usable_bytes()),
            PlacementRule::Uniform(_) | PlacementRule::Fractions(_) => 0,
        }
    }

    fn of_placed(
        spec: Spec,
        make_rank: &MakeRank,
        abridges: bool,
        keep: fn(RankPlan) -> RankPlan,
    ) -> Result<RunPlan, PlanError> {
        let mesh = spec.mesh.axes;
        let first_of = |pipeline| mesh.rank(Coordinates { pipeline, data: 0, tensor: 0 });
        let kinds: Vec<usize> = (0..mesh.pipeline).map(first_of).collect();
        let runs = DryRuns::of(&spec, make_rank).abridging(abridges);
        let programs = |rank: &usize| on_meta(&spec, *rank, make_rank).1.chunk_programs();
        let programs: Vec<ChunkPrograms> = kinds.iter().map(programs).collect::<Result<_, _>>()?;
        let all = mesh.world_size() <= ALL_RANKS;
        let traced = if all { (0..mesh.world_size()).collect() } else { kinds };
        let whole = spec.model.whole();
        let (mut traces, mut plans) = (Vec::new(), Vec::new());
        let mut placed = Placed::default();
        for rank in traced {
            let pipeline = mesh.coordinates(rank).pipeline;
            let trace = runs.trace(rank);
            let parameters = parameters_at(&spec, &whole, pipeline);
            // Ranks of different stages seldom allocate the same.
            let plan = match all {
                true => placed.plan(&trace, parameters),
                false => RankPlan::of(&trace, parameters),
            };
            let programs = Some(programs[pipeline].agreement());
            plans.push(plan.map(|plan| keep(RankPlan { programs, ..plan })));
            traces.push(without_memory(trace));
        }
        faults(&traces)?;
        compare(&traces)?;
        if all {
            check_counted(&spec, &traces)?;
        }
        let ranks = plans.into_iter().collect::<Result<Vec<_>, MemoryError>>()?;
        Ok(RunPlan::of_ranks(spec, ranks, &whole))
    }

    /// Makes the plan of a run from the plans of its ranks.
    pub fn of_ranks(spec: Spec, ranks: Vec<RankPlan>, whole: &Network) -> RunPlan {
        let each = (spec.world_size() / ranks.len()) as u128;
        let sum = |of: &dyn Fn(&Cost) -> u64| {
            ranks.iter().map(|rank| u128::from(of(&rank.step))).sum::<u128>() * each
        };
        let max = |of: &dyn Fn(&RankPlan) -> u64| ranks.iter().map(of).max().unwrap_or(0);
        let totals = Totals {
            parameters: whole.elements() as u64,
            trained: whole.parameters.iter().filter(|p| p.trained).map(|p| p.elements() as u64).sum(),
            rank_parameters_max: [0, 1].map(|which| max(&|rank| rank.parameters[which])),
            arena_bytes_max: max(&|rank| rank.memory.arena_bytes),
            flops_per_step: sum(&|step| step.flops),
            model_flops_per_step: sum(&Cost::model_flops),
            collective_bytes_per_step: sum(&|step| step.sent_bytes) as u64,
        };
        RunPlan::with_totals(spec, ranks, totals)
    }

    fn with_totals(spec: Spec, ranks: Vec<RankPlan>, totals: Totals) -> RunPlan {
        let textbook = textbook_of(&spec, totals.rank_parameters_max);
        RunPlan { ranks, totals, textbook, spec, tried_chunks: Vec::new() }
    }

    /// The plan in the process of one rank, which receives it from the launcher: `spec` with the stages of the plan,
    /// the totals, and the rank's own plan.
    pub fn of_one_rank(spec: Spec, totals: Totals, own: RankPlan) -> RunPlan {
        RunPlan::with_totals(spec, vec![own], totals)
    }

    /// Part of the plan that the launcher sends to every rank, beside its [`RankPlan`].
    pub fn for_all_ranks(&self) -> PlanForAllRanks {
        let Spec { mesh, zero, device, batch, .. } = &self.spec;
        PlanForAllRanks {
            stages: mesh.stages.clone(),
            chunks: mesh.chunk_size.clone(),
            residence: zero.residence.clone(),
            threads: device.threads,
            evaluated: batch.evaluated,
            totals: self.totals,
        }
    }

    /// The exact plan of a rank. If another rank was planned in its place, it runs dry here, since its parts may be
    /// smaller where parts are uneven.
    ///
    /// # Errors
    /// The errors of [`RunPlan::new`].
    pub fn exact(&self, rank: usize) -> Result<Cow<'_, RankPlan>, PlanError> {
        let like = self.of(rank);
        if like.rank == rank {
            return Ok(Cow::Borrowed(like));
        }
        let trace = dry_run(&self.spec, rank, &Rank::new);
        faults(std::slice::from_ref(&trace))?;
        Ok(Cow::Owned(RankPlan::of(&trace, like.parameters)?))
    }

    /// The plan of a rank, or of the rank that was planned in its place.
    pub fn of(&self, rank: usize) -> &RankPlan {
        let pipeline = |rank| self.spec.mesh.axes.coordinates(rank).pipeline;
        let exact = self.ranks.iter().find(|plan| plan.rank == rank);
        let like = || self.ranks.iter().find(|plan| pipeline(plan.rank) == pipeline(rank));
        exact.or_else(like).expect("a rank of each pipeline stage was run dry")
    }

    /// Number of parameters of the model.
    pub fn parameters(&self) -> u64 {
        self.totals.parameters
    }

    /// Number of its trained parameters.
    pub fn trained_parameters(&self) -> u64 {
        self.totals.trained
    }

    /// Bytes of the largest arena.
    pub fn arena_bytes_max(&self) -> u64 {
        self.totals.arena_bytes_max
    }

    /// Floating-point operations of one step over all ranks.
    pub fn flops_per_step(&self) -> u128 {
        self.totals.flops_per_step
    }

    /// Floating-point operations of one step, without recomputation.
    pub fn model_flops_per_step(&self) -> u128 {
        self.totals.model_flops_per_step
    }

    /// Bytes that all ranks together send in one step.
    pub fn collective_bytes_per_step(&self) -> u64 {
        self.totals.collective_bytes_per_step
    }
}

/// The formulas of the papers for a rank with so many parameters, and so many that are trained.
fn textbook_of(spec: &Spec, parameters: [u64; 2]) -> Textbook {
    let states = states_per_element(&spec.update.optimizer, &spec.model.whole());
    let textbook =
        textbook(parameters, spec.mesh.axes.data as u64, spec.zero.stage, spec.precision.types, states);
    let keeps_none = spec.zero.gradients_in_place || spec.zero.update_in_backward;
    if keeps_none { textbook.with_gradients_in_place() } else { textbook }
}

/// Bytes of parameters, gradients and optimizer states that the rank with most parameters has in device memory, by the
/// formulas of the papers: its plan needs no less. No rank runs dry for it.
pub fn min_device_states(spec: &Spec) -> u64 {
    let whole = spec.model.whole();
    let stages = 0..spec.mesh.axes.pipeline;
    let of_stages: Vec<[u64; 2]> = stages.map(|stage| parameters_at(spec, &whole, stage)).collect();
    let parameters = [0, 1].map(|which| of_stages.iter().map(|of| of[which]).max().unwrap_or(0));
    let state = textbook_of(spec, parameters).state;
    let described = || spec.zero.residence.iter().flat_map(Residence::described);
    let is_decided = matches!(spec.placement, PlacementRule::Uniform(_));
    let here = |of: fn(&ChunkResidence) -> Memory, bytes: u64| {
        if is_decided && described().all(|chunk| of(&chunk) == Memory::Device) { bytes } else { 0 }
    };
    here(|chunk| chunk.gradients, state.gradients)
        + here(|chunk| chunk.parameters, state.parameters)
        + here(|chunk| chunk.optimizer, state.optimizer)
}

/// Elements of the type of computing with as many bytes as a parameter has: fewer than it has where it is frozen and kept in blocks.
pub fn elements_as_kept(parameter: &ParameterSpec, compute: DType) -> u64 {
    let elements = parameter.elements();
    parameter.kept.map_or(elements, |kept| kept.bytes_of(elements) / compute.bytes()) as u64
}

/// Number of parameters, by their bytes ([`elements_as_kept`]), and of those that are trained, on each rank of one pipeline stage.
pub fn parameters_at(spec: &Spec, whole: &Network, pipeline: usize) -> [u64; 2] {
    let (mesh, placement) = (&spec.mesh, &spec.pipeline.schedule.placement);
    let stages = mesh.stages.iter().zip(placement).filter(|(_, at)| **at == pipeline);
    let mut sums = [0; 2];
    for (blocks, _) in stages {
        let mut used: Vec<usize> = whole.uses[blocks.clone()].concat();
        used.sort_unstable();
        used.dedup();
        for parameter in used.iter().map(|p| &whole.parameters[*p]) {
            sums[0] += elements_as_kept(parameter, spec.precision.types.compute);
            sums[1] += parameter.elements() as u64 * u64::from(parameter.trained);
        }
    }
    sums.map(|sum| sum / mesh.axes.tensor as u64)
}

/// The allocations and frees of a trace, phase by phase.
fn memory_events(trace: &Trace) -> Vec<(PhaseName, Vec<&Event>)> {
    let is_memory = |event: &&Event| matches!(event, Event::Alloc { .. } | Event::Free { .. });
    trace.phases.iter().map(|phase| (phase.name, phase.events.iter().filter(is_memory).collect())).collect()
}

/// A trace without what only the memory plan and the cost read: the rest is compared with other ranks.
fn without_memory(mut trace: Trace) -> Trace {
    for phase in &mut trace.phases {
        phase.events.retain(|event| matches!(event, Event::Collective(_) | Event::Counted { .. }));
        phase.events.shrink_to_fit();
    }
    trace
}

/// The last trace whose allocations were placed. Ranks that allocate the same have the same offsets.
#[derive(Default)]
struct Placed(Option<(Trace, RankPlan)>);

impl Placed {
    fn plan(&mut self, trace: &Trace, parameters: [u64; 2]) -> Result<RankPlan, MemoryError> {
        if let Some((last, like)) = &self.0
            && memory_events(last) == memory_events(trace)
        {
            let step = Cost::of(trace.phase(PhaseName::Step).expect("every dry run has a step"));
            return Ok(RankPlan { rank: trace.rank, step, parameters, ..like.clone() });
        }
        let plan = RankPlan::of(trace, parameters)?;
        self.0 = Some((trace.clone(), plan.clone()));
        Ok(plan)
    }
}

/// Checks that the norm counts each element of each trained parameter once, over all ranks.
fn check_counted(spec: &Spec, traces: &[Trace]) -> Result<(), PlanError> {
    // Which parameters are joined is the same on all ranks, and may differ from a network of one rank.
    let network = spec.network_of(0);
    let mut counted = vec![0u64; network.parameters.len()];
    for event in
        traces.iter().filter_map(|trace| trace.phase(PhaseName::Step)).flat_map(|phase| &phase.events)
    {
        if let Event::Counted { parameter, elements } = event {
            counted[*parameter as usize] += elements;
        }
    }
    for (spec, counted) in network.parameters.iter().zip(counted) {
        let whole = spec.members().iter().map(|member| member.whole_shape().iter().product::<usize>());
        let expected = if spec.trained { whole.sum::<usize>() as u64 } else { 0 };
        if counted != expected {
            return Err(PlanError::Counted { parameter: spec.name.clone(), expected, counted });
        }
    }
    Ok(())
}
