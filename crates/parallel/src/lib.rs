//! Parallel execution of a network: chunks over the data axis (ZeRO 0 to 3) and the walk over blocks.
//!
//! [`zero::Zero`] holds parameters, gradients and optimizer states in chunks; the stages differ only in
//! what of them is resident. [`walk`] runs the blocks of a network forward and backward, asking `Zero`
//! for what each block needs. No model is known here, and no process group is ambient.
#![forbid(unsafe_code)]

pub mod walk;
pub mod zero;

pub use walk::{Seen, Watch, evaluate, forward_backward};
pub use zero::{Options, Zero};
