//! Memories of every chunk of a rank, and bytes that a step moves for it, as `phalanx plan --placement` shows them.

use phalanx_parallel::zero::{ChunkResidence, Residence};
use phalanx_plan::Lookahead;
use phalanx_plan::program::{ChunkSpec, StageChunks};
use phalanx_plan::trace::{Event, PhaseName};
use serde::Serialize;

use crate::engine::rank::Rank;
use crate::engine::spec::Spec;
use crate::planner::dry_run::{DryRuns, on_meta};
use crate::planner::planning::RunPlan;

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
    /// True if its parameters are trained: a frozen chunk has neither gradients nor optimizer states.
    pub trained: bool,
    /// Memories in which its parts lie between their uses.
    #[serde(flatten)]
    pub lies: ChunkResidence,
    /// Bytes that a step copies for it. A copy by way of another memory counts once for each part of the way.
    pub moved_bytes: u64,
}

impl RunPlan {
    /// The chunks of a rank, in order. What a step moves for a chunk is what it would not move if the chunk lay in device
    /// memory: the rank runs dry once more for each kind of chunk with a part elsewhere.
    pub fn placed_chunks(&self, rank: usize) -> Vec<PlacedChunk> {
        let spec = &self.spec;
        let (_, engine) = on_meta(spec, rank, &Rank::new);
        let copied = |spec: &Spec| copied_bytes(spec, rank);
        let all = copied(spec);
        let order = engine.uses_of_step();
        let described = engine.chunks().described();
        let mut placed = Vec::new();
        // Chunks of one size that lie alike and are used alike move as many bytes.
        let mut known: Vec<(Kind, u64)> = Vec::new();
        for (at, (stage, chunks)) in engine.stages().iter().zip(&described.stages).enumerate() {
            let own = chunks.first_chunk..chunks.first_chunk + chunks.chunks.len();
            let of_stage = order.iter().copied().filter(|chunk| own.contains(&(*chunk as usize)));
            let uses = Lookahead::new(of_stage.collect());
            for (chunk, ChunkSpec { elements, .. }) in chunks.chunks.iter().enumerate() {
                let lies = spec.zero.residence[stage.index].of(chunk);
                let used = used(&uses, (chunks.first_chunk + chunk) as u32, spec.zero.prefetch.max(1));
                let kind = (stage.index, *elements, lies, used);
                let moved_bytes = match known.iter().find(|(same, _)| *same == kind) {
                    _ if lies == ChunkResidence::DEVICE => 0,
                    Some((_, moved_bytes)) => *moved_bytes,
                    None => all - copied(&with_chunk_on_device(spec, chunks, chunk)),
                };
                known.push((kind, moved_bytes));
                let parameters = engine.chunks().layout(at).parameters(chunk);
                let name = |parameter: usize| stage.network.parameters[parameter].name.clone();
                placed.push(PlacedChunk {
                    stage: stage.index,
                    chunk,
                    first: name(parameters.start),
                    last: name(parameters.end - 1),
                    elements: *elements,
                    trained: chunk < chunks.trained,
                    lies,
                    moved_bytes,
                });
            }
        }
        placed
    }
}

/// Properties of a chunk that determine how many bytes a step moves for it: its stage, elements, memories and uses.
type Kind = (usize, u64, ChunkResidence, [usize; 2]);

/// Number of uses of a chunk, and of those after which it is used again so soon that it is kept.
fn used(uses: &Lookahead, chunk: u32, depth: usize) -> [usize; 2] {
    let at = (0..uses.order().len()).filter(|at| uses.order()[*at] == chunk);
    let is_kept = |at: usize| uses.upcoming(at + 1).take(depth).any(|next| next == chunk);
    at.fold([0, 0], |[count, kept], at| [count + 1, kept + usize::from(is_kept(at))])
}

/// The same run with one chunk in device memory.
fn with_chunk_on_device(spec: &Spec, stage: &StageChunks, chunk: usize) -> Spec {
    let residence = &spec.zero.residence[stage.index];
    let lies = |other| if other == chunk { ChunkResidence::DEVICE } else { residence.of(other) };
    let chunks = (0..stage.chunks.len()).map(lies).collect();
    let mut spec = spec.clone();
    let whole: Vec<usize> = (0..stage.chunks.len()).filter(|chunk| residence.is_whole(*chunk)).collect();
    spec.zero.residence[stage.index] = Residence::of_chunks(chunks, ChunkResidence::DEVICE).with_whole(whole);
    spec
}

/// Bytes that a step of a rank copies between memories.
fn copied_bytes(spec: &Spec, rank: usize) -> u64 {
    let trace = DryRuns::of(spec, &Rank::new).trace(rank);
    let bytes = |event: &Event| if let Event::Copy { bytes, .. } = event { *bytes } else { 0 };
    trace.phase(PhaseName::Step).map_or(0, |step| step.events.iter().map(bytes).sum())
}
