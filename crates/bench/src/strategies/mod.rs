//! One model under each way of parallelism: run, compared, drawn.
//!
//! [`way`] has the ways and their configurations; [`ranks`] what a rank, or a device of one process, measures;
//! [`run`] runs a way and collects; [`compared`] says what the figures mean together; [`report`] and [`drawing`] show
//! them; [`classic`] is the comparison of model parallelism with a pipeline on a BERT.

pub mod classic;
pub mod compared;
pub mod drawing;
mod ranks;
pub mod report;
pub mod run;
pub mod way;

pub use ranks::{RankFigures, measure};
