//! ZeRO 0 to 3 over chunks (Rajbhandari et al., arXiv 1910.02054; chunks as in Colossal-AI's Gemini).
//!
//! | stage | parameters | gradients | optimizer | step on |
//! |---|---|---|---|---|
//! | 0 | whole | whole | whole | whole |
//! | 1 | whole | whole until reduced | shard | shard |
//! | 2 | whole | shard | shard | shard |
//! | 3 | shard | shard | shard | shard |
//!
//! The stages differ only in what each rank stores. All of them reduce along the same tree, compute norms over the same
//! blocks and update element by element, so parameters and states are equal bit for bit. Gradients, optimizer states and, under stage 3,
//! parameters may lie in host memory or on disk between their uses (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857).
//!
//! What happens to chunks in a phase is data: a program ([`mod@phalanx_plan::program`]) of actions on named buffers, which has all decisions
//! about stages, memories, look-ahead and order. [`Chunks`] holds the buffers of a rank and executes its programs (`executor`).
//!
//! A chunk holds trained parameters, or frozen ones. Frozen chunks come last; they are stored and gathered like others (those in blocks as
//! words), and have no gradients, optimizer states or master weights.
//!
//! Parameters are stored, gathered and published in the compute type. When that type has 16 bits, the optimizer updates
//! f32 master weights, which are stored with the optimizer states, and rounds them in the same pass.

mod executor;
mod held;
mod map;
mod reading;
mod rules;
mod spans;
mod sums;
mod updates;
mod views;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use phalanx_collectives::Group;
use phalanx_layers::Network;
use phalanx_optim::{Optimizer, RatesByName};
use phalanx_plan::pipeline::Step;
use phalanx_plan::program::{
    Buffer, BufferSpec, PHASES, Policies, Program, RankChunks, Role, Span, TiedChunks, Token,
};
use phalanx_plan::trace::{Axis, Placement};
use phalanx_plan::{ChunkLayout, Precision, ZeroStage};
use phalanx_tensor::{Category, Clip, DType, Device, Memory, Tensor};

use executor::Flight;
use held::Held;
pub use map::{ChunkResidence, Residence};
pub use rules::updated;
pub use spans::{Selection, StateSpan};
pub use updates::{NotFinite, Update};

/// Options of [`Chunks`]. Only `defer` and `delayed_update` change bits of the result.
#[derive(Clone, Debug)]
pub struct Options {
    /// ZeRO stage: which of parameters, gradients and states are sharded.
    pub stage: ZeroStage,
    /// True if communication overlaps computation.
    pub overlap: bool,
    /// Chunks gathered ahead of their use (stage 3).
    pub prefetch: usize,
    /// Reduce once after the last micro-batch instead of after each.
    pub defer: bool,
    /// For each pipeline stage: the memories in which the parts of its chunks lie between their uses.
    pub residence: Vec<Residence>,
    /// Elements of the largest tile of what lies where an update cannot reach it; a multiple of the norm's block.
    pub buffer: usize,
    /// True if the host updates the chunks whose optimizer states lie in memory that kernels of the device do not reach.
    pub updates_on_host: bool,
    /// True if the host computes each update during the next step (ZeRO-Offload's one-step delayed parameter update). This changes the
    /// result.
    pub delayed_update: bool,
    /// True if reduced gradients take the place of the parameters of their chunk, provided that all its parts lie in device memory.
    /// For one micro-batch and master weights, with gradients that accumulate in the type of the parameters.
    pub gradients_in_place: bool,
    /// True if each chunk is updated within backward, as soon as its gradient is reduced (as LOMO does, arXiv 2306.09782). For one
    /// micro-batch, with gradients that are neither clipped nor scaled.
    pub update_in_backward: bool,
}

/// Arithmetic of a step, whatever the [`Options`]: each of these changes bits of the result.
#[derive(Clone, Copy, Debug)]
pub struct Arithmetic<'a> {
    /// Element types.
    pub precision: Precision,
    /// Number of micro-batches of a step.
    pub micro_batches: usize,
    /// True if the gradients of micro-batches are added by a tree, in which their number on a rank is not seen.
    pub sums_by_tree: bool,
    /// The optimizer; [`Chunks`] allocates its states.
    pub optimizer: &'a Optimizer,
    /// Parameters with another learning rate or weight decay, by full name.
    pub rates: &'a RatesByName,
}

/// The parameters of a stage that a rank stores.
pub struct Holding {
    /// Number of the pipeline stage that they are of.
    pub stage: usize,
    /// Position of each parameter of the network in chunks.
    pub layout: Arc<ChunkLayout>,
    /// For each parameter: whether this copy counts in norms and is written to checkpoints. Where several ranks or
    /// stages have a copy (a tied table, a norm under tensor parallelism), one of them counts.
    pub answers: Vec<bool>,
    /// For each parameter: whether several stages have a copy, each with one term of its gradient. It is alone in its chunk.
    pub tied: Vec<bool>,
    /// True if they are updated here. A copy that is updated elsewhere has no optimizer states and no master weights.
    pub is_updated: bool,
}

