//! ZeRO 0 to 3 over chunks (Rajbhandari et al., arXiv 1910.02054; chunks as in Colossal-AI's Gemini).
//!
//! | stage | parameters | gradients | optimizer | step on |
//! |---|---|---|---|---|
//! | 0 | whole | whole | whole | whole |
//! | 1 | whole | whole until reduced | shard | shard |
//! | 2 | whole | shard | shard | shard |
//! | 3 | shard | shard | shard | shard |
//!
//! The stages differ only in what is resident: all of them reduce along the same tree, take norms over
//! the same blocks and update element by element, so parameters and states agree to the bit.
//!
//! Parameters are held, gathered and published in the type of computation. When that has 16 bits, the optimizer
//! updates f32 master weights, which lie with the optimizer states, and rounds them in the same pass.
//!
//! A step is: for each block `acquire`, compute, `release`, and in backward `open_gradients` before and
//! `reduce` after; then [`Zero::finish_gradients`], the sums over other axes ([`sums`]), [`Zero::squares`] for the
//! norm, [`Zero::update`], which publishes.

mod gradients;
mod parameters;
mod prefetch;
mod spans;
mod sums;
mod update;

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Group};
use phalanx_layers::{Gradient, Network};
use phalanx_optim::Optimizer;
use phalanx_plan::{ChunkLayout, Precision, Stage};
use phalanx_tensor::{Category, DType, Device, Shape, Tensor, View};
use phalanx_trace::PhaseName;

use gradients::GradientChunks;
use parameters::ParameterChunks;
use prefetch::Prefetch;
pub use spans::{Extent, StateSpan};

/// What may be chosen about [`Zero`]. None of it changes a bit of the result but `defer` and `precision`.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which of parameters, gradients and states are sharded.
    pub stage: Stage,
    /// Whether communication runs beside computation.
    pub overlap: bool,
    /// Chunks gathered ahead of their use (stage 3).
    pub prefetch: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Reduce once after the last micro-batch instead of after each.
    pub defer: bool,
    /// Element types.
    pub precision: Precision,
    /// The optimizer; its states are allocated here.
    pub optimizer: Optimizer,
}

/// Which chunk holds what, for blocks: fixed before the run.
struct Map {
    layout: Arc<ChunkLayout>,
    /// By parameter.
    shapes: Vec<Shape>,
    /// By parameter.
    decays: Vec<bool>,
    /// By parameter: whether this rank's group answers for it, in norms and in checkpoints; another does for a
    /// copy.
    answers: Vec<bool>,
    /// By parameter: whether its gradient is one term of a sum over the tensor axis.
    partial: Vec<bool>,
    /// By parameter: its number in the whole model.
    numbers: Vec<usize>,
    /// By block, the head last: parameters in the order of the layer.
    uses: Vec<Vec<usize>>,
    /// By block: distinct chunks, ascending.
    chunks: Vec<Vec<usize>>,
    rank: u64,
    world: u64,
}

impl Map {
    fn new(
        network: &Network,
        answers: Vec<bool>,
        layout: Arc<ChunkLayout>,
        rank: usize,
        world: usize,
    ) -> Map {
        let chunks_of = |uses: &Vec<usize>| {
            let mut chunks: Vec<usize> = uses.iter().map(|p| layout.placed[*p].chunk).collect();
            chunks.sort_unstable();
            chunks.dedup();
            chunks
        };
        Map {
            shapes: network.parameters.iter().map(|p| Shape::from(p.shape.as_slice())).collect(),
            decays: network.parameters.iter().map(|p| p.decays()).collect(),
            partial: network.parameters.iter().map(|p| p.partial).collect(),
            numbers: network.numbers.clone(),
            answers,
            chunks: network.uses.iter().map(chunks_of).collect(),
            uses: network.uses.clone(),
            layout,
            rank: rank as u64,
            world: world as u64,
        }
    }

    fn chunk_count(&self) -> usize {
        self.layout.chunk_elements.len()
    }

    fn whole(&self, chunk: usize) -> std::ops::Range<usize> {
        0..self.layout.chunk_elements[chunk] as usize
    }

    /// This rank's shard of a chunk, in elements of the chunk.
    fn shard(&self, chunk: usize) -> std::ops::Range<usize> {
        let range = self.layout.shard(chunk, self.rank, self.world);
        range.start as usize..range.end as usize
    }

    /// Elements of a parameter within its chunk.
    fn range(&self, parameter: usize) -> std::ops::Range<usize> {
        let placed = &self.layout.placed[parameter];
        placed.offset as usize..(placed.offset + placed.elements) as usize
    }
}

/// Which parameters a [`Zero`] holds, and where.
pub struct Holding {
    /// Where each parameter of the network lies.
    pub layout: Arc<ChunkLayout>,
    /// By parameter: whether this rank's group answers for it, in norms and in checkpoints. Of copies (a
    /// tied table in two stages, what every tensor-parallel rank has) one answers.
    pub answers: Vec<bool>,
    /// Chunks of the same rank that lie before these.
    pub first_chunk: usize,
}

/// Parameters, gradients and optimizer states of one rank. See the module's head.
pub struct Zero {
    device: Device,
    group: Arc<dyn Group>,
    map: Map,
    options: Options,
    parameters: ParameterChunks,
    gradients: GradientChunks,
    /// By chunk, then by state of the optimizer: the part that this rank updates.
    states: Vec<Vec<Tensor>>,
    /// By chunk: f32 parameters of the same part, where computation has 16 bits.
    masters: Option<Vec<Tensor>>,
    /// Sums of squares of all blocks of these parameters, f64.
    squares: Option<Tensor>,
    /// Number by which the dry run knows the first chunk: those of other stages of the rank come before.
    first_chunk: usize,
    orders: BTreeMap<PhaseName, Prefetch>,
}

