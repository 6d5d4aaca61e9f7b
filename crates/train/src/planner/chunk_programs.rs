//! The chunk programs of a rank (`plan::program`), from the specification of its run.

use std::hash::{DefaultHasher, Hasher};

use phalanx_plan::program::{MemoryPeaks, Program, check};

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
        let (chunks, rank) = (self.chunks(), self.group().rank());
        let programs: Vec<Program> = chunks.programs().iter().map(|program| (**program).clone()).collect();
        let peaks = check(chunks.described(), &programs, None)
            .map_err(|cause| ProgramError::Check { rank, cause })?;
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

#[cfg(test)]
mod tests;
