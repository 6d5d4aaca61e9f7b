//! Dry runs of ranks, and what is decided from them before the first step: memory, sizes of chunks, placement, time.

pub mod appraisal;
pub(crate) mod budget;
pub mod chunk_alternatives;
pub(crate) mod chunk_choice;
mod chunk_note;
pub mod chunk_programs;
mod disk_notes;
pub(crate) mod dry_run;
mod placement_guesses;
pub mod placement_table;
mod placing;
pub mod planning;
mod played;
pub(crate) mod rank_plan;
mod replica_note;
