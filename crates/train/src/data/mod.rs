//! The samples of a run: token files, texts, labelled rows and chats, in a training part and a validation part, or a source of the caller's own.

pub mod chats;
pub mod dataset;
pub mod learned;
pub mod parts;
mod prepared;
pub mod rows;
pub mod source;
pub mod token_data;
