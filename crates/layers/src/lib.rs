//! Layers with hand-written forward and backward, and their composition.
//!
//! A layer knows only its mathematics: no rank, no process group, no memory of its own. [`layer`] defines the trait,
//! [`combinators`] compose layers, [`checkpointing`] recomputes activations instead of saving them, and [`network`] is
//! what the engine runs.
#![forbid(unsafe_code)]

pub mod activation;
pub mod adapted;
pub mod attention;
pub mod cache;
pub mod call;
pub mod checkpointing;
pub mod combinators;
pub mod cut;
mod dora;
pub mod dropout;
pub mod each_row;
pub mod embedding;
pub mod failure;
pub mod fork;
pub mod gated;
pub mod head;
pub mod head_norm;
pub mod images;
pub mod init;
pub mod inputs;
pub mod layer;
pub mod layer_norm;
pub mod linear;
pub mod linear_gelu;
pub mod lora;
pub mod network;
pub mod parameter;
pub mod pooler;
pub mod preference;
mod random;
pub mod rotary;
pub mod rows;
pub mod saved;
pub mod share;
pub mod times;

pub use activation::Activation;
pub use adapted::Adapted;
pub use attention::Attention;
pub use cache::KeyValueCache;
pub use call::{Call, Gradient, Parameter, Parameters};
pub use checkpointing::{Checkpointing, Recompute};
pub use combinators::Sequence;
pub use cut::Cut;
pub use dropout::Dropped;
pub use each_row::{OnEachRow, RowFunction};
pub use embedding::{Embedding, PositionTable, added_rows, table_of_added};
pub use failure::{Failure, Result};
pub use fork::Fork;
pub use gated::Gated;
pub use head::{Head, LinearCrossEntropy, RowTerms};
pub use head_norm::{HeadNorm, NormOver, SharedHeads, SumOfShares};
pub use images::{Conv2d, Flatten, MaxPool2d, Relu};
pub use init::Init;
pub use inputs::{Input, Inputs, POSITIONS, REFERENCES, RowShape, TARGETS, TOKENS, Upload};
pub use layer::{AnyLayer, Context, Draw, Layer, Rebuild, SLICE_BYTES};
pub use layer_norm::LayerNorm;
pub use linear::{Linear, Output};
pub use linear_gelu::LinearGelu;
pub use lora::{Adapt, AdapterInit, Lora};
pub use network::{Block, BlockRole, Network};
pub use parameter::{Kind, ParameterSpec, Part};
pub use pooler::Pooler;
pub use preference::PreferenceHead;
pub use rotary::RotaryPositions;
pub use rows::Rows;
pub use saved::{AnyOwn, AnySaved, Deferred, Saved, Shared};
pub use share::{CannotCut, Pieces, Share};
pub use times::Times;
