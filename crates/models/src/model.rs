//! The interface of a model to the engine: its network, of which each rank makes its part.

use std::sync::Arc;

use phalanx_layers::{CannotCut, Checkpointing, Input, Network, ParameterSpec, TARGETS, TOKENS};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::{Heads, Layout};
use serde_json::{Value, json};

use crate::gguf::GgufModel;
use crate::keys::Keys;
use crate::{Arch, Bert, Gpt2, NumberedLayers};

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

/// A tensor of a file, some rows of which are a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowsOf {
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
    /// Choose one of several classes for a whole sequence (BERT with labels).
    Classes,
}

/// A model: blocks in sequence with a head. It is written once with whole sizes; every rank creates its part.
///
/// A model of your own implements `network`, `inputs` and `dropping`, and `longest` and `attention` where it has these limits. The other
/// methods are about the training objective, configurations and files.
pub trait Model: Send + Sync + std::fmt::Debug {
    /// The network; `tensor` gives this rank's part of each layer.
    ///
    /// # Errors
    /// When so many ranks cannot divide a layer.
    fn network(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Result<Network, CannotCut>;

    /// The whole network, on one rank.
    fn whole(&self) -> Network {
        self.network(&TensorParallel::solo(), Checkpointing::None).expect("one rank divides nothing")
    }

    /// Refuses a number of tensor-parallel ranks that cannot divide its layers.
    ///
    /// # Errors
    /// [`CannotCut`]: the layer or parameter that cannot be divided.
    fn check_cut(&self, ranks: usize) -> Result<(), CannotCut> {
        self.network(&TensorParallel::trial(ranks), Checkpointing::None).map(drop)
    }

    /// Inputs that the model reads from each micro-batch. The first block receives the first input; any block, and the head, may ask for
    /// each of them ([`Context::input`](phalanx_layers::Context::input)).
    fn inputs(&self) -> Vec<Input>;

    /// Number of its token ids: the bound of the input `tokens`; 0 for a model that reads none.
    fn vocab(&self) -> usize {
        self.inputs().iter().find(|input| input.name == TOKENS).and_then(|input| input.bound).unwrap_or(0)
    }

    /// Returns whether the model reads targets. If it does, the loss is the mean over targets that are not ignored, else over samples.
    fn has_targets(&self) -> bool {
        self.inputs().iter().any(|input| input.name == TARGETS)
    }

    /// Tokens of the longest sequence, if there is a limit.
    fn longest(&self) -> Option<usize> {
        None
    }

    /// The widest of its attention heads and the most of them in a layer, if it has attention.
    fn attention(&self) -> Option<Heads> {
        None
    }

    /// The keys of `[model]` that make this model; none for a model that is not in the registry.
    fn keys(&self) -> Keys {
        Keys::default()
    }

    /// Its architecture in the registry; `None` for a model that is not there.
    fn architecture(&self) -> Option<Arch> {
        None
    }

    /// Its training objective.
    fn objective(&self) -> Objective {
        self.architecture().map_or(Objective::Causal, |arch| arch.objective)
    }

    /// Names of the classes of whole sequences, one of which its head chooses; none for a model with another head.
    fn labels(&self) -> &[String] {
        &[]
    }

    /// The same model with a head that chooses one of these classes; None where there is no such model.
    fn classifying(&self, _labels: &[String]) -> Option<Arc<dyn Model>> {
        None
    }

    /// The same model with so many token ids; None where there is no such model.
    fn with_vocab(&self, _vocab: usize) -> Option<Arc<dyn Model>> {
        None
    }

    /// Its `config.json`, which [`from_config`](crate::from_config) reads; null for a model that has no such file.
    fn to_config(&self) -> Value {
        json!(null)
    }

    /// Its description in a GGUF file. The error names what llama.cpp does not compute.
    fn to_gguf(&self) -> Result<GgufModel, String> {
        let arch = self.architecture().map_or("a model that is not in the registry", |arch| arch.title);
        Err(format!("{arch}: it has no such model that continues text"))
    }

    /// Other names under which older Hugging Face files hold the parameter `name`.
    fn aliases(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }

    /// The parameter of checkpoints of earlier versions of this program that held `parameter`, a whole or a part of one; `None`
    /// where it was the same.
    fn earlier(&self, _parameter: &ParameterSpec) -> Option<RowsOf> {
        None
    }

    /// The tensor of Hugging Face files that holds `parameter` among others, which are joined with it in memory
    /// ([`ParameterSpec::joins`]); `None` where it is a tensor of its own.
    fn source(&self, _parameter: &ParameterSpec) -> Option<RowsOf> {
        None
    }

    /// The layout of the weights of its linear layers.
    fn linear_layout(&self) -> Layout {
        Layout::OutIn
    }

    /// Names of tensors that files may hold beside the parameter `name`: copies with the same
    /// numbers, because the architecture ties the two.
    fn copies_of(&self, _name: &str) -> &'static [&'static str] {
        &[]
    }

    /// Returns the numbering of the layers in files of its architecture; `None` for a model that has no such file.
    fn numbered_layers(&self) -> Option<NumberedLayers> {
        None
    }

    /// Beginnings of the names of the tensors of the head that files of the bare model lack: where a file has none with one of them,
    /// these get initial values.
    fn head_prefixes(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns whether a tensor of this name in a file is not a weight of this model and can be ignored.
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
