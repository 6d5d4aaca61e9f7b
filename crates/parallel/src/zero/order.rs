//! The order in which the chunks of a stage are updated, and which of them within backward.

use phalanx_tensor::Memory;

use super::visits::{AHEAD, BEHIND, Window};
use super::{Map, Options};

/// Returns whether a chunk is updated within backward.
pub(super) fn is_updated_in_backward(map: &Map, options: &Options, c: usize) -> bool {
    options.update_in_backward && map.is_summed_over_data_alone(c)
}

/// # Panics
/// With options that need all gradients before the first update, or gradients after it.
pub(super) fn assert_possible(map: &Map, options: &Options, micro_batches: usize) {
    let keeps = map.residence.described().any(|lies| lies.gradients != Memory::Device);
    let contradicts = micro_batches > 1 || options.delayed_update || options.gradients_in_place || keeps;
    assert!(!(options.update_in_backward && contradicts), "no updates within backward: {options:?}");
}

/// The order in which the chunks of a stage are updated.
pub(super) struct UpdateOrder {
    pub(super) chunks: Vec<usize>,
    /// Number of chunks that are updated within backward; they come first.
    within: usize,
    /// After how many blocks of backward some are.
    pauses: usize,
}

impl UpdateOrder {
    /// Ascending; within backward, in the order in which its blocks, from the last to the first, complete the chunks.
    pub(super) fn new(map: &Map, options: &Options) -> UpdateOrder {
        let blocks = 0..map.uses.len();
        let mut awaited = vec![0; map.trained];
        blocks.clone().flat_map(|block| map.written(block)).for_each(|c| awaited[c] += 1);
        let (mut chunks, mut pauses) = (Vec::new(), 0);
        for block in blocks.rev() {
            map.written(block).for_each(|c| awaited[c] -= 1);
            let completed = map.written(block).filter(|c| awaited[*c] == 0);
            let before = chunks.len();
            chunks.extend(completed.filter(|c| is_updated_in_backward(map, options, *c)));
            pauses += usize::from(chunks.len() > before);
        }
        let within = chunks.len();
        let rest: Vec<usize> = (0..map.trained).filter(|c| !chunks.contains(c)).collect();
        chunks.extend(rest);
        UpdateOrder { chunks, within, pauses }
    }

    /// Number of `tiles` in flight beside the one that is updated. Within backward, the kernels of a block run between updates:
    /// meanwhile as many tiles are read and written as a block's chunks have on average.
    pub(super) fn window(&self, tiles: usize) -> Window {
        let between = if self.within == 0 { 0 } else { tiles.div_ceil(self.pauses.max(1)) };
        Window { ahead: between.max(AHEAD), behind: between.max(BEHIND) }
    }

    /// Number of chunks that are updated within backward; they come first.
    pub(super) fn within(&self) -> usize {
        self.within
    }
}
