//! Sizes of what a rank stores of its chunks, for plans.

use std::ops::Range;

use phalanx_plan::ChunkLayout;
use phalanx_tensor::DType;

use super::{Zero, update};

impl Zero {
    /// Number of chunks.
    pub fn chunks(&self) -> usize {
        self.map.chunk_count()
    }

    /// The positions of the parameters in the chunks.
    pub fn layout(&self) -> &ChunkLayout {
        &self.map.layout
    }

    /// Number of chunks of trained parameters. They come first.
    pub fn trained_chunks(&self) -> usize {
        self.map.trained
    }

    /// Number of elements of a chunk that this rank updates, or would update if it were trained.
    pub fn updated_elements(&self, chunk: usize) -> u64 {
        update::stepped(&self.map, self.options.stage, chunk).len() as u64
    }

    /// Bytes of optimizer states and master weights of a chunk on this rank.
    pub fn optimizer_bytes(&self, chunk: usize) -> u64 {
        self.states.optimizer_bytes(chunk)
    }

    /// Elements of each tile of this rank's part of a chunk.
    pub fn tile_elements(&self, chunk: usize) -> Vec<u64> {
        self.states.chunks[chunk].tiles.iter().map(|tile| tile.len() as u64).collect()
    }

    /// For each optimizer state of a chunk: its numbers in each tile, or all of them where it is not stored in tiles.
    pub fn state_numbers(&self, chunk: usize) -> Vec<Vec<u64>> {
        self.states.state_numbers(chunk)
    }

    /// Elements of each tile of a chunk's gradients, where they are stored outside of device memory; else none.
    pub fn gradient_tiles(&self, chunk: usize) -> Vec<u64> {
        self.states.gradient_tiles(chunk)
    }

    /// For each tile on which an update of a chunk works: elements of memory for scaled gradients; 0 where it needs none.
    pub fn scaled_elements(&self, chunk: usize) -> Vec<u64> {
        let first = update::stepped(&self.map, self.options.stage, chunk).start;
        let scaled = |tile: Range<usize>| {
            let range = first + tile.start..first + tile.end;
            self.rules.scaled_elements_max(&self.map, chunk, &range).unwrap_or(0) as u64
        };
        self.update_tiles(chunk).into_iter().map(scaled).collect()
    }

    /// Elements of what this rank updates of a chunk that it counts in the norm.
    pub fn counted(&self, chunk: usize) -> Range<u64> {
        let (first, shard) =
            (update::stepped(&self.map, self.options.stage, chunk).start, self.map.shard(chunk));
        (shard.start - first) as u64..(shard.end - first) as u64
    }

    /// Returns whether the sum of a chunk's gradients over the data axis is complete.
    pub fn is_summed_over_data_alone(&self, chunk: usize) -> bool {
        self.map.is_summed_over_data_alone(chunk)
    }

    /// Element type of the parameters of a chunk.
    pub fn parameter_type(&self, chunk: usize) -> DType {
        self.map.types[chunk]
    }
}
