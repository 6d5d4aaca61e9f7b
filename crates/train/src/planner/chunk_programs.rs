//! The chunk programs of a rank (`plan::program`), from the specification of its run.

use std::hash::{DefaultHasher, Hasher};

use phalanx_parallel::Stage;
use phalanx_plan::program::{
    ChunkSpec, MemoryPeaks, PHASES, Piece, Policies, Program, RankChunks, StageChunks, Terms, TiedChunks,
    check,
};
use phalanx_plan::{Coordinates, ZeroStage};

use crate::engine::error::ProgramError;
use crate::engine::rank::Rank;
use crate::engine::spec::Spec;
use crate::planner::dry_run::on_meta;

/// The programs of a rank, one for each phase, which were checked.
#[derive(Clone, Debug)]
pub struct ChunkPrograms {
    /// The rank.
    pub rank: usize,
    /// A program for each phase.
    pub programs: Vec<Program>,
    /// Largest numbers of bytes that its chunks have at a time.
    pub peaks: MemoryPeaks,
}

impl Spec {
    /// The programs of a rank's chunks.
    ///
    /// # Errors
    /// A program breaks an invariant.
    pub fn chunk_programs(&self, rank: usize) -> Result<ChunkPrograms, ProgramError> {
        on_meta(self, rank, &Rank::new).1.chunk_programs()
    }
}

impl Rank {
    /// The programs of its chunks.
    ///
    /// # Errors
    /// A program breaks an invariant.
    pub fn chunk_programs(&self) -> Result<ChunkPrograms, ProgramError> {
        let (chunks, rank) = (chunks_of(self), self.group().rank());
        let programs: Vec<Program> = PHASES.iter().map(|phase| chunks.lower(*phase)).collect();
        let peaks = check(&chunks, &programs, None).map_err(|cause| ProgramError::Check { rank, cause })?;
        Ok(ChunkPrograms { rank, programs, peaks })
    }

    /// Checks the programs of its chunks, and that they are those of the plan: before step one.
    ///
    /// # Errors
    /// A program that breaks an invariant, or has other collectives than `planned`, a hash.
    pub fn check_programs(&self, planned: Option<u64>) -> Result<(), ProgramError> {
        let programs = self.chunk_programs()?;
        let (rank, found) = (programs.rank, programs.agreement());
        match planned.filter(|planned| *planned != found) {
            Some(planned) => Err(ProgramError::Disagrees { rank, found, planned }),
            None => Ok(()),
        }
    }
}

impl ChunkPrograms {
    /// A hash of the collectives of all phases, equal on the ranks of a pipeline coordinate.
    pub fn agreement(&self) -> u64 {
        let mut state = DefaultHasher::new();
        self.programs.iter().for_each(|program| program.agreement(&mut state));
        state.finish()
    }
}

/// The chunks of a rank, its schedule and its policies.
pub(crate) fn chunks_of(engine: &Rank) -> RankChunks {
    let Rank { spec, stages, program, evaluation, outline, .. } = engine;
    let zero = &spec.zero;
    let policies = Policies {
        stage: zero.stage,
        overlap: zero.overlap,
        prefetch: zero.prefetch,
        defer: zero.defer,
        micro_batches: spec.batch.micro_batches,
        sums_by_tree: spec.batch.sums_by_tree,
        precision: spec.precision.types,
        data_ranks: spec.mesh.axes.data as u64,
        host_addressable: spec.device.host_addressable,
        in_place: zero.gradients_in_place,
        updates_on_host: zero.updates_on_host && !spec.device.host_addressable,
        delayed: zero.delayed_update,
        in_backward: zero.update_in_backward,
    };
    let (mut first_chunk, mut first_tile) = (0, 0);
    let stage_of = |stage: &Stage| {
        let chunks = stage_chunks(spec, stage, (first_chunk, first_tile), engine.at());
        first_chunk += chunks.chunks.len();
        first_tile += chunks.chunks.iter().map(|chunk| chunk.tiles.len()).sum::<usize>();
        chunks
    };
    let own: Vec<StageChunks> = stages.iter().map(stage_of).collect();
    RankChunks {
        ties: ties_of(engine, &own),
        stages: own,
        policies,
        step: program.steps().to_vec(),
        evaluation: evaluation.steps().to_vec(),
        norms: (outline.parameters.len() * spec.mesh.axes.tensor) as u64,
    }
}

