//! Text becomes tokens, tokens become samples.
//!
//! The way of the data, in the order of the modules: a [`Tokenizer`] turns text into ids; a
//! [`Corpus`] finds the documents; [`tokenize_to_memory`] and [`tokenize_to_file`] join the two; a
//! [`TokenFile`] reads what was written (or what nanoGPT, llm.c or Megatron wrote); [`Tokens`] is
//! either source behind one type, cut into training and validation; a [`Sampler`] says which tokens
//! are sample `k`, as a pure function of seed and position, so that a run resumes from one number and
//! no count of ranks changes its data; [`Masking`] hides some of them, for models that learn to find them.
//!
//! This crate knows no rank, no batch and no configuration file: the caller turns (step, micro-batch,
//! rank, row) into a position and asks for it.
#![forbid(unsafe_code)]

mod corpus;
mod error;
mod limits;
mod masking;
mod permutation;
mod sampler;
mod token_file;
mod tokenize;
mod tokenizer;
mod tokens;

pub use corpus::{Corpus, CorpusSpec, Document, SkipReason, Skipped};
pub use error::DataError;
pub use masking::{Masking, NOT_PREDICTED};
pub use permutation::Permutation;
pub use sampler::{EvaluationWindows, SampleOrder, Sampler};
pub use token_file::{Scan, TokenFile, TokenFormat, TokenWriter, Written};
pub use tokenize::{Progress, tokenize_to_file, tokenize_to_memory};
pub use tokenizer::{TOKENIZER_FILE, Tokenizer, TokenizerSpec};
pub use tokens::Tokens;

/// Every fallible call of this crate fails with a [`DataError`].
pub type Result<T, E = DataError> = std::result::Result<T, E>;
