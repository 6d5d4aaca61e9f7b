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
//! blocks and update element by element, so parameters and states are equal bit for bit.
//!
//! Optimizer states, and under stage 3 parameters, may lie in host memory or on disk between their uses (`states`).
//!
//! A chunk holds trained parameters, or frozen ones. Frozen chunks come last; they are stored and gathered like others (those in blocks as
//! words), and have no gradients, optimizer states or master weights.
//!
//! Parameters are stored, gathered and published in the compute type. When that type has 16 bits, the optimizer updates
//! f32 master weights, which are stored with the optimizer states, and rounds them in the same pass.
//!
//! In a step the caller calls, for each block, `acquire`, the layer, and `release`; in backward also `open_gradients`
//! before the layer and `reduce` after it. Then follow [`Zero::finish_gradients`], the sums over other axes (`sums`),
//! [`Zero::squares`] for the norm, and [`Zero::update`], which also publishes the parameters. Updates may also run within
//! backward (`in_backward`).

mod chunk_update;
mod delayed;
mod described;
mod floats;
mod gradient_buffers;
mod gradients;
mod host_update;
mod in_backward;
mod in_place;
mod lent;
mod order;
mod parameters;
mod prefetch;
mod reductions;
mod residence;
mod rules;
mod spans;
mod squares;
mod states;
mod stored_gradients;
mod summed;
mod sums;
mod update;
mod visiting;
mod visits;

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Group};
use phalanx_layers::{Network, Parameter, Share};
use phalanx_optim::{Optimizer, RatesByName};
use phalanx_plan::program::BlockRun;
use phalanx_plan::trace::PhaseName;
use phalanx_plan::{ChunkLayout, Precision, ZeroStage};
use phalanx_tensor::{DType, Device, Shape, View};

use delayed::Delayed;
use gradient_buffers::stored_elements;
use gradients::{GradientChunks, Surroundings};
use in_backward::InBackward;
pub use in_backward::NotFinite;
use order::UpdateOrder;
use parameters::{ParameterChunks, Source};
use prefetch::Prefetch;
pub use residence::{ChunkResidence, Residence};
pub use rules::updated;
use rules::{Places, Rules};
pub use spans::{Selection, StateSpan};
use squares::Squares;
use states::{Elements, States};

/// Options of [`Zero`]. Only `defer` and `delayed_update` change bits of the result.
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
    /// True if the host computes each update during the next step. This changes the result.
    pub delayed_update: bool,
    /// True if reduced gradients take the place of the parameters of their chunk, provided that all its parts lie in device memory.
    /// For one micro-batch and master weights, with gradients that accumulate in the type of the parameters.
    pub gradients_in_place: bool,
    /// True if each chunk is updated within backward, as soon as its gradient is reduced. For one micro-batch, with gradients
    /// that are neither clipped nor scaled.
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
    /// The optimizer; [`Zero`] allocates its states.
    pub optimizer: &'a Optimizer,
    /// Parameters with another learning rate or weight decay, by full name.
    pub rates: &'a RatesByName,
}

/// Positions of the parameters in chunks, and the chunks that each block uses. It does not change during a run.
struct Map {
    layout: Arc<ChunkLayout>,
    types: Vec<DType>,
    /// Shape of each parameter.
    shapes: Vec<Shape>,
    /// For each parameter: number of those that are joined in it.
    members: Vec<usize>,
    /// For each parameter: whether this copy counts in norms and is written to checkpoints. Exactly one of several
    /// copies counts.
    answers: Vec<bool>,
    /// For each parameter whose gradient is one term of a sum over the tensor axis: which part of it.
    terms: Vec<Option<Share>>,
    /// For each parameter: whether several stages have a copy, each with one term of its gradient.
    tied: Vec<bool>,
    /// For each parameter: its number in the whole model.
    numbers: Vec<usize>,
    /// For each block, the head last: its parameters, in the layer's order.
    uses: Vec<Vec<usize>>,
    /// For each block: the chunks that it uses, ascending, each once.
    chunks: Vec<Vec<usize>>,
    /// Number of chunks of trained parameters. They come first.
    trained: usize,
    /// The memories in which the parts of the chunks lie between their uses.
    residence: Residence,
    rank: u64,
    world: u64,
}