/// A parameter of which several stages have a copy.
pub struct Tie {
    /// The copies of this rank: the place of the stage among its stages, and the parameter.
    pub copies: Vec<(usize, usize)>,
    /// The ranks that have copies; None when this rank is not one of several.
    pub group: Option<Arc<dyn Group>>,
}

/// The groups over which the gradients of a rank are summed.
pub struct SumGroups {
    /// Replicas.
    pub data: Arc<dyn Group>,
    /// Tensor-parallel ranks.
    pub tensor: Arc<dyn Group>,
    /// All ranks whose gradients are in the norm.
    pub world: Arc<dyn Group>,
}

/// What programs are made for.
pub struct Schedules {
    /// The rank's steps of the pipeline schedule.
    pub step: Vec<Step>,
    /// The same of an evaluation.
    pub evaluation: Vec<Step>,
    /// Parameters of the whole model.
    pub parameters: usize,
    /// Tensor-parallel ranks, and the number of this one: each has a number of its own for each parameter in the norm.
    pub slots: [usize; 2],
}

/// Parameters, gradients and optimizer states of one rank, and what it does with them in each phase.
pub struct Chunks {
    device: Device,
    groups: SumGroups,
    /// For each tie that has copies here: its group.
    ties: Vec<Option<Arc<dyn Group>>>,
    optimizer: Optimizer,
    described: RankChunks,
    /// For each stage of the rank.
    held: Vec<Held>,
    /// In the order of [`PHASES`].
    programs: Vec<Arc<Program>>,
    /// Resident buffers by contents and chunk: a row of tiles, or one.
    rows: BTreeMap<(Role, usize), Range<u32>>,
    /// By number in the program that runs; None while work in flight has them.
    buffers: Vec<Option<Tensor>>,
    flights: BTreeMap<Token, Flight>,
    slots: [usize; 2],
    /// The gradient norm without the loss scale, before clipping, and the factor that clips gradients and removes the scale; `[1]` each.
    norm: Tensor,
    factor: Tensor,
    /// True if a phase takes it that an update runs as it begins.
    expects_update: bool,
    clip: Clip,
    update: Update,
    running: Running,
}

/// How far a phase has come.
struct Running {
    program: Arc<Program>,
    /// The next action.
    at: usize,
    micro_batch: usize,
    /// Operands of the block run that comes next, or was the last.
    operands: Span,
    /// Whether a delayed update ran as the phase began.
    is_pending: bool,
    /// Whether the step is applied.
    applies: Option<bool>,
    /// Buffers with sums of squares that were set to zero in this phase.
    zeroed: BTreeSet<Buffer>,
    /// The gradient because of which updates within backward have stopped.
    found: Option<NotFinite>,
}

impl Running {
    fn new(program: &Arc<Program>, is_pending: bool) -> Running {
        Running {
            program: Arc::clone(program),
            at: 0,
            micro_batch: 0,
            operands: Span { start: 0, reads: 0, writes: 0 },
            is_pending,
            applies: None,
            zeroed: BTreeSet::new(),
            found: None,
        }
    }
}

impl Chunks {
    /// Lowers the programs of a rank, and allocates what it stores: of each of its stages, in order, what `held` says.
    pub fn new(
        device: &Device,
        groups: SumGroups,
        held: &[(&Network, Holding)],
        (options, arithmetic): (&Options, Arithmetic),
        (schedules, ties): (Schedules, Vec<Tie>),
    ) -> Chunks {
        let Schedules { step, evaluation, parameters, slots } = schedules;
        let place = [groups.data.rank(), groups.data.world_size()];
        let policies = policies(device, place[1], (options, &arithmetic));
        let (mut own, mut stages) = (Vec::new(), Vec::new());
        for (network, holding) in held {
            let held = Held::new(network, holding, (options, &arithmetic), place);
            let described = held.describe(network, holding, (options.buffer, &policies), &stages);
            own.push(held);
            stages.push(described);
        }
        let ties: Vec<Tie> = ties.into_iter().filter(|tie| !tie.copies.is_empty()).collect();
        let tied = |tie: &Tie| {
            let part = |(at, p): &(usize, usize)| own[*at].part_of(*p).unwrap_or(0..0);
            let copy = |(at, p): &(usize, usize)| {
                let (held, c) = (&own[*at], own[*at].map.layout.placed[*p].chunk);
                let start = part(&(*at, *p)).start.saturating_sub(held.map.updated(c).start);
                (stages[*at].first_chunk + c, start as u64)
            };
            TiedChunks {
                elements: part(&tie.copies[0]).len() as u64,
                copies: tie.copies.iter().map(copy).collect(),
                is_shared: tie.group.is_some(),
            }
        };
        let tied = ties.iter().map(tied).collect();
        let norms = (parameters * slots[0]) as u64;
        let described = RankChunks { ties: tied, stages, policies, step, evaluation, norms };
        let programs: Vec<Arc<Program>> =
            PHASES.iter().map(|phase| Arc::new(described.lower(*phase))).collect();
        let residents = &programs[0].buffers[..programs[0].residents()];
        let mut rows: BTreeMap<(Role, usize), Range<u32>> = BTreeMap::new();
        for (at, spec) in (0..).zip(residents) {
            rows.entry((spec.role, spec.of)).or_insert(at..at).end = at + 1;
        }
        let buffers = residents.iter().map(|spec| Some(allocate(device, spec))).collect();
        let scalar = |name| device.alloc(DType::F32, [1], Category::Workspace, name);
        Chunks {
            device: device.clone(),
            groups,
            ties: ties.into_iter().map(|tie| tie.group).collect(),
            optimizer: arithmetic.optimizer.clone(),
            described,
            held: own,
            running: Running::new(&programs[0], false),
            programs,
            rows,
            buffers,
            flights: BTreeMap::new(),
            slots,
            norm: scalar("norm"),
            factor: scalar("norm.clip_factor"),
            expects_update: false,
            clip: Clip { max_norm: 0.0, loss_scale: 1.0 },
            update: Update { number: 1, lr: 0.0, applies: true },
        }
    }

