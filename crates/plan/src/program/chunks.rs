//! The chunks of a rank and the policies by which they are stored and moved: all that a program is made from.

use std::ops::Range;

use crate::pipeline::Step;
use crate::trace::{DType, Memory, PhaseName};
use crate::zero::{Precision, ZeroStage};

use super::demand::{BlockRun, StageBlocks, block_runs};
use super::list::Role;

/// The stages of one rank, its schedule and its policies.
#[derive(Clone, Debug)]
pub struct RankChunks {
    /// The stages of the rank, in order.
    pub stages: Vec<StageChunks>,
    /// Parameters of which several stages have a copy, one of them on this rank.
    pub ties: Vec<TiedChunks>,
    /// Policies of all chunks.
    pub policies: Policies,
    /// The rank's steps of the pipeline schedule.
    pub step: Vec<Step>,
    /// The same of an evaluation.
    pub evaluation: Vec<Step>,
    /// Number of sums of squares that the ranks exchange for the norm.
    pub norms: u64,
}

/// The chunks of one stage.
#[derive(Clone, Debug)]
pub struct StageChunks {
    /// Number of the stage.
    pub index: usize,
    /// Number of its first block in the whole network.
    pub first_block: usize,
    /// Number of chunks that earlier stages of the rank have.
    pub first_chunk: usize,
    /// For each block, the head last: the chunks that it uses, counted from the stage's first, ascending, each once.
    pub uses: Vec<Vec<usize>>,
    /// True if the last of `uses` is the head.
    pub has_head: bool,
    /// The first block that backward runs, or the number of blocks.
    pub lowest: usize,
    /// The chunks; those of trained parameters come first.
    pub chunks: Vec<ChunkSpec>,
    /// Number of chunks of trained parameters.
    pub trained: usize,
    /// True if this rank updates them: a copy that is updated elsewhere has no optimizer states and no master weights.
    pub is_updated: bool,
    /// Gradients that are terms of sums over the tensor axis.
    pub terms: Terms,
    /// Number of sums of squares of the trained chunks.
    pub squares: u64,
    /// Number of tiles that the trained chunks of earlier stages of the rank have.
    pub first_tile: usize,
}

/// A parameter of which several stages have a copy, alone in its chunk; each stage has a term of its gradient.
#[derive(Clone, Debug)]
pub struct TiedChunks {
    /// The copies of the rank: the chunk, counted over its stages, and the first element in what the rank updates of it.
    pub copies: Vec<(usize, u64)>,
    /// Elements of its gradient that this rank updates.
    pub elements: u64,
    /// True if other ranks have copies, too.
    pub is_shared: bool,
}

/// The gradients of a stage that are terms of sums over the tensor axis.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// Those in what this rank updates, in order.
    pub pieces: Vec<Piece>,
    /// Elements of the buffer in which they are summed.
    pub elements: u64,
}

/// Some of the elements that a rank updates of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The chunk, counted from the stage's first.
    pub chunk: usize,
    /// The first of them.
    pub start: u64,
    /// Their number.
    pub elements: u64,
}

/// One chunk.
#[derive(Clone, Debug)]
pub struct ChunkSpec {
    /// Elements, padding included.
    pub elements: u64,
    /// True if every rank keeps the parameters whole under stage 3.
    pub is_whole: bool,
    /// Element type of the parameters.
    pub dtype: DType,
    /// Memory of the parameters; outside of device memory only under stage 3.
    pub parameters: Memory,
    /// Memory of gradients from their reduction to the update.
    pub gradients: Memory,
    /// Memory of optimizer states and master weights.
    pub optimizer: Memory,
    /// Elements of each tile of what this rank updates.
    pub tiles: Vec<u64>,
    /// The same of gradients where they lie outside of device memory: of their sum, or of the whole chunk where micro-batches accumulate
    /// there.
    pub gradient_tiles: Vec<u64>,
    /// For each optimizer state: its numbers in each tile.
    pub states: Vec<Vec<u64>>,
    /// For each of these tiles: elements of memory for scaled gradients in its update.
    pub scaled: Vec<u64>,
    /// The elements of what this rank updates that it counts in the norm.
    pub counted: Range<u64>,
    /// Number of parameters.
    pub parameter_count: u64,
    /// True if no sum over another axis follows that of its gradients over data.
    pub is_summed_over_data_alone: bool,
}

