//! Note for the user about the sizes of chunks, before a run starts.

use phalanx_plan::BLOCK;

use crate::engine::parameter_sizes::sizes;
use crate::engine::spec::Spec;

impl Spec {
    /// The reason of the chunk size, if it is a parameter that the optimizer updates as a whole: each rank's shard of a chunk has
    /// room for it.
    pub fn chunk_note(&self) -> Option<String> {
        let sizes = sizes(&self.update.optimizer, &self.model.whole());
        let whole = sizes.iter().enumerate().filter(|(_, size)| size.whole && !size.alone);
        let (at, largest) = whole.max_by_key(|(_, size)| size.reserved)?;
        let (shard, ranks) = (largest.reserved.next_multiple_of(BLOCK), self.mesh.axes.data as u64);
        let elements = self.mesh.layout.chunk_elements[self.mesh.layout.placed[at].chunk];
        (elements == ranks * shard).then(|| {
            format!(
                "memory.chunk is raised to {elements} elements, {shard} on each of {ranks} data-parallel ranks: the optimizer updates \
                 `{}` as a whole, on one of them",
                largest.name
            )
        })
    }
}
