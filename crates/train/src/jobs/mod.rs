//! A run from beginning to end: its ranks, the loop of steps, its files, and text that its model continues.

pub mod best;
mod event_file;
pub mod job;
pub mod measured;
pub mod metric_names;
mod metric_record;
pub mod metric_sinks;
pub mod metrics;
pub mod metrics_lines;
pub(crate) mod on_ranks;
pub mod position;
pub mod references;
pub mod run;
mod run_file_names;
pub mod run_files;
pub mod sample;
pub(crate) mod sampling;
pub mod training;
