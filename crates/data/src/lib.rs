//! Turns text into tokens, and tokens into samples.
//!
//! A [`Tokenizer`] turns text into ids, and a [`Corpus`] finds the documents; [`tokenize_to_memory`] and
//! [`tokenize_to_file`] combine the two. A [`TokenFile`] reads the result, or a file of nanoGPT, llm.c or Megatron, and
//! [`TokenFiles`] read several as one. [`Tokens`] is one type for tokens in memory and in files, split into training and validation. A [`Sampler`]
//! computes which tokens form sample `k`, as a pure function of seed and position: a run resumes from one number, and
//! the number of ranks does not change its data. [`Masking`] masks tokens for models that learn to predict them,
//! [`DocumentEnds`] says which tokens of a sample are of one document. [`Rows`] are texts with a class, [`ChatFiles`] chats, and
//! [`RowSamples`] the samples that they make.
//!
//! This crate knows no rank, no batch and no configuration file: the caller turns (step, micro-batch,
//! rank, row) into a position and asks for it.
#![forbid(unsafe_code)]

mod chats;
mod content;
mod corpus;
mod documents;
mod error;
mod json;
mod limits;
mod magic;
mod masking;
mod permutation;
mod rows;
mod sampler;
mod token_file;
mod token_files_error;
mod tokenize;
mod tokenizer;
mod tokens;
mod trained_windows;
mod windows;

pub use chats::{
    ChatEncoder, ChatExample, ChatFiles, ChatFormat, ChatLengths, Day, PackedChats, PairKind, TrainOn,
    named_template,
};
pub use corpus::{Corpus, CorpusSpec, Document, Findings, Group, Groups};
pub use documents::DocumentEnds;
pub use error::DataError;
pub use masking::{Masking, NOT_PREDICTED};
pub use permutation::Permutation;
pub use rows::{FoundClasses, Row, RowEncoder, RowKind, RowOrder, RowSamples, Rows, write_rows};
pub use sampler::{EvaluationWindows, SampleOrder, Sampler};
pub use token_file::{
    Look, Scan, TokenFile, TokenFiles, TokenFormat, TokenType, TokenWriter, Written, is_match, token_paths,
};
pub use token_files_error::TokenFilesError;
pub use tokenize::{Progress, tokenize_to_file, tokenize_to_memory};
#[cfg(feature = "tokenizers")]
pub use tokenizer::GgufVocabulary;
pub use tokenizer::{
    HuggingFaceFiles, SpecialToken, Spelled, TOKENIZER_FILE, Tokenizer, TokenizerFiles, TokenizerSpec,
};
pub use tokens::Tokens;

/// Every fallible call of this crate fails with a [`DataError`].
pub type Result<T, E = DataError> = std::result::Result<T, E>;
