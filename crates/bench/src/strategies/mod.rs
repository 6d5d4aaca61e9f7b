//! Runs one model with each strategy of parallelism and compares them.
//!
//! [`strategy`] lists the strategies and their configurations; `ranks` measures a rank, or the devices of one process;
//! [`run`] runs a strategy and collects its figures; [`compared`] computes statistics over them; [`agreement`] checks with
//! [`sketch`]es of the gradients that all compute the same; [`report`] and [`drawing`] show them;
//! [`classic`] compares model parallelism with a pipeline on a BERT.

pub mod agreement;
pub mod classic;
pub mod compared;
pub mod drawing;
mod ranks;
pub mod report;
pub mod run;
pub mod sketch;
pub mod strategy;

pub use ranks::{RankFigures, measure};
