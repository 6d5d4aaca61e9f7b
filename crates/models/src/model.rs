//! The interface of a model to the engine: its network, of which each rank makes its part.

use std::sync::Arc;

use phalanx_layers::{Checkpointing, Network, ParameterSpec};
use phalanx_parallel::TensorParallel;
use serde_json::{Value, json};

use crate::{Arch, Bert, Gpt2, NumberedLayers};

/// Sizes of a Transformer that parallelism and reports need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Rows of the token table.
    pub vocab: usize,
    /// Longest sequence.
    pub positions: usize,
}

/// Dropout probabilities in training, each in `0.0..1.0`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropouts {
    /// Dropout of the embedding (`embd_pdrop`; BERT's `hidden_dropout_prob`, after the norm).
    pub embedding: f32,
    /// Dropout of the attention probabilities (`attn_pdrop`; `attention_probs_dropout_prob`).
    pub attention: f32,
    /// Dropout of both projections into the residual stream (`resid_pdrop`; `hidden_dropout_prob`).
    pub residual: f32,
}

/// A tensor of a checkpoint of an earlier version, some rows of which are a parameter now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Earlier {
    /// Its name.
    pub name: String,
    /// Its extents, whole.
    pub shape: Vec<usize>,
    /// Number of its element that is the first of the whole parameter.
    pub first: u64,
}

/// Training objective of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Predict the next token from those before it (GPT).
    Causal,
    /// Predict hidden tokens from those around them (BERT).
    Masked,
}

/// A model: blocks in sequence with a head. It is written once with whole sizes; every rank creates its part.
///
/// A model of your own implements `network`, `shape` and `dropping`. The other methods are about the training objective
/// and about files.
pub trait Model: Send + Sync + std::fmt::Debug {
    /// The whole network; `tensor` gives this rank's part of each layer.
    fn network(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Network;

    /// Its sizes.
    fn shape(&self) -> ModelShape;

    /// Its architecture in the registry; `None` for a model that is not there.
    fn architecture(&self) -> Option<Arch> {
        None
    }

    /// Its training objective.
    fn objective(&self) -> Objective {
        self.architecture().map_or(Objective::Causal, |arch| arch.objective)
    }

    /// Its `config.json`, which [`from_config`](crate::from_config) reads; null for a model that has no such file.
    fn to_config(&self) -> Value {
        json!(null)
    }

    /// Other names under which older Hugging Face files hold the parameter `name`.
    fn aliases(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }

    /// The parameter of checkpoints of earlier versions of this program that held `parameter`, a whole or a part of one; `None`
    /// where it was the same.
    fn earlier(&self, _parameter: &ParameterSpec) -> Option<Earlier> {
        None
    }

    /// Names of tensors that files may hold beside the parameter `name`: copies with the same
    /// numbers, because the architecture ties the two.
    fn copies_of(&self, _name: &str) -> &'static [&'static str] {
        &[]
    }

    /// How files of its architecture number the layers; `None` for a model that has no such file.
    fn numbered_layers(&self) -> Option<NumberedLayers> {
        None
    }

    /// Beginning of the names of the tensors of the head that files of the bare model lack: where a file has none of them, they
    /// get initial values. `None` where every file has all tensors.
    fn head_prefix(&self) -> Option<&'static str> {
        None
    }

    /// Whether a tensor of this name in a file is not a weight of this model and can be ignored.
    fn is_ignored(&self, _name: &str) -> bool {
        false
    }

    /// The same model with other dropout probabilities.
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
