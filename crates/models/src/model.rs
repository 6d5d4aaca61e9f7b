//! What the engine asks of a model: its network, for whatever part of it a rank has.

use std::sync::Arc;

use phalanx_layers::{Checkpointing, Network, ParameterSpec};
use phalanx_parallel::TensorParallel;
use serde_json::{Value, json};

use crate::{Arch, Bert, Gpt2, NumberedLayers, Stored};

/// Numbers of a Transformer that strategies and reports need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Transformer blocks.
    pub layers: usize,
    /// Width of what passes from block to block.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Rows of the token table.
    pub vocab: usize,
    /// Longest sequence.
    pub positions: usize,
}

/// Probabilities of dropping an element in training, each in `0.0..1.0`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropouts {
    /// Of the embedding (`embd_pdrop`; BERT's `hidden_dropout_prob`, after the norm).
    pub embedding: f32,
    /// Of the attention probabilities (`attn_pdrop`; `attention_probs_dropout_prob`).
    pub attention: f32,
    /// Of both projections into the residual stream (`resid_pdrop`; `hidden_dropout_prob`).
    pub residual: f32,
}

/// What a model learns from a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// The next token, from those before it (GPT).
    Causal,
    /// Tokens that were hidden, from those around them (BERT).
    Masked,
}

/// A model: blocks in sequence with a head, written once, of which every rank makes its part.
///
/// A model of one's own implements `network`, `shape` and `dropping`; the other methods are for what it
/// learns, and for files.
pub trait Model: Send + Sync + std::fmt::Debug {
    /// The whole network; `tensor` gives this rank's part of each layer.
    fn network(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Network;

    /// Its numbers.
    fn shape(&self) -> ModelShape;

    /// Its architecture in the registry; `None` for a model that is not there.
    fn architecture(&self) -> Option<Arch> {
        None
    }

    /// What it learns.
    fn objective(&self) -> Objective {
        self.architecture().map_or(Objective::Causal, |arch| arch.objective)
    }

    /// As a `config.json`, which [`from_config`](crate::from_config) reads; null for a model that has no such file.
    fn to_config(&self) -> Value {
        json!(null)
    }

    /// The tensors of its family's files that `parameter`, whole or a part of it, is made of: their
    /// concatenation along dimension 0, in this order.
    fn stored_as(&self, parameter: &ParameterSpec) -> Vec<Stored> {
        vec![Stored::same(parameter)]
    }

    /// Names of tensors that files may have beside `stored`, the name of one that [`Model::stored_as`] gives:
    /// copies of it with the same numbers, since the family ties the two.
    fn copies_of(&self, _stored: &str) -> &'static [&'static str] {
        &[]
    }

    /// How its family numbers layers in files; `None` for a model that has no such file.
    fn numbered_layers(&self) -> Option<NumberedLayers> {
        None
    }

    /// Whether its family's programs write a tensor of this name that is no weight of this model, and is left
    /// out without loss.
    fn is_ignored(&self, _name: &str) -> bool {
        false
    }

    /// The same with other probabilities of dropping.
    fn dropping(&self, dropout: Dropouts) -> Arc<dyn Model>;
}

impl From<Gpt2> for Arc<dyn Model> {
    fn from(model: Gpt2) -> Arc<dyn Model> {
        Arc::new(model)
    }
}

impl From<Bert> for Arc<dyn Model> {
    fn from(model: Bert) -> Arc<dyn Model> {
        Arc::new(model)
    }
}
