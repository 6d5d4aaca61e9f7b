//! Parallel execution of a network over a mesh: data (ZeRO 0 to 3), tensor with sequence, and pipeline.
//!
//! [`tensor`] makes layers that are split over ranks. [`stage`] runs forward and backward of the blocks that a rank
//! has; [`zero::Chunks`] holds their parameters, gradients and optimizer states, and executes what a rank does with them.
//! [`pipeline`] runs stages in the order of a schedule. This crate knows no model, and process groups are always passed as
//! arguments.
#![forbid(unsafe_code)]

mod block_inputs;
pub mod pipeline;
pub mod stage;
pub mod tensor;
mod tiles;
pub mod zero;

pub use block_inputs::{BlockInputs, InputOptions};
pub use stage::{Seen, Stage, Watch};
pub use tensor::TensorParallel;
pub use zero::Chunks;
