//! Runs one model with each strategy of parallelism and compares them.
//!
//! [`strategy`] lists the strategies and their configurations; `ranks` measures a rank, or the devices of one process;
//! [`run`] runs a strategy and collects its figures; [`compared`] computes statistics over them; [`report`] and [`drawing`]
//! show them; [`classic`] compares model parallelism with a pipeline on a BERT.

pub mod classic;
pub mod compared;
pub mod drawing;
mod ranks;
pub mod report;
pub mod run;
pub mod strategy;

pub use ranks::{RankFigures, measure};
