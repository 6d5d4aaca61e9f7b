//! The integration tests of this crate, as one program.

mod dropout_and_checkpointing;
mod failures;
mod rig;
mod tensor_parallel;
mod vocabulary;
