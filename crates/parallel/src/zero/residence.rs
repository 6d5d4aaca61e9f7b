//! The memories in which chunks lie between their uses.

use std::collections::BTreeSet;

use phalanx_tensor::Memory;
use serde::{Deserialize, Serialize};

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
