//! Model architectures, each as a sequence of blocks with the names of its Hugging Face files.
#![forbid(unsafe_code)]

mod activation;
mod architecture;
pub mod bert;
mod config;
pub mod contents;
pub mod decoder;
pub mod gguf;
pub mod gpt2;
pub mod keys;
pub mod labels;
pub mod limits;
pub mod model;
mod registry;
pub mod with_block;

pub use activation::Activation;
pub use architecture::{Arch, Architecture};
pub use bert::Bert;
pub use config::ModelError;
pub use contents::{NumberedLayers, check_contents, check_layers, heads_lacking, name_in, stored_tensors};
pub use decoder::Decoder;
pub use gpt2::Gpt2;
pub use keys::{Key, KeyError, Keys, Values};
pub use model::{Dropouts, Model, Objective, RowsOf};
pub use phalanx_layers::Input;
pub use registry::from_config;
pub use with_block::WithBlock;
