//! The sums of squares of the gradients of a stage, block by block.
//!
//! A chunk is counted when its summed gradients are on the device: at the norm, or, where they lie in another memory,
//! before they leave for it. Each block has a place of its own, so the order does not change a bit.

use std::ops::Range;

use phalanx_tensor::{Category, DType, Device, NORM_BLOCK, Tensor, View};

use super::Map;

/// Sums of squares of all blocks of trained parameters, and which chunks of this step they have.
pub(super) struct Squares {
    /// `[blocks]` f64
    pub(super) blocks: Option<Tensor>,
    /// True once they were set to zero in this step.
    is_begun: bool,
    /// For each chunk: whether this rank's part is counted.
    counted: Vec<bool>,
}

impl Squares {
    pub(super) fn new(device: &Device, map: &Map) -> Squares {
        let blocks = map.trained_blocks();
        let blocks = device.alloc(DType::F64, [blocks], Category::Workspace, "norm.squares");
        Squares { blocks: Some(blocks), is_begun: false, counted: vec![false; map.trained] }
    }

    /// A step begins: nothing is counted.
    pub(super) fn restart(&mut self) {
        self.is_begun = false;
        self.counted.fill(false);
    }

    /// The chunks of which this rank's part is not counted yet. The next norm needs them.
    pub(super) fn begin_rest(&mut self, device: &Device) -> Vec<usize> {
        self.begin(device);
        (0..self.counted.len()).filter(|c| !self.counted[*c]).collect()
    }

    /// Counts the whole part of a chunk that this rank counts.
    pub(super) fn count(&mut self, device: &Device, map: &Map, c: usize, shard: View) {
        self.begin(device);
        self.counted[c] = true;
        self.add(device, map, c, map.shard(c), shard);
    }

    /// Counts elements `range` of a chunk: whole blocks, except at the end of a parameter.
    pub(super) fn add(&mut self, device: &Device, map: &Map, c: usize, range: Range<usize>, gradient: View) {
        let squares = self.blocks.as_mut().expect("the norm puts them back");
        for segment in map.layout.segments(c, range.start as u64..range.end as u64) {
            let start = segment.in_chunk.start as usize;
            assert!(start.is_multiple_of(NORM_BLOCK), "shards, tiles and parameters start at whole blocks");
            let part = gradient.range(start - range.start..segment.in_chunk.end as usize - range.start);
            let block = map.layout.first_block[c] as usize + start / NORM_BLOCK;
            let blocks = part.elements().div_ceil(NORM_BLOCK);
            device.block_squares(part, squares.view_mut().range(block..block + blocks));
        }
    }

    fn begin(&mut self, device: &Device) {
        if !std::mem::replace(&mut self.is_begun, true) {
            let squares = self.blocks.as_mut().expect("the norm puts them back");
            device.fill(squares.view_mut(), 0.0);
        }
    }
}
