//! Where every chunk of a rank lies, and what a step moves for it: what `phalanx plan --placement` shows.

use phalanx_parallel::Stage;
use phalanx_parallel::zero::ChunkResidence;
use phalanx_plan::{blocks_in_order, fetch_counts};
use phalanx_trace::{Memory, PhaseName};
use serde::Serialize;

use crate::dry_run::{DryRuns, Learned, on_meta_without_order};
use crate::planning::RunPlan;
use crate::rank::Rank;
use crate::spec::Spec;

/// A chunk of a rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlacedChunk {
    /// Number of the pipeline stage.
    pub stage: usize,
    /// Number of the chunk in its stage.
    pub chunk: usize,
    /// Its first parameter.
    pub first: String,
    /// Its last parameter.
    pub last: String,
    /// Elements of the whole chunk, padding included.
    pub elements: u64,
    /// Where its parts lie between their uses.
    #[serde(flatten)]
    pub lies: ChunkResidence,
    /// Bytes that a step copies for it; where they pass another memory on their way, those of each part of the way.
    pub moved_bytes: u64,
}

impl RunPlan {
    /// The chunks of a rank, in order.
    pub fn placed_chunks(&self, rank: usize) -> Vec<PlacedChunk> {
        let spec = &self.spec;
        let engine = on_meta_without_order(spec, rank, &Rank::new);
        let runs = DryRuns { spec, make_rank: &Rank::new, abridges: true };
        let learned = if spec.stage.number() == 0 { Learned::nothing() } else { runs.learn(rank) };
        let blocks = blocks_in_order(&runs.trace(rank, &learned), PhaseName::Step);
        let (mut all, mut first_chunk) = (Vec::new(), 0);
        for stage in engine.stages() {
            let own = first_chunk as u32..(first_chunk + stage.zero.chunks()) as u32;
            let of_stage: Vec<Vec<u32>> = blocks
                .iter()
                .filter(|block| block.iter().all(|chunk| own.contains(chunk)))
                .map(|block| block.iter().map(|chunk| chunk - own.start).collect())
                .collect();
            let fetches = fetch_counts(&of_stage, spec.prefetch);
            let fetches = |chunk: usize| fetches.get(&(chunk as u32)).copied().unwrap_or(0);
            all.extend((0..stage.zero.chunks()).map(|chunk| placed(spec, stage, chunk, fetches(chunk))));
            first_chunk += stage.zero.chunks();
        }
        all
    }
}

fn placed(spec: &Spec, stage: &Stage, chunk: usize, fetches: u64) -> PlacedChunk {
    let layout = stage.zero.layout();
    let parameters = layout.parameters(chunk);
    let name = |parameter: usize| stage.network.parameters[parameter].name.clone();
    let lies = spec.residence[stage.index].of(chunk);
    let parts = moved_parts(spec, lies, fetches);
    let bytes: u64 = parts.into_iter().map(|(memory, bytes)| ways(spec, memory) * bytes).sum();
    PlacedChunk {
        stage: stage.index,
        chunk,
        first: name(parameters.start),
        last: name(parameters.end - 1),
        elements: layout.chunk_elements[chunk],
        lies,
        moved_bytes: bytes * stage.zero.updated_elements(chunk),
    }
}

/// For each part: its memory, and the bytes per element that a step brings and returns.
fn moved_parts(spec: &Spec, lies: ChunkResidence, fetches: u64) -> [(Memory, u64); 2] {
    let has_master = spec.precision.has_master();
    let states = spec.optimizer.states().len() as u64 + u64::from(has_master);
    // Each block brings parameters; the update writes them, and reads them unless it rounds master weights.
    let uses = fetches + if has_master { 1 } else { 2 };
    [(lies.optimizer, 2 * 4 * states), (lies.parameters, uses * spec.precision.compute.bytes() as u64)]
}

/// Copies on the way between a memory and the device.
fn ways(spec: &Spec, memory: Memory) -> u64 {
    match memory {
        Memory::Device => 0,
        Memory::Host => 1,
        Memory::Disk if spec.host_addressable => 1,
        Memory::Disk => 2,
    }
}
