//! Chooses the chunk size under `memory.chunk = "auto"`: of the sizes that are planned, the one with the fewest chunks
//! whose peak is within 1 % of the smallest.
//!
//! Large chunks need large buffers, and a chunk that is gathered or reduced holds all that it has. Small chunks are padded
//! more: each is a whole number of blocks on every rank, so on many ranks a small tensor in a chunk of its own takes as much
//! as a large one. And each chunk has collectives of its own. Which of these weighs most depends on the model and the mesh.
//! So a few sizes are planned: one tensor a chunk; the size that pads the whole model least (`plan::chunk_search`); and,
//! from a quarter of a stage downwards, the size that pads least of each range from a size to its half. Results do not
//! depend on the size.
//!
//! Each size is planned on one rank, the one of the first and the last pipeline stage that needs more.

use phalanx_plan::trace::{Memory, Trace};
use phalanx_plan::{
    BLOCK, ChunkLayout, ChunkSize, Coordinates, ParameterSize, ZeroStage, lay_out, plan_memory_of,
};

use crate::engine::parameter_sizes::{reserved, size};
use crate::engine::spec::Spec;
use crate::planner::dry_run::{DryRuns, MakeRank};

/// The peak may exceed the smallest by its hundredth for fewer chunks. Each chunk costs the latency of its collectives in
/// every step; so little memory seldom decides whether a model fits.
const EXCESS: u64 = 100;

/// Parts of a stage that a chunk has at most one of, so that collectives of some chunks run while others are computed.
const MIN_PARTS: usize = 4;

/// Ranges of sizes of which one size each is tried; each range ends where the one above begins.
const RANGES: u32 = 6;

/// The same where nothing is gathered or reduced chunk by chunk, and chunks differ in their padding only.
const RANGES_OF_RESIDENT: u32 = 2;

/// Sizes of a range that are packed to find the one that pads least.
const PACKED: u64 = 32;

/// Sizes that are planned with all micro-batches, of those that may be chosen.
const EXACT: usize = 3;

/// A chunk size that was planned.
#[derive(Clone, Debug, PartialEq)]
pub struct TriedChunks {
    /// The size.
    pub size: ChunkSize,
    /// Number of chunks of the whole model.
    pub chunks: usize,
    /// Bytes that the planned rank needs.
    pub bytes: u64,
}

/// A size that is tried.
struct Tried {
    spec: Spec,
    /// Number of chunks of the whole model, in the parts that a tensor rank has.
    chunks: usize,
    bytes: u64,
    /// True if `bytes` are of a plan with all micro-batches.
    is_exact: bool,
}

impl Spec {
    /// The specification with a chunk size in the place of `auto`, for engines that `make_rank` makes, and the sizes that were planned to
    /// choose it.
    pub(crate) fn with_chosen_chunks(self, make_rank: &MakeRank) -> (Spec, Vec<TriedChunks>) {
        let as_it_is = |spec| (spec, Vec::new());
        if !matches!(self.mesh.chunk_size, ChunkSize::Auto(_)) {
            return as_it_is(self);
        }
        let mut sizes = candidates(&self).into_iter();
        let Some(Sized { spec: first, chunks, .. }) = sizes.next() else { return as_it_is(self) };
        let Some((bytes, rank)) = largest_end(&first, make_rank) else { return as_it_is(self) };
        let mut all = vec![Tried { spec: first, chunks, bytes, is_exact: false }];
        all.extend(sizes.filter_map(|Sized { spec, chunks, .. }| {
            Some(Tried { bytes: roughly(&spec, rank, make_rank)?, spec, chunks, is_exact: false })
        }));
        all.sort_by_key(|tried| (tried.bytes, tried.chunks));
        plan_exactly(&mut all, rank, make_rank);
        let Some(best) = choose(&all) else { return as_it_is(self) };
        let listed = |tried: &Tried| TriedChunks {
            size: tried.spec.mesh.chunk_size.clone(),
            chunks: tried.chunks,
            bytes: tried.bytes,
        };
        let tried_chunks = all.iter().map(listed).collect();
        (all.swap_remove(best).spec, tried_chunks)
    }
}

/// The rank of the first and the last pipeline stage that needs more, which stands for all, with its bytes.
pub(crate) fn largest_end(spec: &Spec, make_rank: &MakeRank) -> Option<(u64, usize)> {
    let at = |pipeline| spec.mesh.axes.rank(Coordinates { pipeline, data: 0, tensor: 0 });
    let ends = [0, spec.mesh.axes.pipeline - 1];
    let ends = &ends[..spec.mesh.axes.pipeline.min(2)];
    ends.iter().filter_map(|end| Some((roughly(spec, at(*end), make_rank)?, at(*end)))).max()
}

/// Offsets may take more than what is live: the size with the smallest peak, and those with the fewest chunks that are
/// nearly as small, are planned as a whole. `all` begins with the smallest peak.
fn plan_exactly(all: &mut [Tried], rank: usize, make_rank: &MakeRank) {
    let exactly = |tried: &mut Tried| {
        (tried.bytes, tried.is_exact) = (planned(&tried.spec, rank, make_rank).unwrap_or(tried.bytes), true);
    };
    exactly(&mut all[0]);
    let limit = all[0].bytes + all[0].bytes / EXCESS;
    let mut order: Vec<usize> = (1..all.len()).filter(|index| all[*index].bytes <= limit).collect();
    order.sort_by_key(|index| all[*index].chunks);
    order.truncate(EXACT - 1);
    order.into_iter().for_each(|index| exactly(&mut all[index]));
}