    /// The chunks of the rank and its policies, of which its programs are made.
    pub fn described(&self) -> &RankChunks {
        &self.described
    }

    /// Its programs, in the order of [`PHASES`].
    pub fn programs(&self) -> &[Arc<Program>] {
        &self.programs
    }

    /// Executes another program in the phase of `program`, with the same resident buffers.
    ///
    /// # Panics
    /// For other resident buffers.
    pub fn set_program(&mut self, program: Program) {
        let own = PHASES.iter().position(|phase| *phase == program.phase).expect("a phase with a program");
        let residents = |program: &Program| program.buffers[..program.residents()].to_vec();
        assert_eq!(residents(&program), residents(&self.programs[own]), "resident buffers stay");
        self.programs[own] = Arc::new(program);
    }

    /// Positions of the parameters of a stage of the rank, in chunks.
    pub fn layout(&self, stage: usize) -> &ChunkLayout {
        &self.held[stage].map.layout
    }

    /// In a dry run, a step shows what it does while a delayed update runs: as all steps but the first do.
    pub fn expect_update(&mut self) {
        let Policies { delayed, stage, data_ranks, .. } = self.described.policies;
        self.expects_update = delayed;
        if data_ranks > 1 && stage != ZeroStage::Zero {
            // As an update leaves them.
            for buffer in self.buffers_with(Role::Updated) {
                let updated = self.view(buffer);
                let placements = self.device.placements(updated).with(Axis::Data, Placement::Shard(0));
                self.device.place(updated, placements);
            }
        }
    }

    /// The resident buffers with some contents.
    fn buffers_with(&self, role: Role) -> Vec<Buffer> {
        let rows = self.rows.range((role, 0)..=(role, usize::MAX)).flat_map(|(_, row)| row.clone());
        rows.map(Buffer).collect()
    }

    /// The gradient norm before clipping and without the loss scale, `[1]`, behind the norm of a step.
    pub fn norm(&self) -> &Tensor {
        &self.norm
    }

    /// The factor by which the update multiplies gradients, `[1]`, behind the norm of a step.
    pub fn factor(&self) -> &Tensor {
        &self.factor
    }
}

/// Policies of the chunks of a rank among `data_ranks` replicas.
fn policies(device: &Device, data_ranks: usize, (options, arithmetic): (&Options, &Arithmetic)) -> Policies {
    let host_addressable = device.is_host_addressable();
    Policies {
        stage: options.stage,
        overlap: options.overlap,
        prefetch: options.prefetch,
        defer: options.defer,
        micro_batches: arithmetic.micro_batches,
        sums_by_tree: arithmetic.sums_by_tree,
        precision: arithmetic.precision,
        data_ranks: data_ranks as u64,
        host_addressable,
        in_place: options.gradients_in_place,
        // Where the host addresses device memory, kernels of the device are the host's.
        updates_on_host: options.updates_on_host && !host_addressable,
        delayed: options.delayed_update,
        in_backward: options.update_in_backward,
    }
}

/// Memory for a buffer.
#[track_caller]
fn allocate(device: &Device, spec: &BufferSpec) -> Tensor {
    let BufferSpec { dtype, category, name, .. } = *spec;
    let shape = [spec.elements as usize];
    match spec.memory {
        Memory::Device => device.alloc(dtype, shape, category, name),
        Memory::Host => device.alloc_host(dtype, shape, category, name),
        Memory::Disk => device.alloc_disk(dtype, shape, category, name),
    }
}
