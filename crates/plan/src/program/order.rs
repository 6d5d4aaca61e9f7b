//! The order in which the chunks of a stage are updated, and which of them within backward.

use super::chunks::{GradientPlace, Policies, StageChunks};
use super::list::Role;

/// Tiles that arrive while an update works on an earlier one, and that return while it works on a later one.
pub(super) const AHEAD: usize = 2;
const BEHIND: usize = 2;

/// The optimizer states of a chunk, then its master weights.
pub(super) fn optimizer_roles(
    policies: &Policies,
    stage: &StageChunks,
    c: usize,
) -> impl Iterator<Item = Role> + use<> {
    let states = (0..stage.chunks[c].states.len() as u16).map(Role::State);
    states.chain((policies.precision.has_master() && stage.is_updated).then_some(Role::Master))
}

/// The order of updates.
pub(super) struct UpdateOrder {
    pub(super) chunks: Vec<usize>,
    /// Number of chunks that are updated within backward; they come first.
    pub(super) within: usize,
    /// After how many blocks of backward some are.
    pauses: usize,
}

/// Numbers of tiles in flight beside the one that is updated.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub(super) ahead: usize,
    pub(super) behind: usize,
}

impl UpdateOrder {
    /// Ascending; within backward, in the order in which its blocks, from the last to the first, complete the chunks.
    pub(super) fn new(stage: &StageChunks, policies: &Policies) -> UpdateOrder {
        let mut awaited: Vec<usize> = stage.writers().iter().map(Vec::len).collect();
        let (mut chunks, mut pauses) = (Vec::new(), 0);
        for block in (0..stage.uses.len()).rev() {
            stage.written(block).for_each(|c| awaited[c] -= 1);
            let completed = stage.written(block).filter(|c| awaited[*c] == 0);
            let before = chunks.len();
            chunks.extend(completed.filter(|c| stage.place(policies, *c) == GradientPlace::Update));
            pauses += usize::from(chunks.len() > before);
        }
        let within = chunks.len();
        let rest: Vec<usize> = (0..stage.trained).filter(|c| !chunks.contains(c)).collect();
        chunks.extend(rest);
        UpdateOrder { chunks, within, pauses }
    }

    /// The window of an update of `tiles` tiles. Within backward, the kernels of a block run between updates: meanwhile as many tiles are
    /// read and written as a block's chunks have on average.
    pub(super) fn window(&self, tiles: usize) -> Window {
        let between = if self.within == 0 { 0 } else { tiles.div_ceil(self.pauses.max(1)) };
        Window { ahead: between.max(AHEAD), behind: between.max(BEHIND) }
    }
}
