//! The chunk sizes that a run could have, side by side: what `phalanx plan --chunks` shows.
//!
//! Gemini's search looks at padding alone. Here each size is planned with all micro-batches on one rank: the peak of each
//! memory, the buffers of collectives, and what moves by message size, which decides how fast it moves.

use phalanx_plan::trace::{Category, Memory, PhaseName};
use phalanx_plan::{
    BLOCK, ChunkBytes, ChunkSize, MemoryError, Search, Traffic, category_peak, plan_memory_of, traffic,
};

use crate::engine::rank::Rank;
use crate::engine::spec::Spec;
pub use crate::planner::chunk_choice::Origin;
use crate::planner::chunk_choice::{Sized, candidates, largest_end};
use crate::planner::dry_run::DryRuns;

/// A chunk size with its plan on one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct ChunkAlternative {
    /// Origin of the size.
    pub origin: Origin,
    /// The size.
    pub size: ChunkSize,
    /// True if the run uses it.
    pub chosen: bool,
    /// Number of chunks of the whole model, in the parts that a tensor rank has.
    pub chunks: usize,
    /// Bytes of the largest chunk.
    pub largest_bytes: u64,
    /// Bytes of all chunks.
    pub padded_bytes: u64,
    /// Bytes of all chunks that hold no parameter.
    pub waste_bytes: u64,
    /// Planned peaks of device, host and disk memory.
    pub peaks: [u64; 3],
    /// Most bytes that a step has in buffers of collectives: gathered chunks, and gradients on their way.
    pub gathered_bytes: u64,
    /// Traffic of a step over the data axis and between memories.
    pub traffic: Vec<Traffic>,
}

impl Spec {
    /// The sizes that `memory.chunk = "auto"` tries with the knobs of `search`, and the own size of this run, which is
    /// chosen; on the rank that needs most. Sizes without a plan are left out.
    ///
    /// # Errors
    /// When a memory cannot be planned: a bug of the engine.
    pub fn chunk_alternatives(&self, search: Search) -> Result<Vec<ChunkAlternative>, MemoryError> {
        let mut sized = match self.with_chunks(ChunkSize::Auto(search)) {
            Ok(auto) => candidates(&auto),
            Err(_) => Vec::new(),
        };
        let own = |other: &Sized| other.spec.mesh.layout.chunk_elements == self.mesh.layout.chunk_elements;
        if !sized.iter().any(own) {
            let chunks = self.mesh.layout.chunks();
            let origin = if self.mesh.chunk_size == ChunkSize::None { Origin::None } else { Origin::Fixed };
            sized.insert(0, Sized { spec: self.clone(), chunks, origin });
        }
        let Some((_, rank)) = largest_end(self, &Rank::new) else { return Ok(Vec::new()) };
        sized.iter().map(|other| other.planned(rank, own(other))).collect()
    }
}

impl Sized {
    fn planned(&self, rank: usize, chosen: bool) -> Result<ChunkAlternative, MemoryError> {
        let Sized { spec, chunks, origin } = self;
        let runs = DryRuns::of(spec, &Rank::new);
        let trace = runs.trace(rank);
        let peak = |memory| plan_memory_of(&trace, memory).map(|plan| plan.arena_bytes);
        let [device, host, disk] = Memory::ALL.map(peak);
        let compute = spec.precision.types.compute;
        let ChunkBytes { largest, all, waste } = spec.mesh.layout.bytes(compute);
        let step = trace.phase(PhaseName::Step).expect("every dry run has a step");
        // A chunk has at least one block on each rank.
        let smallest = compute.bytes() as u64 * BLOCK;
        Ok(ChunkAlternative {
            origin: *origin,
            size: spec.mesh.chunk_size.clone(),
            chosen,
            chunks: *chunks,
            largest_bytes: largest,
            padded_bytes: all,
            waste_bytes: waste,
            peaks: [device?, host?, disk?],
            gathered_bytes: category_peak(&trace, PhaseName::Step, Memory::Device, Category::Communication),
            traffic: traffic(step, smallest),
        })
    }
}
