//! The chunks of a rank and the policies by which they are stored and moved: all that a program is made from.

use crate::pipeline::Step;
use crate::trace::Memory;
use crate::zero::{Precision, ZeroStage};

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
    /// Gradients that are terms of sums over the tensor axis.
    pub terms: Terms,
    /// Number of sums of squares of the trained chunks.
    pub squares: u64,
}

/// A parameter of which several stages have a copy, alone in its chunk; each stage has a term of its gradient.
#[derive(Clone, Debug)]
pub struct TiedChunks {
    /// The chunks of the rank that have a copy, counted over its stages.
    pub chunks: Vec<usize>,
    /// Elements of its gradient that this rank updates.
    pub elements: u64,
    /// True if other ranks have copies, too.
    pub is_shared: bool,
}

/// The gradients of a stage that are terms of sums over the tensor axis.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// The chunks that have some in what this rank updates.
    pub chunks: Vec<usize>,
    /// Elements of the buffer in which they are summed.
    pub elements: u64,
}

/// One chunk.
#[derive(Clone, Debug)]
pub struct ChunkSpec {
    /// Elements, padding included.
    pub elements: u64,
    /// True if every rank keeps the parameters whole under stage 3.
    pub is_whole: bool,
    /// Memory of the parameters; outside of device memory only under stage 3.
    pub parameters: Memory,
    /// Memory of optimizer states and master weights.
    pub optimizer: Memory,
    /// Elements of each tile of what this rank updates.
    pub tiles: Vec<u64>,
    /// For each optimizer state: its numbers in each tile.
    pub states: Vec<Vec<u64>>,
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
    /// True if gradients take the place of parameters: for one micro-batch.
    pub in_place: bool,
}

/// Buffers of a chunk's gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientBuffering {
    /// A whole buffer is kept, and reduced in place after the last micro-batch.
    InPlace,
    /// A whole buffer and a part, which has the sum, are kept.
    Pair,
    /// A part is kept, which has the sum; the whole buffer exists from its first gradient to its reduction.
    Transient,
    /// The whole buffer exists from its first gradient to its reduction in place; the sum then overwrites the parameters.
    OverParameters,
}

impl Policies {
    /// The buffers of gradients.
    pub fn buffering(&self) -> GradientBuffering {
        let several = self.micro_batches > 1;
        // With one rank and equal types, nothing is communicated or rounded: micro-batches accumulate in one buffer.
        let is_alone = self.data_ranks == 1 && !self.rounds();
        match self.stage {
            _ if self.in_place => GradientBuffering::OverParameters,
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

    /// Reductions in flight while backward goes on; each holds a whole chunk.
    pub fn reductions_behind(&self) -> usize {
        if self.overlap { 2 } else { 0 }
    }
}

impl StageChunks {
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

    /// The tiles of what this rank updates, where an update works on one after another: where a part of the chunk visits the device, or
    /// gradients leave the place of parameters for a buffer.
    pub fn tiles(&self, policies: &Policies, chunk: usize) -> Option<&[u64]> {
        let spec = &self.chunks[chunk];
        let is_cut =
            policies.in_place || !policies.reaches(spec.optimizer) || !policies.reaches(spec.parameters);
        is_cut.then_some(&spec.tiles[..])
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
