//! Positions of the parameters of a stage in chunks, and the memories in which chunks lie between their uses.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use phalanx_layers::{Network, Parameter, Share};
use phalanx_plan::{ChunkLayout, ZeroStage};
use phalanx_tensor::{DType, Memory, Shape};
use serde::{Deserialize, Serialize};

use super::{Holding, Options};

/// The memories of the parts of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkResidence {
    /// Parameters. Outside of device memory only under stage 3.
    pub parameters: Memory,
    /// Gradients, from their reduction to the update.
    pub gradients: Memory,
    /// Optimizer states and master weights.
    pub optimizer: Memory,
}

impl ChunkResidence {
    /// Everything in device memory.
    pub const DEVICE: ChunkResidence =
        ChunkResidence { parameters: Memory::Device, gradients: Memory::Device, optimizer: Memory::Device };
}

/// The memories of the chunks of one stage on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Residence {
    /// The first chunks, in order.
    chunks: Vec<ChunkResidence>,
    /// All chunks behind them.
    rest: ChunkResidence,
    /// The chunks whose parameters every rank keeps whole under stage 3, as under stage 2.
    #[serde(default)]
    whole: BTreeSet<usize>,
}

impl Residence {
    /// Every chunk in device memory.
    pub const DEVICE: Residence = Residence::uniform(ChunkResidence::DEVICE);

    /// The same memories for every chunk.
    pub const fn uniform(chunk: ChunkResidence) -> Residence {
        Residence { chunks: Vec::new(), rest: chunk, whole: BTreeSet::new() }
    }

    /// Memories for each of the first chunks, and those of all chunks behind them.
    pub fn of_chunks(chunks: Vec<ChunkResidence>, rest: ChunkResidence) -> Residence {
        Residence { chunks, rest, whole: BTreeSet::new() }
    }

    /// The same with the parameters of some chunks whole on every rank under stage 3, in device memory.
    #[must_use]
    pub fn with_whole(self, whole: impl IntoIterator<Item = usize>) -> Residence {
        Residence { whole: whole.into_iter().collect(), ..self }
    }

    /// Returns whether every rank keeps the parameters of chunk number `chunk` whole under stage 3.
    pub fn is_whole(&self, chunk: usize) -> bool {
        self.whole.contains(&chunk)
    }

    /// The memories of chunk number `chunk` of the stage.
    pub fn of(&self, chunk: usize) -> ChunkResidence {
        self.chunks.get(chunk).copied().unwrap_or(self.rest)
    }

    /// The memories of every chunk that is described, each combination once or more.
    pub fn described(&self) -> impl Iterator<Item = ChunkResidence> {
        self.chunks.iter().copied().chain([self.rest])
    }
}

/// Positions of the parameters in chunks, and the chunks that each block uses. It does not change during a run.
pub(super) struct Map {
    pub(super) layout: Arc<ChunkLayout>,
    pub(super) types: Vec<DType>,
    /// Shape of each parameter.
    pub(super) shapes: Vec<Shape>,
    /// For each parameter: number of those that are joined in it.
    members: Vec<usize>,
    /// For each parameter: whether this copy counts in norms and is written to checkpoints. Exactly one of several
    /// copies counts.
    pub(super) answers: Vec<bool>,
    /// For each parameter whose gradient is one term of a sum over the tensor axis: which part of it.
    pub(super) terms: Vec<Option<Share>>,
    /// For each parameter: whether the rules of operations do not know that its gradient is a term.
    pub(super) are_marked: Vec<bool>,
    /// For each parameter: whether several stages have a copy, each with one term of its gradient.
    tied: Vec<bool>,
    /// For each parameter: its number in the whole model.
    pub(super) numbers: Vec<usize>,
    /// For each block, the head last: its parameters, in the layer's order.
    pub(super) uses: Vec<Vec<usize>>,
    /// For each block: the chunks that it uses, ascending, each once.
    pub(super) chunks: Vec<Vec<usize>>,
    /// Number of chunks of trained parameters. They come first.
    pub(super) trained: usize,
    /// The memories in which the parts of the chunks lie between their uses.
    pub(super) residence: Residence,
    stage: ZeroStage,
    rank: u64,
    world: u64,
}