impl Map {
    fn new(
        network: &Network,
        (answers, tied): (Vec<bool>, Vec<bool>),
        (layout, residence): (Arc<ChunkLayout>, Residence),
        compute: DType,
        [rank, world]: [usize; 2],
    ) -> Map {
        let chunks_of = |uses: &Vec<usize>| {
            let mut chunks: Vec<usize> = uses.iter().map(|p| layout.placed[*p].chunk).collect();
            chunks.sort_unstable();
            chunks.dedup();
            chunks
        };
        let specs = &network.parameters;
        let last_trained = specs.iter().rposition(|p| p.trained);
        Map {
            types: (0..layout.chunks()).map(|c| layout.dtype(c, compute)).collect(),
            shapes: specs.iter().map(|p| Shape::from(p.shape.as_slice())).collect(),
            members: specs.iter().map(|p| p.members().len()).collect(),
            terms: specs.iter().map(|p| p.terms().filter(|_| p.trained)).collect(),
            trained: last_trained.map_or(0, |p| layout.placed[p].chunk + 1),
            numbers: network.numbers.clone(),
            answers,
            tied: tied.into_iter().zip(specs).map(|(tied, p)| tied && p.trained).collect(),
            chunks: network.uses.iter().map(chunks_of).collect(),
            uses: network.uses.clone(),
            layout,
            residence,
            rank: rank as u64,
            world: world as u64,
        }
    }

    /// The parameters of a block, each with the number of those that are joined in it.
    fn joining<'a>(
        &self,
        block: usize,
        parameters: impl Iterator<Item = Parameter<'a>>,
    ) -> Vec<Parameter<'a>> {
        let members = self.uses[block].iter().map(|p| self.members[*p]);
        parameters.zip(members).map(|(parameter, members)| parameter.joining(members)).collect()
    }

    fn chunk_count(&self) -> usize {
        self.layout.chunk_elements.len()
    }

    /// The chunks of trained parameters that a block uses, ascending.
    fn written(&self, block: usize) -> impl Iterator<Item = usize> {
        self.chunks[block].iter().copied().filter(|c| *c < self.trained)
    }

    fn is_trained(&self, parameter: usize) -> bool {
        self.layout.placed[parameter].chunk < self.trained
    }

    /// Blocks of trained parameters: they come first.
    fn trained_blocks(&self) -> usize {
        self.layout.first_block.get(self.trained).copied().unwrap_or(self.layout.blocks) as usize
    }

    fn whole(&self, chunk: usize) -> std::ops::Range<usize> {
        0..self.layout.chunk_elements[chunk] as usize
    }

    /// This rank's shard of a chunk, in elements of the chunk.
    fn shard(&self, chunk: usize) -> std::ops::Range<usize> {
        let range = self.layout.shard(chunk, self.rank, self.world);
        range.start as usize..range.end as usize
    }

    /// Returns whether the sum of a chunk's gradients over the data axis is complete: no sum over another axis follows.
    fn is_summed_over_data_alone(&self, chunk: usize) -> bool {
        self.layout.parameters(chunk).all(|p| self.terms[p].is_none() && !self.tied[p])
    }

    /// The elements of a chunk that are a parameter.
    fn range(&self, parameter: usize) -> std::ops::Range<usize> {
        let placed = &self.layout.placed[parameter];
        placed.offset as usize..(placed.offset + placed.elements) as usize
    }
}

/// The parameters that a [`Zero`] stores.
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
    /// Number of chunks that earlier stages of this rank have.
    pub first_chunk: usize,
    /// True if they are updated here. A copy that is updated elsewhere has no optimizer states and no master weights.
    pub is_updated: bool,
}

/// Parameters, gradients and optimizer states of one stage on one rank.
pub struct Zero {
    device: Device,
    group: Arc<dyn Group>,
    map: Map,
    options: Options,
    precision: Precision,
    optimizer: Optimizer,
    parameters: ParameterChunks,
    gradients: GradientChunks,
    rules: Rules,
    /// For each chunk, the optimizer states of the part that this rank updates, and the f32 parameters of the same part
    /// when the compute type has 16 bits.
    states: States,
    /// Memory of delayed updates.
    delayed: Option<Delayed>,
    /// The order in which chunks are updated.
    order: UpdateOrder,
    /// The updates of the step that runs, where they run within backward.
    in_backward: Option<InBackward>,
    /// Sums of squares of all blocks of these parameters.
    squares: Squares,
    /// Number of the first chunk in the dry run: chunks of earlier stages of this rank come before it.
    first_chunk: usize,
    orders: BTreeMap<PhaseName, Prefetch>,
}