/// The size with the fewest chunks whose peak is within 1 % of the smallest, of those planned as a whole.
fn choose(all: &[Tried]) -> Option<usize> {
    let exact = || all.iter().enumerate().filter(|(_, tried)| tried.is_exact);
    let smallest = exact().map(|(_, tried)| tried.bytes).min()?;
    let small = exact().filter(|(_, tried)| tried.bytes <= smallest + smallest / EXCESS);
    small.min_by_key(|(_, tried)| (tried.chunks, tried.bytes)).map(|(index, _)| index)
}

/// Origin of a chunk size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// One tensor per chunk (`memory.chunk = "none"`).
    None,
    /// The size that pads least in Gemini's search.
    Search,
    /// The size with the least padding, from half of a part of a stage up to that part.
    Range,
    /// The size in `memory.chunk`.
    Fixed,
}

/// A specification with a chunk size in the place of `auto`.
pub(crate) struct Sized {
    pub(crate) spec: Spec,
    /// As in [`Tried`].
    pub(crate) chunks: usize,
    pub(crate) origin: Origin,
}

/// The specifications with the sizes that are tried, each layout once; first that with one tensor a chunk.
pub(crate) fn candidates(spec: &Spec) -> Vec<Sized> {
    let parts = parts(spec);
    let resident = spec.mesh.axes.data == 1 && spec.zero.stage < ZeroStage::Two;
    let ranges = if resident { RANGES_OF_RESIDENT } else { RANGES };
    let elements: u64 = parts.iter().map(|part| part.reserved).sum();
    let largest = elements / (MIN_PARTS * spec.mesh.stages.len()).max(1) as u64;
    let searched = spec.mesh.layout.searched.iter().min_by_key(|candidate| candidate.waste_elements);
    let mut sizes = vec![(Origin::None, ChunkSize::None)];
    sizes.extend(searched.map(|best| (Origin::Search, ChunkSize::Elements(best.chunk_elements))));
    let data = spec.mesh.axes.data as u64;
    let range = |half| Some((Origin::Range, tightest(data, &parts, largest >> half)?));
    sizes.extend((0..ranges).filter_map(range));
    let mut all: Vec<Sized> = Vec::new();
    for (origin, size) in sizes {
        if let Ok(sized) = spec.with_chunks(size)
            && all
                .iter()
                .all(|other| other.spec.mesh.layout.chunk_elements != sized.mesh.layout.chunk_elements)
            && let Ok(layout) = sized.mesh.lay_out(&parts)
        {
            all.push(Sized { spec: sized, chunks: layout.chunks(), origin });
        }
    }
    all
}

/// The parameters of the whole model, in the parts that a tensor rank has.
fn parts(spec: &Spec) -> Vec<ParameterSize> {
    let network = spec.network_of(0);
    let part = |p| ParameterSize { reserved: reserved(p), ..size(&spec.update.optimizer, p) };
    network.parameters.iter().map(part).collect()
}

/// The size with least padding in `largest / 2..=largest`, on so many ranks of the data axis.
fn tightest(data: u64, parts: &[ParameterSize], largest: u64) -> Option<ChunkSize> {
    let layout = |size| lay_out(parts, data, &ChunkSize::Elements(size)).ok();
    let step = (largest / (2 * PACKED)).max(1);
    let sizes = (0..PACKED).map(|steps| largest.saturating_sub(steps * step).max(1));
    let tight = sizes.filter_map(|size| {
        // Chunks are whole blocks on every rank.
        let size = size.next_multiple_of(BLOCK * data);
        let size = fill(&layout(size)?, size)?;
        Some((layout(size)?.waste_elements, size))
    });
    let best = tight.min_by_key(|(waste, size)| (*waste, std::cmp::Reverse(*size)));
    best.map(|(_, size)| ChunkSize::Elements(size))
}

/// Elements of the fullest chunk among those that several parameters may share: a larger size is not needed for the same layout.
fn fill(layout: &ChunkLayout, size: u64) -> Option<u64> {
    let ends = layout.placed.iter().map(|placed| (placed.offset + placed.elements).next_multiple_of(BLOCK));
    ends.filter(|end| *end <= size).max()
}

/// Bytes that a rank needs in its memories; `None` where it has no plan.
fn planned(spec: &Spec, rank: usize, make_rank: &MakeRank) -> Option<u64> {
    let runs = DryRuns::of(spec, make_rank);
    arena_bytes(&runs.trace(rank))
}

/// The same without the micro-batches that repeat themselves.
fn roughly(spec: &Spec, rank: usize, make_rank: &MakeRank) -> Option<u64> {
    arena_bytes(&DryRuns::of(spec, make_rank).short_trace(rank))
}

fn arena_bytes(trace: &Trace) -> Option<u64> {
    let of = |memory| plan_memory_of(trace, memory).ok().map(|plan| plan.arena_bytes);
    Some(of(Memory::Device)? + of(Memory::Host)?)
}
