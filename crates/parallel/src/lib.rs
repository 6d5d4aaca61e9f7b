//! Parallel execution of a network over a mesh: data (ZeRO 0 to 3), tensor with sequence, and pipeline.
//!
//! [`tensor`] gives layers of which each rank has a part; [`stage`] walks the blocks that a rank has, and asks
//! [`zero::Zero`], which holds parameters, gradients and optimizer states in chunks, for what each needs; [`pipeline`]
//! runs stages in the order of a schedule; [`norm`] is the gradient norm over all of it. Axes meet nowhere else: no
//! model is known here, and no process group is ambient.
#![forbid(unsafe_code)]

pub mod norm;
pub mod pipeline;
pub mod stage;
pub mod tensor;
pub mod zero;

pub use norm::GradientNorm;
pub use stage::{Seen, Stage, Watch};
pub use tensor::TensorParallel;
pub use zero::{Options, Zero};