impl Zero {
    /// Allocates what this rank stores. Nothing is prefetched in a phase before [`Zero::expect`]. `group` is the data axis.
    pub fn new(
        device: &Device,
        group: Arc<dyn Group>,
        network: &Network,
        held: Holding,
        (options, arithmetic): (&Options, Arithmetic),
    ) -> Zero {
        let Holding { stage, layout, answers, tied, first_chunk, is_updated } = held;
        let Arithmetic { precision, micro_batches, sums_by_tree: _, optimizer, rates } = arithmetic;
        assert!(
            !options.gradients_in_place
                || (micro_batches == 1
                    && precision.has_master()
                    && precision.accumulate == precision.compute),
            "gradients cannot take the place of parameters: {options:?}"
        );
        let lies = (layout, options.residence[stage].clone());
        let place = [group.rank(), group.world_size()];
        let map = Map::new(network, (answers, tied), lies, precision.compute, place);
        order::assert_possible(&map, options, micro_batches);
        let parameters = ParameterChunks::new(device, &map, options.stage);
        let gradients = GradientChunks::new(device, &map, options, &arithmetic);
        let rules = Rules::new(optimizer, rates, network);
        let elements = (0..map.chunk_count()).map(|c| {
            let part = update::stepped(&map, options.stage, c);
            let is_updated = c < map.trained && is_updated;
            let states = 0..if is_updated { rules.names().len() } else { 0 };
            let places = |state| Some((state, Places::of(&rules, &map, (c, &part), state)?));
            Elements {
                updated: part.len(),
                parameters: map.types[c],
                gradients: stored_elements(&map, options, &arithmetic, c),
                uncut: rules.uncut(&map, c, &part),
                states: states.filter_map(places).collect(),
                is_updated,
            }
        });
        let order = UpdateOrder::new(&map, options);
        let states = States::new(device, (&map.residence, options), precision, elements, &order);
        let of_delayed = (options.stage, precision.compute);
        let delayed =
            options.delayed_update.then(|| Delayed::new(device, &map, (&rules, &states), of_delayed));
        let squares = Squares::new(device, &map);
        Zero {
            device: device.clone(),
            group,
            map,
            options: options.clone(),
            precision,
            optimizer: optimizer.clone(),
            parameters,
            gradients,
            rules,
            states,
            delayed,
            order,
            in_backward: None,
            squares,
            first_chunk,
            orders: BTreeMap::new(),
        }
    }

    /// The block runs of this stage in a phase, in order, from which follows when chunks are gathered.
    pub fn expect(&mut self, phase: PhaseName, runs: impl Iterator<Item = BlockRun>) {
        let order = self.uses(runs).map(|c| c as u32).collect();
        self.orders.insert(phase, Prefetch::new(order, self.options.prefetch));
    }

    /// The chunks that block runs of this stage read, in order.
    pub fn uses(&self, runs: impl Iterator<Item = BlockRun>) -> impl Iterator<Item = usize> {
        runs.filter(|run| run.pass.reads_parameters())
            .flat_map(|run| self.map.chunks[run.block].iter().copied())
    }

    /// Number of the first chunk among those of all stages of this rank.
    pub fn first_chunk(&self) -> usize {
        self.first_chunk
    }

    /// Ranks of the data axis.
    pub fn data_ranks(&self) -> usize {
        self.group.world_size()
    }

    /// The process group of the data axis.
    pub fn group(&self) -> &dyn Group {
        &*self.group
    }

    /// Starts a phase: the order of uses starts at its beginning, and gradients start at zero micro-batches.
    pub fn begin(&mut self, phase: PhaseName) {
        let prefetch = self.orders.entry(phase).or_insert_with(|| Prefetch::new(Vec::new(), 0));
        prefetch.restart();
        self.parameters.phase = phase;
        self.gradients.begin(&self.device);
        self.squares.restart();
    }

    /// The micro-batch whose gradients come next.
    pub fn begin_micro_batch(&mut self, micro_batch: usize) {
        self.gradients.micro_batch = micro_batch;
    }