impl Map {
    pub(super) fn new(
        network: &Network,
        held: &Holding,
        (options, compute): (&Options, DType),
        [rank, world]: [usize; 2],
    ) -> Map {
        let layout = Arc::clone(&held.layout);
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
            are_marked: specs.iter().map(|p| !p.partial).collect(),
            trained: last_trained.map_or(0, |p| layout.placed[p].chunk + 1),
            numbers: network.numbers.clone(),
            answers: held.answers.clone(),
            tied: held.tied.iter().zip(specs).map(|(tied, p)| *tied && p.trained).collect(),
            chunks: network.uses.iter().map(chunks_of).collect(),
            uses: network.uses.clone(),
            residence: options.residence[held.stage].clone(),
            stage: options.stage,
            layout,
            rank: rank as u64,
            world: world as u64,
        }
    }

    /// The parameters of a block, each with the number of those that are joined in it.
    pub(super) fn joining<'a>(
        &self,
        block: usize,
        parameters: impl Iterator<Item = Parameter<'a>>,
    ) -> Vec<Parameter<'a>> {
        let members = self.uses[block].iter().map(|p| self.members[*p]);
        parameters.zip(members).map(|(parameter, members)| parameter.joining(members)).collect()
    }

    pub(super) fn is_trained(&self, parameter: usize) -> bool {
        self.layout.placed[parameter].chunk < self.trained
    }

    /// Blocks of the norm of trained parameters: they come first.
    pub(super) fn trained_blocks(&self) -> u64 {
        self.layout.first_block.get(self.trained).copied().unwrap_or(self.layout.blocks)
    }

    pub(super) fn whole(&self, chunk: usize) -> Range<usize> {
        0..self.layout.chunk_elements[chunk] as usize
    }

    /// This rank's shard of a chunk, in elements of the chunk.
    pub(super) fn shard(&self, chunk: usize) -> Range<usize> {
        let range = self.layout.shard(chunk, self.rank, self.world);
        range.start as usize..range.end as usize
    }

    /// The elements of a chunk that this rank updates: all of them under stage 0, otherwise its shard.
    pub(super) fn updated(&self, chunk: usize) -> Range<usize> {
        match self.stage {
            ZeroStage::Zero => self.whole(chunk),
            _ => self.shard(chunk),
        }
    }

    /// Returns whether the sum of a chunk's gradients over the data axis is complete: no sum over another axis follows.
    pub(super) fn is_summed_over_data_alone(&self, chunk: usize) -> bool {
        self.layout.parameters(chunk).all(|p| self.terms[p].is_none() && !self.tied[p])
    }

    /// The elements of a chunk that are a parameter.
    pub(super) fn range(&self, parameter: usize) -> Range<usize> {
        let placed = &self.layout.placed[parameter];
        placed.offset as usize..(placed.offset + placed.elements) as usize
    }

    /// The parts of parameters in some elements of a chunk: each parameter with its elements of the chunk.
    pub(super) fn parameters_in(
        &self,
        chunk: usize,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let segments = self.layout.segments(chunk, range.start as u64..range.end as u64);
        segments.map(|s| (s.parameter, s.in_chunk.start as usize..s.in_chunk.end as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_behind_the_described_ones_lie_with_the_rest() {
        let host = ChunkResidence { optimizer: Memory::Host, ..ChunkResidence::DEVICE };
        let residence = Residence::of_chunks(vec![host, ChunkResidence::DEVICE], host);
        let of: Vec<_> = (0..4).map(|chunk| residence.of(chunk).optimizer).collect();
        assert_eq!(of, [Memory::Host, Memory::Device, Memory::Host, Memory::Host]);
        assert_eq!(Residence::uniform(host).of(7), host);
        assert_eq!(Residence::DEVICE.described().collect::<Vec<_>>(), [ChunkResidence::DEVICE]);
    }
}
