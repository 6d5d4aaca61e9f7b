//! Layers with hand-written forward and backward, and their composition.
//!
//! A layer knows its mathematics and nothing else: no rank, no group, no memory of its own. See
//! [`layer`] for the contract, [`combinators`] for composition, [`checkpointing`] for what is computed again
//! instead of kept, [`network`] for what an engine runs.
#![forbid(unsafe_code)]

pub mod attention;
pub mod checkpointing;
pub mod combinators;
pub mod dropout;
pub mod embedding;
pub mod failure;
pub mod head;
pub mod init;
pub mod layer;
pub mod layer_norm;
pub mod linear;
pub mod linear_gelu;
pub mod network;
mod random;
pub mod saved;

pub use attention::Attention;
pub use checkpointing::{Checkpointing, Recompute};
pub use combinators::{Residual, Sequence};
pub use dropout::Dropped;
pub use embedding::Embedding;
pub use failure::{Failure, Result};
pub use head::{Head, LinearCrossEntropy};
pub use init::Init;
pub use layer::{
    Activation, Context, Draw, Gradient, Layer, ParameterSpec, Part, Rebuild, add_residual, sum_target,
};
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use linear_gelu::LinearGelu;
pub use network::{Block, BlockRole, Network};
pub use saved::{Deferred, Saved, Shared};
