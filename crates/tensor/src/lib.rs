//! Tensors, their memory and the devices that compute on them.
//!
//! [`Device`] is what the rest of the engine sees: it allocates from an [`Arena`] and runs kernels.
//! `Meta` records; the crate `phalanx-cpu` computes. Element types, shapes and prices are checked in one
//! place ([`device`]).

mod allocator;
pub mod arena;
pub mod buffer;
pub mod device;
pub mod kernels;
pub mod meta;
pub mod operations;
pub mod placement;
pub mod profile;
pub mod record;
pub mod region;
mod replay;
pub mod shape;
mod threads;
pub mod vocabulary;

pub use allocator::OrEnd;
pub use arena::Arena;
pub use buffer::{Tensor, View, ViewMut};
pub use device::{Device, NORM_BLOCK};
pub use kernels::{
    AdamW, Clip, CrossEntropy, Dropout, Epilogue, Gelu, Heads, IGNORED, Layout, Lookup, Positions, Sgd,
    Weight, vocabulary_blocks,
};
pub use phalanx_trace::{Category, DType};
pub use region::Region;
pub use shape::Shape;
pub use threads::refused_thread;
