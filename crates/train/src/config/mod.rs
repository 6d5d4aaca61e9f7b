//! The configuration of a run, as TOML spells it.
//!
//! Every table refuses unknown keys; every key has a default but the few that only the user can know.
//! [`RunConfig::check`] (in [`check`]) says what cannot work, naming the key, before anything is
//! allocated. The binary reads files and `--set` into this type; each room receives only its part.

use std::sync::Arc;

use phalanx_data::TokenType;
use phalanx_models::limits::MAX_VOCAB;
use phalanx_models::{Arch, Dropouts, KeyError, Keys, Model};
use phalanx_tensor::{DType, ProductMethod};
use serde::{Deserialize, Serialize};

mod bounds;
pub mod check;
mod data;
pub mod device;
mod kernels;
mod learning_rate;
pub mod memory;
pub mod parallel;
mod parameter_groups;
mod paths;
pub mod placement;
mod resolved;
mod train;
mod trainable;
mod update_in_backward;

pub use check::ConfigError;
pub use device::{CUDA_HEAD_MAX, Communication, DeviceChoice, DeviceConfig, DeviceKind, SimulatedDevice};
pub use kernels::{KernelChoice, KernelSet};
pub use memory::{Checkpointing, CheckpointingWord, Chunk, ChunkWord, MemoryConfig, Tier, UpdateOn};
pub use parallel::{CutBy, ParallelConfig, Updates};
pub use parameter_groups::{GroupOfParameters, ParameterGroup};
pub use paths::Paths;
pub use placement::{AutoPlacement, Fractions, Placement, PlacementRule};
pub use resolved::ResolvedConfig;
pub use train::{Keep, KeepWord, TrainConfig};
pub use trainable::Trainable;

/// The whole configuration.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// The model.
    pub model: ModelConfig,
    /// The training data.
    pub data: DataConfig,
    /// Sequences of a step and of a micro-batch.
    pub batch: BatchConfig,
    /// The mesh of ranks, ZeRO stage and pipeline schedule.
    pub parallel: ParallelConfig,
    /// The device of each rank.
    pub device: DeviceConfig,
    /// Chunks of parameters, activation checkpointing, memory limit, and what lies outside of device memory.
    pub memory: MemoryConfig,
    /// Element types.
    pub precision: PrecisionConfig,
    /// Terms of the loss.
    pub loss: LossConfig,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// The learning rate schedule.
    pub schedule: ScheduleConfig,
    /// Steps, evaluations, checkpoints, seed and threads.
    pub train: TrainConfig,
    /// How ranks are watched.
    pub run: WatchConfig,
}

/// `[run]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WatchConfig {
    /// Seconds after which a rank is stalled that neither computes, nor communicates, nor waits for a disk, and after which
    /// ranks have that all wait for each other. A rank that computes is never stalled, however long others wait for it.
    pub stall_timeout_s: u64,
}

impl Default for WatchConfig {
    fn default() -> Self {
        WatchConfig { stall_timeout_s: 10 }
    }
}

/// `[model]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelConfig {
    /// Architecture: the name of one in the registry.
    pub arch: Arch,
    /// The keys that the architecture reads, as `layers`. It has a value for those that are left out.
    #[serde(flatten)]
    pub keys: Keys,
    /// Tokens of a training sequence.
    pub seq: usize,
    /// Rows of the token table; from the tokenizer when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab: Option<usize>,
    /// Dropout probability in training. The values of an imported `config.json` are ignored.
    pub dropout: f64,
    /// Dropout of the embedding (`embd_pdrop`); `dropout` when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_dropout: Option<f64>,
    /// Dropout of the attention probabilities (`attn_pdrop`); `dropout` when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_dropout: Option<f64>,
    /// Dropout of the projections into the residual stream (`resid_pdrop`); `dropout` when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residual_dropout: Option<f64>,
    /// A Hugging Face directory whose weights (and shape) to start from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<String>,
    /// Patterns of the names of parameters that are trained, as `*.h.1?.*`; all when left out. Others are frozen: they have neither
    /// gradients nor optimizer states.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub trainable: Vec<String>,
    /// Patterns of the names of parameters that are frozen, even if they match one of `trainable`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<String>,
}

impl Default for ModelConfig {
    fn default() -> Self {
        ModelConfig {
            arch: Arch::GPT2,
            keys: Keys::default(),
            seq: 1024,
            vocab: None,
            dropout: 0.0,
            embedding_dropout: None,
            attention_dropout: None,
            residual_dropout: None,
            init: None,
            trainable: Vec::new(),
            frozen: Vec::new(),
        }
    }
}

impl ModelConfig {
    /// Number of token ids of the published model whose size the keys name, if they name one.
    pub fn published_vocab(&self) -> Option<usize> {
        (self.arch.vocab)(self.arch, &self.keys)
    }