/// The chunks of a stage.
fn stage_chunks(
    spec: &Spec,
    stage: &Stage,
    (first_chunk, first_tile): (usize, usize),
    at: Coordinates,
) -> StageChunks {
    let (network, layout) = (&stage.network, stage.zero.layout());
    let uses = network.uses.iter().map(|used| {
        let mut chunks: Vec<usize> = used.iter().map(|p| layout.placed[*p].chunk).collect();
        chunks.sort_unstable();
        chunks.dedup();
        chunks
    });
    let residence = &spec.zero.residence[stage.index];
    let chunk = |c: usize| ChunkSpec {
        elements: layout.chunk_elements[c],
        is_whole: residence.is_whole(c),
        dtype: stage.zero.parameter_type(c),
        parameters: residence.of(c).parameters,
        gradients: residence.of(c).gradients,
        optimizer: residence.of(c).optimizer,
        tiles: stage.zero.tile_elements(c),
        gradient_tiles: stage.zero.gradient_tiles(c),
        states: stage.zero.state_numbers(c),
        scaled: if c < stage.zero.trained_chunks() { stage.zero.scaled_elements(c) } else { Vec::new() },
        counted: stage.zero.counted(c),
        parameter_count: layout.parameters(c).len() as u64,
        is_summed_over_data_alone: stage.zero.is_summed_over_data_alone(c),
    };
    let trained = stage.zero.trained_chunks();
    let mut terms = Terms::default();
    for c in 0..trained {
        let part = updated(spec, stage, c, at);
        let first = part.start;
        for segment in layout.segments(c, part) {
            let Some(share) = network.parameters[segment.parameter].terms() else { continue };
            let elements = segment.in_chunk.end - segment.in_chunk.start;
            terms.elements += share.of as u64 * elements;
            terms.pieces.push(Piece { chunk: c, start: segment.in_chunk.start - first, elements });
        }
    }
    StageChunks {
        index: stage.index,
        first_block: network.first_block,
        first_chunk,
        uses: uses.collect(),
        has_head: network.head.is_some(),
        lowest: network.lowest(),
        chunks: (0..layout.chunks()).map(chunk).collect(),
        trained,
        terms,
        first_tile,
        squares: layout.first_block.get(trained).copied().unwrap_or(layout.blocks),
    }
}

/// The elements of a chunk that a rank updates.
fn updated(spec: &Spec, stage: &Stage, c: usize, at: Coordinates) -> std::ops::Range<u64> {
    let layout = stage.zero.layout();
    match spec.zero.stage {
        ZeroStage::Zero => 0..layout.chunk_elements[c],
        _ => layout.shard(c, at.data as u64, spec.mesh.axes.data as u64),
    }
}

/// The parameters of which several stages have a copy, one of them on this rank.
fn ties_of(engine: &Rank, own: &[StageChunks]) -> Vec<TiedChunks> {
    let spec = &engine.spec;
    let tied = spec.mesh.ties.iter().zip(&engine.groups.ties).filter_map(|(tie, group)| {
        let copies = engine.stages.iter().zip(own).filter(|(stage, _)| tie.stages.contains(&stage.index));
        let copies: Vec<(usize, u64, u64)> = copies
            .map(|(stage, chunks)| {
                let number = stage.network.place_of(&tie.name);
                let chunk = stage.zero.layout().placed[number].chunk;
                // A frozen one has no gradient.
                let part =
                    if chunk < chunks.trained { updated(spec, stage, chunk, engine.at()) } else { 0..0 };
                let first = part.start;
                let segment = stage.zero.layout().segments(chunk, part).next();
                let own = segment.map_or(0..0, |s| s.in_chunk.start - first..s.in_chunk.end - first);
                (chunks.first_chunk + chunk, own.start, own.end - own.start)
            })
            .collect();
        let elements = copies.first()?.2;
        let copies = copies.iter().map(|(chunk, start, _)| (*chunk, *start)).collect();
        Some(TiedChunks { copies, elements, is_shared: group.is_some() })
    });
    tied.collect()
}

#[cfg(test)]
mod tests;