/// Policies of storing and moving chunks. They change no bit of the result, but for `defer` and `sums_by_tree`.
#[derive(Clone, Copy, Debug)]
pub struct Policies {
    /// Which of parameters, gradients and states are sharded.
    pub stage: ZeroStage,
    /// True if communication overlaps computation.
    pub overlap: bool,
    /// Chunks gathered ahead of their use (stage 3).
    pub prefetch: usize,
    /// True if gradients are reduced once, after the last micro-batch.
    pub defer: bool,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// True if the gradients of several micro-batches are added by a tree.
    pub sums_by_tree: bool,
    /// Element types.
    pub precision: Precision,
    /// Ranks of the data axis.
    pub data_ranks: u64,
    /// True if kernels reach host memory. Elsewhere publications end with their phase: they hold staging buffers, which belong to it.
    pub host_addressable: bool,
    /// True if gradients take the place of parameters, of chunks in device memory: for one micro-batch.
    pub in_place: bool,
    /// True if the host updates chunks whose states lie outside of device memory. It does not where kernels reach host memory.
    pub updates_on_host: bool,
    /// True if the host computes each update during the next step.
    pub delayed: bool,
    /// True if chunks are updated within backward: for one micro-batch.
    pub in_backward: bool,
}

/// Buffers of a chunk's gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientBuffering {
    /// A whole buffer, reduced in place after the last micro-batch.
    InPlace,
    /// A whole buffer and a part, which has the sum, are kept.
    Pair,
    /// A part is kept, which has the sum; the whole buffer exists from its first gradient to its reduction.
    Transient,
}

/// The place of a chunk's summed gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientPlace {
    /// Buffers of its own in device memory.
    Buffer,
    /// Another memory. On the device are a whole buffer, from its first gradient to its reduction, and the sum meanwhile.
    Elsewhere,
    /// The place of the parameters. The whole buffer exists from its first gradient to its reduction.
    Parameters,
    /// None: the chunk is updated as soon as it is reduced, and the whole buffer is freed.
    Update,
}

impl Policies {
    /// The buffers of gradients.
    pub fn buffering(&self) -> GradientBuffering {
        let several = self.micro_batches > 1;
        // With one rank and equal types, nothing is communicated or rounded: micro-batches accumulate in one buffer.
        let is_alone = self.data_ranks == 1 && !self.rounds();
        match self.stage {
            _ if is_alone || (several && self.defer) => GradientBuffering::InPlace,
            ZeroStage::Zero | ZeroStage::One if several => GradientBuffering::Pair,
            ZeroStage::Zero | ZeroStage::One => GradientBuffering::InPlace,
            ZeroStage::Two | ZeroStage::Three => GradientBuffering::Transient,
        }
    }

    /// Returns whether there is something to add by a tree.
    pub fn has_tree(&self) -> bool {
        self.sums_by_tree && self.micro_batches > 1
    }

    /// Elements of what a rank updates of a chunk.
    pub fn part(&self, elements: u64) -> u64 {
        if self.stage == ZeroStage::Zero { elements } else { elements / self.data_ranks }
    }

    /// Returns whether kernels compute in a memory.
    pub fn reaches(&self, memory: Memory) -> bool {
        memory == Memory::Device || (memory == Memory::Host && self.host_addressable)
    }

    /// Returns whether what lies in a memory reaches the device by way of host memory.
    pub fn is_two_copies_away(&self, memory: Memory) -> bool {
        memory == Memory::Disk && !self.host_addressable
    }

    /// Returns whether gradients are communicated in another type than that in which they accumulate.
    pub fn rounds(&self) -> bool {
        self.precision.communicate != self.precision.accumulate
    }

    /// Reductions in flight while backward goes on; each holds a whole chunk. A single rank that updates within backward has nothing to
    /// wait for.
    pub fn reductions_behind(&self) -> usize {
        let is_alone = self.in_backward && self.data_ranks == 1;
        if self.overlap && !is_alone { 2 } else { 0 }
    }
}

impl RankChunks {
    /// The block runs of a phase, in order. Phases that compute nothing have none.
    pub fn demand(&self, phase: PhaseName) -> Vec<BlockRun> {
        let stages: Vec<StageBlocks> = self.stages.iter().map(StageChunks::blocks).collect();
        match phase {
            // Within backward, updates have used up what a diagnosis would look at.
            PhaseName::Diagnose if self.policies.in_backward => Vec::new(),
            PhaseName::Step | PhaseName::Diagnose => block_runs(&self.step, &stages, true),
            PhaseName::Evaluate => block_runs(&self.evaluation, &stages, false),
            _ => Vec::new(),
        }
    }
}

impl StageChunks {
    /// Its blocks.
    pub fn blocks(&self) -> StageBlocks {
        let blocks = self.uses.len() - usize::from(self.has_head);
        StageBlocks { index: self.index, blocks, has_head: self.has_head, lowest: self.lowest }
    }

