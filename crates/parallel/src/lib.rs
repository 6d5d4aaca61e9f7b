//! Parallel execution of a network over a mesh: data (ZeRO 0 to 3), tensor with sequence, and pipeline.
//!
//! [`tensor`] makes layers that are split over ranks. [`stage`] runs forward and backward of the blocks that a rank
//! has; [`zero::Zero`] holds their parameters, gradients and optimizer states in chunks. [`pipeline`] runs stages in
//! the order of a schedule. [`norm`] computes the gradient norm over all ranks. This crate knows no model, and
//! process groups are always passed as arguments.
#![forbid(unsafe_code)]

mod block_inputs;
pub mod norm;
pub mod pipeline;
pub mod stage;
pub mod tensor;
mod tiles;
pub mod zero;

pub use block_inputs::{BlockInputs, InputOptions};
pub use norm::GradientNorm;
pub use stage::{Seen, Stage, Watch};
pub use tensor::TensorParallel;
pub use zero::Zero;
