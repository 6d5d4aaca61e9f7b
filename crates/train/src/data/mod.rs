//! The samples of a run: token files and texts, in a training part and a validation part, or a source of the caller's own.

pub mod dataset;
pub mod learned;
pub mod parts;
pub mod source;
pub mod token_data;