    /// The chunks of trained parameters that a block uses.
    pub fn written(&self, block: usize) -> impl Iterator<Item = usize> + '_ {
        self.uses[block].iter().copied().filter(|chunk| *chunk < self.trained)
    }

    /// For each trained chunk: the blocks that write its gradients.
    pub fn writers(&self) -> Vec<Vec<usize>> {
        let mut writers = vec![Vec::new(); self.trained];
        (0..self.uses.len()).for_each(|b| self.written(b).for_each(|c| writers[c].push(b)));
        writers
    }

    /// The place of a chunk's summed gradient.
    pub fn place(&self, policies: &Policies, chunk: usize) -> GradientPlace {
        let spec = &self.chunks[chunk];
        let lies = [spec.parameters, spec.gradients, spec.optimizer];
        match spec.gradients {
            _ if policies.in_backward && spec.is_summed_over_data_alone => GradientPlace::Update,
            Memory::Device if policies.in_place && lies == [Memory::Device; 3] => GradientPlace::Parameters,
            Memory::Device => GradientPlace::Buffer,
            Memory::Host | Memory::Disk => GradientPlace::Elsewhere,
        }
    }

    /// The contents of the buffer that has the sum of a chunk, for the norm and the update.
    pub fn sum(&self, policies: &Policies, chunk: usize) -> Role {
        match (self.place(policies, chunk), policies.buffering()) {
            (GradientPlace::Elsewhere, _) => Role::Sum,
            (GradientPlace::Parameters, _) => Role::Parameters,
            (GradientPlace::Update, _) | (_, GradientBuffering::InPlace) => Role::Gradient,
            (_, GradientBuffering::Pair) if policies.stage == ZeroStage::Zero => Role::Gradient,
            (_, GradientBuffering::Pair | GradientBuffering::Transient) => Role::Sum,
        }
    }

    /// The tiles of what this rank updates, where an update works on one after another: where a part of the chunk visits the device, or
    /// gradients leave the place of parameters for a buffer.
    pub fn tiles(&self, policies: &Policies, chunk: usize) -> Option<&[u64]> {
        let spec = &self.chunks[chunk];
        let is_away = |memory: Memory| !policies.reaches(memory);
        let optimizer = chunk < self.trained && is_away(spec.optimizer);
        let gradients = chunk < self.trained && is_away(spec.gradients);
        let is_cut = optimizer
            || gradients
            || is_away(spec.parameters)
            || (chunk < self.trained && self.place(policies, chunk) == GradientPlace::Parameters);
        is_cut.then_some(&spec.tiles[..])
    }

    /// Bytes of optimizer states and master weights of a chunk on this rank.
    pub fn optimizer_bytes(&self, policies: &Policies, chunk: usize) -> u64 {
        let spec = &self.chunks[chunk];
        let has_master = policies.precision.has_master() && self.is_updated && chunk < self.trained;
        let master: u64 = spec.tiles.iter().filter(|_| has_master).sum();
        (spec.states.iter().flatten().sum::<u64>() + master) * DType::F32.bytes() as u64
    }

    /// For each tile on which an update of a chunk works: elements of memory for scaled gradients.
    pub fn scaled(&self, policies: &Policies, chunk: usize) -> Vec<u64> {
        let scaled = &self.chunks[chunk].scaled;
        match self.tiles(policies, chunk) {
            Some(_) => scaled.clone(),
            None => vec![scaled.iter().copied().max().unwrap_or(0)],
        }
    }

    /// Returns whether the host updates a chunk.
    pub fn is_updated_on_host(&self, policies: &Policies, chunk: usize) -> bool {
        policies.updates_on_host && self.chunks[chunk].optimizer != Memory::Device
    }

    /// The elements that a rank counts in the norm of a chunk whose gradients kernels do not reach, tile by tile: each tile, the first
    /// element in it, and their number.
    pub fn counted_pieces(&self, chunk: usize) -> Vec<(usize, u64, u64)> {
        let (spec, mut first) = (&self.chunks[chunk], 0);
        let piece = |(tile, elements): (usize, &u64)| {
            let (start, end) = (spec.counted.start.max(first), spec.counted.end.min(first + elements));
            let piece = (tile, start.saturating_sub(first), end.saturating_sub(start));
            first += elements;
            (piece.2 > 0).then_some(piece)
        };
        spec.gradient_tiles.iter().enumerate().filter_map(piece).collect()
    }

    /// Returns whether ranks store parts of a chunk's parameters and gather it for its uses.
    pub fn is_gathered(&self, stage: ZeroStage, chunk: usize) -> bool {
        stage == ZeroStage::Three && !self.chunks[chunk].is_whole
    }

    /// Returns whether ranks update parts of a chunk that all of them store, and publish them.
    pub fn is_published(&self, stage: ZeroStage, chunk: usize) -> bool {
        chunk < self.trained && stage != ZeroStage::Zero && !self.is_gathered(stage, chunk)
    }
}