impl Zero {
    /// Allocates what stays resident. `orders` gives the chunk uses of each phase as the dry run saw
    /// them; a phase without an order is not prefetched. `group` is the data axis.
    pub fn new(
        device: &Device,
        group: Arc<dyn Group>,
        network: &Network,
        held: Holding,
        options: Options,
        orders: &BTreeMap<PhaseName, Vec<u32>>,
    ) -> Zero {
        let Holding { layout, answers, first_chunk } = held;
        let map = Map::new(network, answers, layout, group.rank(), group.world_size());
        let parameters = ParameterChunks::new(device, &map, options.stage, options.precision.compute);
        let gradients = GradientChunks::new(device, &map, &options);
        let stepped = |chunk: usize, name| {
            let elements = update::stepped(&map, options.stage, chunk).len();
            device.alloc(DType::F32, [elements], Category::Optimizer, name)
        };
        let state = |c: usize| {
            options.optimizer.states().iter().map(|_| stepped(c, "optimizer_state")).collect::<Vec<_>>()
        };
        let chunks = 0..map.chunk_count();
        let states = chunks.clone().map(state).collect();
        let master = || chunks.map(|c| stepped(c, "master_weights")).collect();
        let masters = options.precision.has_master().then(master);
        let blocks = map.layout.blocks as usize;
        let squares = device.alloc(DType::F64, [blocks], Category::Workspace, "norm.squares");
        let own = first_chunk as u32..(first_chunk + map.chunk_count()) as u32;
        let of_own =
            |order: &Vec<u32>| order.iter().filter(|c| own.contains(c)).map(|c| c - own.start).collect();
        let prefetch = |order| Prefetch::new(of_own(order), options.prefetch);
        let orders = orders.iter().map(|(phase, order)| (*phase, prefetch(order))).collect();
        Zero {
            device: device.clone(),
            group,
            map,
            options,
            parameters,
            gradients,
            states,
            masters,
            squares: Some(squares),
            first_chunk,
            orders,
        }
    }

    /// Number of its chunks.
    pub fn chunks(&self) -> usize {
        self.map.chunk_count()
    }

    /// Ranks of the data axis.
    pub fn data_ranks(&self) -> usize {
        self.group.world_size()
    }

    /// The process group of the data axis.
    pub fn group(&self) -> &dyn Group {
        &*self.group
    }

    /// Starts a phase: uses are counted from its first, and gradients start anew.
    pub fn begin(&mut self, phase: PhaseName) {
        let prefetch = self.orders.entry(phase).or_insert_with(|| Prefetch::new(Vec::new(), 0));
        prefetch.restart();
        self.parameters.phase = phase;
        self.gradients.begin(&self.device);
    }

    /// Makes the parameters of `block` readable, and starts to fetch what comes next.
    ///
    /// # Errors
    /// When a gather fails.
    pub fn acquire(&mut self, block: usize) -> Result<(), CollectiveError> {
        let prefetch = self.orders.get_mut(&self.parameters.phase).expect("a phase has begun");
        for c in &self.map.chunks[block] {
            self.device.record_use(self.first_chunk + c);
        }
        self.parameters.acquire(&self.device, &*self.group, &self.map, prefetch, block, self.options.overlap)
    }

    /// Gives up the gathered chunks of `block` that nobody needs next.
    pub fn release(&mut self, block: usize) {
        let prefetch = self.orders.get(&self.parameters.phase).expect("a phase has begun");
        self.parameters.release(&self.map, prefetch, block);
    }

    /// The parameters of an acquired block, in the order of its layer.
    pub fn parameters(&self, block: usize) -> Vec<View<'_>> {
        self.parameters.views(&self.map, block)
    }

    /// The same, and where their gradients go, once [`Zero::open_gradients`] was called.
    pub fn parameters_and_gradients(&mut self, block: usize) -> (Vec<View<'_>>, Vec<Gradient<'_>>) {
        (self.parameters.views(&self.map, block), self.gradients.slots(&self.map, block))
    }

    /// Where the gradients of a block go, once [`Zero::open_gradients`] was called.
    pub fn gradients(&mut self, block: usize) -> Vec<Gradient<'_>> {
        self.gradients.slots(&self.map, block)
    }

    /// The gradients of `block` as its layer wrote them, between that and [`Zero::reduce`], each with its
    /// place in the layer.
    pub fn written_gradients(&self, block: usize) -> Vec<(usize, View<'_>)> {
        self.gradients.written(&self.map, block)
    }

    /// Makes room for the gradients of `block`.
    ///
    /// # Errors
    /// When a reduction that held the room fails.
    pub fn open_gradients(&mut self, block: usize) -> Result<(), CollectiveError> {
        self.gradients.open(&self.device, &self.map, block)
    }

    /// Notes that the gradients of `block` are written; reduces every chunk that is thereby complete.
    ///
    /// # Errors
    /// When an earlier reduction fails.
    pub fn reduce(&mut self, block: usize) -> Result<(), CollectiveError> {
        self.gradients.reduce(&self.device, &*self.group, &self.map, block)
    }

    /// Waits until the gradients of the step are reduced and where the update needs them.
    ///
    /// # Errors
    /// When a reduction fails.
    pub fn finish_gradients(&mut self) -> Result<(), CollectiveError> {
        self.gradients.finish(&self.device, &*self.group, &self.map)
    }

    /// Waits until parameters that were published are whole everywhere.
    ///
    /// # Errors
    /// When a gather fails.
    pub fn settle(&mut self) -> Result<(), CollectiveError> {
        self.parameters.settle()
    }
}