    /// The model of these keys, with `vocab` token ids.
    ///
    /// # Errors
    /// A key that the architecture does not have, or with a value that it cannot have.
    pub fn build(&self, vocab: usize) -> Result<Arc<dyn Model>, ConfigError> {
        self.arch.model(&self.keys, vocab, self.seq).map_err(|KeyError { key, given, expected }| {
            ConfigError { key: format!("model.{key}").into(), given, expected }
        })
    }

    /// The model of these keys, with a vocabulary of any size where it is not known yet: for what does not depend on it.
    ///
    /// # Errors
    /// As for [`ModelConfig::build`].
    pub fn draft(&self) -> Result<Arc<dyn Model>, ConfigError> {
        self.build(self.vocab.unwrap_or(MAX_VOCAB))
    }

    /// The probabilities with which the run drops.
    pub fn dropouts(&self) -> Dropouts {
        let p = |own: Option<f64>| own.unwrap_or(self.dropout) as f32;
        Dropouts {
            embedding: p(self.embedding_dropout),
            attention: p(self.attention_dropout),
            residual: p(self.residual_dropout),
        }
    }
}

/// `[data]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Text files or folders.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub text: Vec<String>,
    /// Extensions of the files that are read from folders; all text files when empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub extensions: Vec<String>,
    /// In JSON files, of which each line or record is a document: the key of the text.
    pub text_key: String,
    /// Extensions of files that are plain text whatever they hold, such as `json` and `csv`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub plain: Vec<String>,
    /// The fraction of lines, and of the bytes of files, that may be skipped; when left out, 1 % of the lines and half of the
    /// bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_skipped: Option<f64>,
    /// Token files, instead of text, by paths and patterns; they are read one after the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Paths>,
    /// Token files for evaluation, instead of the fraction `validation`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_tokens: Option<Paths>,
    /// How ids are stored in token files without a header: `u8`, `u16`, `u32`, `i64`; `auto` is `u16`.
    pub token_type: TokenType,
    /// Whether token files are accepted that look like something else, as zeros or text.
    pub unusual_tokens: bool,
    /// `byte`, `char`, `gpt2`, or the path of a Hugging Face `tokenizer.json` or of a folder with tokenizer files. When left
    /// out: the tokenizer of the folder `model.init` or of the resumed run, else `byte`.
    pub tokenizer: String,
    /// Whether a model that has learned the ids of another tokenizer learns those of `tokenizer` anew.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub new_tokenizer: bool,
    /// For a masked model (`bert`): the id that replaces a hidden token. When left out: the tokenizer's `[MASK]`, or else
    /// one more row of the vocabulary.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_token: Option<u32>,
    /// `shuffled` or `sequential`.
    pub order: Order,
    /// Fraction of the tokens, at the end, that is held out for evaluation.
    pub validation: f64,
}

impl Default for DataConfig {
    fn default() -> Self {
        DataConfig {
            text: Vec::new(),
            extensions: Vec::new(),
            text_key: "text".into(),
            plain: Vec::new(),
            max_skipped: None,
            tokens: None,
            validation_tokens: None,
            token_type: TokenType::Auto,
            unusual_tokens: false,
            tokenizer: "byte".into(),
            new_tokenizer: false,
            mask_token: None,
            order: Order::Shuffled,
            validation: 0.1,
        }
    }
}

/// Order of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// A new permutation every epoch.
    Shuffled,
    /// Sample k covers tokens `k*seq` to `k*seq + seq - 1`.
    Sequential,
}

/// `[batch]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchConfig {
    /// Sequences of one optimizer step over all ranks and micro-batches.
    pub global: usize,
    /// Sequences that one rank computes at once; `global / data` when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro: Option<usize>,
    /// When gradients are reduced over ranks: after `each` micro-batch, or `defer`red to the last.
    pub reduce: Reduce,
}

impl Default for BatchConfig {
    fn default() -> Self {
        BatchConfig { global: 8, micro: None, reduce: Reduce::Each }
    }
}

/// When gradients of several micro-batches are reduced over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduce {
    /// After each micro-batch. Every ZeRO stage gives the same bits; only shards stay resident.
    Each,
    /// After the last micro-batch. Fewer bytes are sent; whole gradients stay resident under every ZeRO stage.
    Defer,
}

