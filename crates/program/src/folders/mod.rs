//! Run folders: names, locks, checksums, what is staged and stored in them, and what a resume takes from them.

pub mod checksums;
pub mod continuation;
pub mod flight;
pub mod kept_checkpoints;
pub mod ownership;
pub mod resume;
pub mod run_damage;
pub mod run_folder;
pub mod run_names;
pub mod staged;
pub mod stored;
