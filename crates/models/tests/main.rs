//! The integration tests of this crate, as one program.

mod bert;
mod checkpointing;
mod classes;
mod contents;
mod documents;
mod goldens;
mod gpt2;
mod parts;
mod rig;