/// `[precision]`; the keys of the loss scale are DeepSpeed's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrecisionConfig {
    /// Element type of parameters and activations: `f32`, `bf16` or `f16`. With 16 bits, f32 master weights
    /// are kept beside the optimizer states.
    pub compute: Float,
    /// Element type of the gradient buffers in which micro-batches are summed: `f32`, or that of `compute`.
    pub accumulate: Float,
    /// Element type in which gradients are sent between ranks; that of `accumulate` when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub communicate: Option<Float>,
    /// How products of f32 and f16 are computed.
    pub products: Products,
    /// A static loss scale, or 0 for a dynamic one. This key and those below are for `compute = "f16"`.
    pub loss_scale: f64,
    /// The first dynamic scale, as a power of 2.
    pub initial_scale_power: u32,
    /// Steps without overflow after which the dynamic scale is doubled.
    pub loss_scale_window: u64,
    /// Overflows after which the dynamic scale is halved.
    pub hysteresis: u32,
    /// Whether only consecutive overflows count for `hysteresis`.
    pub consecutive_hysteresis: bool,
    /// The smallest scale; an overflow at this scale ends the run.
    pub min_loss_scale: f64,
}

impl PrecisionConfig {
    /// How devices compute products; None where a device chooses by what it has.
    pub fn product_method(&self) -> Option<ProductMethod> {
        match self.products {
            Products::Auto if self.compute == Float::Bf16 => Some(ProductMethod::Fma),
            Products::Auto => None,
            Products::Fma => Some(ProductMethod::Fma),
            Products::Split => Some(ProductMethod::Split),
            Products::Tf32 => Some(ProductMethod::Tf32),
        }
    }
}

impl Default for PrecisionConfig {
    fn default() -> Self {
        PrecisionConfig {
            compute: Float::F32,
            accumulate: Float::F32,
            communicate: None,
            products: Products::Auto,
            loss_scale: 0.0,
            initial_scale_power: 16,
            loss_scale_window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            min_loss_scale: 1.0,
        }
    }
}

/// Ways to compute matrix products of f32 and f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Products {
    /// The fastest of these: by multiply-adds on all processors that were measured. A run records which.
    #[default]
    Auto,
    /// By multiply-adds of f32.
    Fma,
    /// On tile registers: an f32 as the sum of three bf16, an f16 of two.
    Split,
    /// On the tensor cores of cards: an f32 rounded to 11 bits.
    Tf32,
}

impl Products {
    /// The name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Products::Auto => "auto",
            Products::Fma => "fma",
            Products::Split => "split",
            Products::Tf32 => "tf32",
        }
    }
}

/// Element types of floating-point numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Float {
    /// IEEE binary32.
    F32,
    /// Upper half of binary32.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl From<Float> for DType {
    fn from(float: Float) -> DType {
        match float {
            Float::F32 => DType::F32,
            Float::Bf16 => DType::BF16,
            Float::F16 => DType::F16,
        }
    }
}

/// `[loss]`: terms of the training loss. Evaluation always reports the plain cross entropy.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossConfig {
    /// Probability that is spread over all tokens of the vocabulary instead of the target.
    pub label_smoothing: f64,
    /// Weight of the squared logarithm of the softmax's denominator, which keeps logits near zero.
    pub z_loss: f64,
}

/// `[optimizer]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// `adamw` or `sgd`.
    pub kind: OptimizerKind,
    /// Peak learning rate.
    pub lr: f64,
    /// AdamW: decay of the first moment. SGD: momentum.
    pub beta1: f64,
    /// AdamW: decay of the second moment.
    pub beta2: f64,
    /// AdamW: added to the root of the second moment.
    pub eps: f64,
    /// Weight decay of matrices; biases and norms have none.
    pub weight_decay: f64,
    /// Gradients are clipped to this global norm; 0 disables clipping.
    pub clip: f64,
    /// Parameters with another learning rate or weight decay; the first group that matches a parameter has it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub group: Vec<ParameterGroup>,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        OptimizerConfig {
            kind: OptimizerKind::Adamw,
            lr: 6e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip: 1.0,
            group: Vec::new(),
        }
    }
}

/// The optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// AdamW.
    Adamw,
    /// SGD with momentum.
    Sgd,
}

/// `[schedule]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleConfig {
    /// `cosine`, `linear` or `constant`.
    pub kind: ScheduleKind,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Learning rate at the end of cosine and linear.
    pub min_lr: f64,
    /// Step at which cosine and linear reach `min_lr`, where the rate stays (nanoGPT's `lr_decay_iters`);
    /// `train.steps` when left out. A resumed run keeps it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// Step after which cosine and linear begin again, warm-up included (a warm restart); `decay_steps` counts
    /// from there. None when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_step: Option<u64>,
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        ScheduleConfig {
            kind: ScheduleKind::Cosine,
            warmup: 0,
            min_lr: 0.0,
            decay_steps: None,
            restart_step: None,
        }
    }
}

/// Shapes of the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// Half a cosine from `lr` to `min_lr`.
    Cosine,
    /// A line from `lr` to `min_lr`.
    Linear,
    /// `lr`.
    Constant,
}
