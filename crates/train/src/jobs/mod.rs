//! A run from beginning to end: its ranks, the loop of steps, its files, and text that its model continues.

pub mod best;
pub mod job;
pub mod measured;
pub mod metrics;
pub mod metrics_lines;
pub(crate) mod on_ranks;
pub mod position;
pub mod references;
pub mod run;
pub mod run_files;
pub mod sample;
pub(crate) mod sampling;
pub mod training;