    /// Makes the parameters of `block` readable, and starts to gather the chunks that are used next.
    ///
    /// # Errors
    /// When a gather fails.
    pub fn acquire(&mut self, block: usize) -> Result<(), CollectiveError> {
        let prefetch = self.orders.get_mut(&self.parameters.phase).expect("a phase has begun");
        for c in &self.map.chunks[block] {
            self.device.record_use(self.first_chunk + c);
        }
        let Zero { device, group, map, states, .. } = self;
        let source = Source { device, group: &**group, map, states };
        self.parameters.acquire(source, prefetch, block, self.options.overlap)
    }

    /// Frees the gathered chunks of `block` that are not used next.
    pub fn release(&mut self, block: usize) {
        let prefetch = self.orders.get(&self.parameters.phase).expect("a phase has begun");
        self.parameters.release(&self.map, prefetch, block);
    }

    /// The values of the parameters of an acquired block, in its layer's order.
    pub fn views(&self, block: usize) -> Vec<View<'_>> {
        self.parameters.views(&self.map, block)
    }

    /// The parameters of an acquired block, to be read.
    pub fn parameters(&self, block: usize) -> Vec<Parameter<'_>> {
        let trained = self.map.uses[block].iter().map(|p| self.map.is_trained(*p));
        let parameters = self.views(block).into_iter().zip(trained);
        self.map.joining(block, parameters.map(|(view, trained)| Parameter::read(view, trained)))
    }

    /// The parameters of an acquired block and the memory of their gradients, after [`Zero::open_gradients`].
    pub fn parameters_with_gradients(&mut self, block: usize) -> Vec<Parameter<'_>> {
        let values = self.parameters.views(&self.map, block);
        let gradients = self.gradients.slots(&self.map, block);
        let parameters = values.into_iter().zip(gradients);
        self.map.joining(block, parameters.map(|(value, slot)| Parameter::with_gradient(value, slot)))
    }

    /// The memory of the gradients of a block's trained parameters, after [`Zero::open_gradients`].
    pub fn gradients(&mut self, block: usize) -> Vec<Parameter<'_>> {
        self.map.joining(block, self.gradients.slots(&self.map, block).into_iter().map(Parameter::gradient))
    }

    /// The gradients that the layer of `block` has written, before [`Zero::reduce`]; each with the index of its
    /// parameter in the layer.
    pub fn written_gradients(&self, block: usize) -> Vec<(usize, View<'_>)> {
        self.gradients.written(&self.map, block)
    }

    /// Allocates the memory into which `block` writes its gradients.
    ///
    /// # Errors
    /// When an earlier reduction of the same chunk fails.
    pub fn open_gradients(&mut self, block: usize) -> Result<(), CollectiveError> {
        self.read_ahead();
        let (gradients, mut cx) = self.gradients_in_surroundings();
        gradients.open(&mut cx, block)
    }

    /// Notes that the gradients of `block` are written, and starts the reduction of every chunk that is then complete. Between
    /// [`Zero::begin_updates`] and [`Zero::finish_updates`], chunks that are reduced are updated.
    ///
    /// # Errors
    /// When an earlier reduction fails.
    pub fn reduce(&mut self, block: usize) -> Result<(), CollectiveError> {
        let (gradients, mut cx) = self.gradients_in_surroundings();
        gradients.reduce(&mut cx, block)?;
        self.update_reduced(false)
    }

    /// Waits until the gradients of the step are reduced and in the memory from which the update reads them.
    ///
    /// # Errors
    /// When a reduction fails.
    pub fn finish_gradients(&mut self) -> Result<(), CollectiveError> {
        self.update_rest()?;
        let (gradients, mut cx) = self.gradients_in_surroundings();
        gradients.finish(&mut cx)
    }

    fn gradients_in_surroundings(&mut self) -> (&mut GradientChunks, Surroundings<'_>) {
        let Zero { device, group, map, states, squares, gradients, parameters, .. } = self;
        (gradients, Surroundings { device, group: &**group, map, states, squares, parameters })
    }

    /// Waits until every rank has received the updated parameters.
    ///
    /// # Errors
    /// When a gather fails.
    pub fn settle(&mut self) -> Result<(), CollectiveError> {
        self.parameters.settle()
    }
}
