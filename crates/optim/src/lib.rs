//! Update rules, learning rates and loss scales. They know flat ranges and numbers; ranks, chunks and stages are
//! somebody else's.
#![forbid(unsafe_code)]

pub mod loss_scale;
pub mod optimizer;
pub mod schedule;

pub use loss_scale::{LossScale, LossScaleState, LossScaling, Verdict};
pub use optimizer::{Optimizer, Update};
pub use schedule::Schedule;
