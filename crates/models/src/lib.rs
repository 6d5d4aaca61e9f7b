//! Model families, each as a sequence of blocks with the names of its Hugging Face files.
#![forbid(unsafe_code)]

pub mod gpt2;

pub use gpt2::{Dropouts, Gpt2, ModelError};
