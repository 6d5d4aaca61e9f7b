//! Chooses the chunk size under `memory.chunk = "auto"`: the one with the smallest planned peak.
//!
//! Large chunks need large buffers, and a chunk that is gathered or reduced holds all that it has. Small chunks are padded
//! more: each is a whole number of blocks on every rank, so on many ranks a small tensor in a chunk of its own takes as much
//! as a large one. Which of the two is more depends on the model and the mesh. So a few sizes are planned, from one tensor a
//! chunk up to a quarter of a stage, and the one that pads least (`plan::chunk_search`). Of sizes with the same peak, the
//! one with fewest chunks is taken: it communicates least often. Results do not depend on the size.
//!
//! Each size is planned on one rank, the one of the first and the last pipeline stage that needs more.

use phalanx_plan::{ChunkSize, Coordinates, Stage, plan_memory_of};
use phalanx_trace::{Memory, Trace};

use crate::dry_run::{DryRuns, Learned};
use crate::rank::Rank;
use crate::spec::{Spec, TriedChunks};

/// Halvings of a quarter of a stage that are tried.
const HALVINGS: u32 = 5;

/// Sizes that are planned with all micro-batches, those that need least without.
const EXACT: usize = 3;

impl Spec {
    /// The specification with a chunk size in the place of `auto`.
    pub(crate) fn with_chosen_chunks(self) -> Spec {
        if !matches!(self.chunk_size, ChunkSize::Auto(_)) {
            return self;
        }
        let mut sizes = candidates(&self).into_iter();
        let Some(first) = sizes.next() else { return self };
        // The rank that needs most stands for all.
        let at = |pipeline| self.mesh.rank(Coordinates { pipeline, data: 0, tensor: 0 });
        let ends = [0, self.mesh.pipeline - 1];
        let ends = &ends[..self.mesh.pipeline.min(2)];
        let largest = ends.iter().filter_map(|end| Some((roughly(&first, at(*end))?, at(*end)))).max();
        let Some((bytes, rank)) = largest else { return self };
        let mut all = vec![(bytes, first)];
        all.extend(sizes.filter_map(|spec| Some((roughly(&spec, rank)?, spec))));
        all.sort_by_key(|(bytes, spec)| (*bytes, spec.layout.chunks()));
        // Offsets may take a little more than what is live: those that need least are planned as a whole.
        for (bytes, spec) in all.iter_mut().take(EXACT) {
            *bytes = planned(spec, rank).unwrap_or(*bytes);
        }
        let tried = |(bytes, spec): &(u64, Spec)| TriedChunks {
            size: spec.chunk_size.clone(),
            chunks: spec.layout.chunks(),
            bytes: *bytes,
        };
        let tried: Vec<TriedChunks> = all.iter().map(tried).collect();
        let exact = all.into_iter().take(EXACT);
        let best = exact.min_by_key(|(bytes, spec)| (*bytes, spec.layout.chunks()));
        best.map_or(self, |(_, spec)| Spec { tried_chunks: tried, ..spec })
    }
}

/// The specifications with the sizes that are tried, each layout once; first that with one tensor a chunk.
fn candidates(spec: &Spec) -> Vec<Spec> {
    let elements = spec.layout.placed.iter().map(|placed| placed.elements).sum::<u64>();
    let quarter = elements / (4 * spec.mesh.tensor * spec.stages.len()).max(1) as u64;
    let tightest = spec.layout.searched.iter().min_by_key(|candidate| candidate.waste_elements);
    let mut sizes = vec![ChunkSize::None];
    sizes.extend(tightest.map(|candidate| ChunkSize::Elements(candidate.chunk_elements)));
    // Where nothing is gathered or reduced chunk by chunk, chunks differ in their padding only.
    if spec.mesh.data > 1 || spec.stage >= Stage::Two {
        sizes.extend((0..HALVINGS).map(|half| ChunkSize::Elements((quarter >> half).max(1))));
    }
    let mut specs: Vec<Spec> = Vec::new();
    for size in sizes {
        if let Ok(candidate) = spec.with_chunks(size)
            && specs.iter().all(|other| other.layout.chunk_elements != candidate.layout.chunk_elements)
        {
            specs.push(candidate);
        }
    }
    specs
}

/// Bytes that a rank needs in its memories; `None` where it has no plan.
fn planned(spec: &Spec, rank: usize) -> Option<u64> {
    let runs = DryRuns { spec, make_rank: &Rank::new, abridges: true };
    let learned = if spec.stage == Stage::Zero { Learned::nothing() } else { runs.learn(rank) };
    arena_bytes(&runs.trace(rank, &learned))
}

/// The same without the micro-batches that repeat themselves.
fn roughly(spec: &Spec, rank: usize) -> Option<u64> {
    arena_bytes(&DryRuns { spec, make_rank: &Rank::new, abridges: true }.short_trace(rank))
}

fn arena_bytes(trace: &Trace) -> Option<u64> {
    let of = |memory| plan_memory_of(trace, memory).ok().map(|plan| plan.arena_bytes);
    Some(of(Memory::Device)? + of(Memory::Host)?)
}
