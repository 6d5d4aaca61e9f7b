//! The configuration of a run, as TOML spells it.
//!
//! Every table refuses unknown keys; every key has a default but the few that only the user can know.
//! [`RunConfig::check`] (in [`check`]) says what cannot work, naming the key, before anything is
//! allocated. The binary reads files and `--set` into this type; each room receives only its part.

use std::sync::Arc;

use phalanx_models::limits::{MAX_POSITIONS, MAX_VOCAB};
use phalanx_models::{Arch, Dropouts, Keys, Model};
use phalanx_tensor::{DType, ProductMethod};
use serde::{Deserialize, Serialize};

use bounds::{MAX_SECONDS, MAX_SEQUENCES, MAX_STEPS};
use declare::Conversion::{Rule, Same, Words};
use declare::Resume::{Fixed, Free, Said, Unsaid};
use declare::{
    AXOLOTL, DEEPSPEED, EARLIER, HUGGING_FACE, KEY, LLAMA_FACTORY, MEGATRON, NANOGPT, TORCHTITAN, Table,
};

#[macro_use]
pub mod declare;
pub(crate) mod bounds;
pub mod check;
mod data;
pub mod device;
mod kernels;
mod key_types;
mod learning_rate;
mod lora;
pub mod memory;
mod metrics;
mod needs;
mod optimizer;
pub mod parallel;
mod parameter_groups;
mod paths;
pub mod placement;
mod preference;
mod resolved;
mod train;
mod trainable;

pub use check::ConfigError;
pub use data::{DataConfig, Documents, Format, Order, Pack, TrainOn};
pub use declare::{Bounds, Declared, Key, Kind, Resume};
pub use device::{CUDA_HEAD_MAX, Communication, DeviceChoice, DeviceConfig, DeviceKind, SimulatedDevice};
pub use kernels::{KernelChoice, KernelSet};
pub use key_types::KeyType;
pub use lora::{ALL_LINEAR, LoraBase, LoraConfig, LoraInit, QuantisedBase, Targets};
pub use memory::{Checkpointing, CheckpointingWord, Chunk, ChunkWord, MemoryConfig, Tier, UpdateOn};
pub use metrics::{MetricsConfig, MetricsSink};
pub use needs::Need;
pub use optimizer::{LastShape, OptimizerConfig, OptimizerKind, ScheduleConfig, ScheduleKind, WarmupShape};
pub use parallel::{CutBy, ParallelConfig, Updates};
pub use parameter_groups::{GroupOfParameters, ParameterGroup};
pub use paths::Paths;
pub use placement::{AutoPlacement, Fractions, PlacementPolicy, PlacementRule};
pub use preference::{Kind as PreferenceWord, PreferenceConfig};
pub use resolved::ResolvedConfig;
pub use train::{Keep, KeepWord, TrainConfig};
pub use trainable::Trainable;

/// The whole configuration.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// The model.
    pub model: ModelConfig,
    /// Adapters of its linear layers.
    pub lora: LoraConfig,
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
    /// The loss of pairs of answers.
    pub preference: PreferenceConfig,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// The learning rate schedule.
    pub schedule: ScheduleConfig,
    /// Steps, evaluations, checkpoints, seed and threads.
    pub train: TrainConfig,
    /// Files of metrics.
    pub metrics: MetricsConfig,
    /// Watchdog settings of ranks.
    pub run: WatchConfig,
    /// Values that the program has decided.
    #[serde(skip_serializing_if = "Recorded::is_empty")]
    pub recorded: Recorded,
}

/// Reasons for which a resumed run keeps its model.
const TENSORS: &str = "its checkpoints have tensors of this size";
const STATES: &str = "its checkpoints have optimizer states of the parameters that this trains";

/// Consequences for a resumed run.
const OTHER_WINDOWS: &str =
    "the validation loss is that of other windows, and does not compare with the ones before";
const OTHER_SEQ: &str = "the text is cut into other windows: the samples that are left of this epoch are others, and the validation loss does \
                         not compare with the ones before";
const OTHER_LOSS: &str =
    "training losses have another term, and do not compare with the ones before; validation losses do";

table! {
    /// `[run]`
    "run" WatchConfig {
        /// Seconds after which a rank is stalled that neither computes, nor communicates, nor waits for a disk, and after which
        /// ranks have that all wait for each other. A rank that computes is never stalled, however long others wait for it.
        stall_timeout_s: u64 = 10, KEY.from(0.0, MAX_SECONDS)
            .foreign(&[
                (EARLIER, "timeout_s", Rule, "10 by default: it need not exceed any computation, because a rank that computes is never stalled"),
            ]);
    }
}

table! {
    /// `[recorded]`
    "recorded" Recorded {
        /// Keys whose values Phalanx has decided for the machine of then: it writes this itself. What was given binds a resumed run; what
        /// was decided gives way.
        decided: Vec<String> = Vec::new(), KEY.resume(Unsaid);
    }
}

impl Recorded {
    fn is_empty(&self) -> bool {
        self.decided.is_empty()
    }
}

table! {
    /// `[model]`
    "model" ModelConfig {
        /// Architecture: the name of one in the registry.
        arch: Arch = Arch::GPT2, KEY.resume(Fixed("its checkpoints have the tensors of this architecture"))
            .foreign(&[
                (HUGGING_FACE, "model_type", Rule, ""),
                (TORCHTITAN, "model.name", Words(&[("llama3", "llama"), ("qwen3", "qwen3")]), ""),
            ]);
        /// Tokens of a training sequence.
        seq: usize = 1024, KEY.resume(Said(OTHER_SEQ)).from(1.0, MAX_POSITIONS as f64)
            .foreign(&[
                (NANOGPT, "block_size", Same, ""),
                (TORCHTITAN, "training.seq_len", Same, ""),
                (AXOLOTL, "sequence_len", Same, ""),
                (LLAMA_FACTORY, "cutoff_len", Same, ""),
                (HUGGING_FACE, "n_ctx", Rule, ""),
                (MEGATRON, "seq_length", Rule, ""),
            ]);
        /// Rows of the token table; from the tokenizer when left out.
        vocab: Option<usize> = None, KEY.resume(Fixed(TENSORS)).from(1.0, MAX_VOCAB as f64).foreign(&[(HUGGING_FACE, "vocab_size", Rule, "")]);
        /// Special tokens that the tokenizer of `model.init` gets, behind its last id. The tables get the rows that they lack, which start
        /// near the mean of the others.
        add_tokens: Vec<String> = Vec::new(), KEY.resume(Fixed(TENSORS))
            .needs(&[Need::any(&[("model.init", needs::SET)], "the tokenizer is that of a folder")]);
        /// Dropout probability in training. The values of an imported `config.json` are ignored.
        dropout: f64 = 0.0, KEY.from(0.0, bounds::BELOW_1)
            .foreign(&[
                (HUGGING_FACE, "hidden_dropout_prob", Rule, ""),
                (NANOGPT, "dropout", Same, ""),
            ]);
        /// Dropout of the embedding (`embd_pdrop`); `dropout` when left out.
        embedding_dropout: Option<f64> = None, KEY.from(0.0, bounds::BELOW_1)
            .foreign(&[(HUGGING_FACE, "embd_pdrop", Rule, "")]);
        /// Dropout of the attention probabilities (`attn_pdrop`); `dropout` when left out.
        attention_dropout: Option<f64> = None, KEY.from(0.0, bounds::BELOW_1)
            .foreign(&[(HUGGING_FACE, "attn_pdrop", Rule, ""), (HUGGING_FACE, "attention_probs_dropout_prob", Rule, "")]);
        /// Dropout of the projections into the residual stream (`resid_pdrop`); `dropout` when left out.
        residual_dropout: Option<f64> = None, KEY.from(0.0, bounds::BELOW_1)
            .foreign(&[(HUGGING_FACE, "resid_pdrop", Rule, ""), (MEGATRON, "hidden_dropout", Rule, "")]);
        /// A Hugging Face directory whose weights (and shape) to start from.
        init: Option<String> = None, KEY
            .foreign(&[
                (NANOGPT, "init_from", Rule, "a Hugging Face folder; --resume continues a run"),
                (HUGGING_FACE, "model_name_or_path", Same, "a folder with config.json and safetensors files"),
                (AXOLOTL, "base_model", Same, "a folder with config.json and safetensors files"),
            ]);
        /// Patterns of the names of parameters that are trained, as `*.h.1?.*`; all when left out. Others are frozen: they have neither
        /// gradients nor optimizer states.
        trainable: Vec<String> = Vec::new(), KEY.resume(Fixed(STATES))
            .foreign(&[(AXOLOTL, "unfrozen_parameters", Rule, "patterns, not regular expressions")]);
        /// Patterns of the names of parameters that are frozen, even if they match one of `trainable`. In 16 bits they are rounded to
        /// `precision.compute`, also in checkpoints and exports.
        frozen: Vec<String> = Vec::new(), KEY.resume(Fixed(STATES));
        ..
        /// The keys that the architecture reads, as `layers`. It has a value for those that are left out.
        keys: Keys;
    }
}

impl RunConfig {
    /// Records that the program has decided the value of key `path`, as `train.threads`.
    pub fn decide(&mut self, path: &str) {
        if !self.is_decided(path) {
            self.recorded.decided.push(path.to_string());
        }
    }

    /// Returns whether the program has decided the value of a key, now or when a resumed run began.
    pub fn is_decided(&self, path: &str) -> bool {
        self.recorded.decided.iter().any(|decided| decided == path)
    }

    /// Gives `memory.device_budget_mb` a value that nobody gave.
    pub fn decide_device_budget(&mut self, mib: f64) {
        self.memory.device_budget_mb = Some(mib);
        self.decide("memory.device_budget_mb");
    }

    /// Gives `memory.host_budget_mb` a value that nobody gave.
    pub fn decide_host_budget(&mut self, mib: f64) {
        self.memory.host_budget_mb = Some(mib);
        self.decide("memory.host_budget_mb");
    }

    /// The tables with their values.
    fn tables(&self) -> [&dyn Table; 16] {
        let RunConfig {
            model,
            lora,
            data,
            batch,
            parallel,
            device,
            memory,
            precision,
            loss,
            preference,
            optimizer,
            schedule,
            train,
            metrics,
            run,
            recorded,
        } = self;
        [
            model, lora, data, batch, parallel, device, memory, precision, loss, preference, optimizer,
            schedule, train, metrics, run, recorded,
        ]
    }

    /// Every key, those of all architectures among them.
    pub fn keys() -> Vec<Key> {
        let mut keys: Vec<Key> =
            RunConfig::default().tables().into_iter().flat_map(|table| table.keys()).copied().collect();
        for own in Keys::known() {
            if keys.iter().all(|key| (key.table, key.name) != ("model", own.name)) {
                let (kind, help) = (declare::kind_of(own.values), std::slice::from_ref(&own.help));
                keys.push(Key { table: "model", name: own.name, help, kind, resume: Fixed(TENSORS), ..KEY });
            }
        }
        keys
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
        self.arch.model(&self.keys, vocab, self.seq).map_err(ConfigError::of_model)
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

table! {
    /// `[batch]`
    "batch" BatchConfig {
        /// Sequences of one optimizer step over all ranks and micro-batches.
        global: usize = 8, KEY.resume(Said("optimizer.lr and schedule count steps as before")).from(0.0, MAX_SEQUENCES)
            .foreign(&[
                (DEEPSPEED, "train_batch_size", Rule, ""),
                (TORCHTITAN, "training.global_batch_size", Rule, ""),
                (MEGATRON, "global_batch_size", Rule, ""),
            ]);
        /// Sequences that one rank computes at once: `global / data` when left out, the largest number that fits with `"auto"`.
        micro: Option<usize> = None, KEY.from(1.0, MAX_SEQUENCES)
            .foreign(&[
                (NANOGPT, "batch_size", Rule, "batch.global counts the sequences of a step over all ranks"),
                (DEEPSPEED, "train_micro_batch_size_per_gpu", Rule, ""),
                (TORCHTITAN, "training.local_batch_size", Rule, ""),
                (AXOLOTL, "micro_batch_size", Rule, ""),
                (HUGGING_FACE, "per_device_train_batch_size", Rule, ""),
                (HUGGING_FACE, "per_device_eval_batch_size", Rule, "evaluation uses the same micro-batch"),
                (MEGATRON, "micro_batch_size", Rule, ""),
            ]);
        /// When gradients are reduced over ranks: after `each` micro-batch, or `defer`red to the last.
        reduce: Reduce = Reduce::Each, KEY;
        /// Order in which the gradients of micro-batches are added.
        sum: Sum = Sum::Running, KEY.resume(Said("sums over micro-batches are rounded otherwise"))
            .needs(&[Need::of(&["tree"], &[("parallel.updates", &["synchronous"])], "each rank's gradients are applied by themselves")]);
    }
}

words! {
    /// When gradients of several micro-batches are reduced over ranks.
    Reduce {
        /// After each micro-batch. Every ZeRO stage gives the same bits; only shards stay resident.
        Each = "each",
        /// After the last micro-batch. Fewer bytes are sent; whole gradients stay resident under every ZeRO stage.
        Defer = "defer",
    }
}

words! {
    /// Order in which the gradients of several micro-batches are added.
    Sum {
        /// Each to the sum of those before it, on each rank.
        Running = "running",
        /// By the tree in which ranks add: each micro-batch in a buffer of its own, so that its number on a rank does not change the bits.
        Tree = "tree",
    }
}

table! {
    /// `[precision]`; the keys of the loss scale are DeepSpeed's.
    "precision" PrecisionConfig {
        /// Element type of parameters and activations: `f32`, `bf16` or `f16`. With 16 bits, f32 master weights
        /// are kept beside the optimizer states.
        compute: Float = Float::F32, KEY.resume(Said("results are rounded otherwise, and a loss scale starts anew"))
            .foreign(&[
                (NANOGPT, "dtype", Words(DTYPES), "\"f32\", \"bf16\" or \"f16\""),
                (TORCHTITAN, "training.mixed_precision_param", Words(DTYPES), "parameters have this type, with f32 master weights"),
                (DEEPSPEED, "fp16.enabled", Rule, "set it to \"f16\""),
                (DEEPSPEED, "bf16.enabled", Rule, "set it to \"bf16\""),
                (HUGGING_FACE, "fp16", Rule, "set it to \"f16\""),
                (HUGGING_FACE, "bf16", Rule, "set it to \"bf16\""),
            ]);
        /// Element type of the gradient buffers in which micro-batches are summed: `f32`, or that of `compute`.
        accumulate: Float = Float::F32, KEY
            .foreign(&[
                (DEEPSPEED, "data_types.grad_accum_dtype", Words(DTYPES), ""),
                (TORCHTITAN, "training.mixed_precision_reduce", Words(DTYPES), ""),
            ]);
        /// Element type in which gradients are sent between ranks; that of `accumulate` when left out.
        communicate: Option<Float> = None, KEY.foreign(&[(DEEPSPEED, "communication_data_type", Words(DTYPES), "")]);
        /// Method to compute matrix products of f32 and f16.
        products: Products = Products::Auto, KEY.keeps().resume(Free)
            .needs(&[
                Need::of(&["split"], &[("precision.compute", &["f32", "f16"])], "bf16 has one part"),
                Need::of(&["split"], &[("device.kind", &["auto", "cpu", "simulated"])], "cards have no tile registers"),
                Need::of(&["tf32"], &[("precision.compute", &["f32"])], "it rounds f32"),
                Need::of(&["tf32"], &[("device.kind", &["cuda", "auto"])], "it is of the tensor cores of cards"),
            ]);
        /// A static loss scale, or 0 for a dynamic one. This key and those below are for `compute = "f16"`.
        loss_scale: f64 = 0.0, KEY.foreign(&[(DEEPSPEED, "fp16.loss_scale", Same, "")]);
        /// The first dynamic scale, as a power of 2.
        initial_scale_power: u32 = 16, KEY.from(0.0, 126.0).hint("2 to this power is the first loss scale")
            .foreign(&[(DEEPSPEED, "fp16.initial_scale_power", Same, "")]);
        /// Steps without overflow after which the dynamic scale is doubled.
        loss_scale_window: u64 = 1000, KEY.from(1.0, MAX_STEPS)
            .foreign(&[(DEEPSPEED, "fp16.loss_scale_window", Same, "")]);
        /// Overflows after which the dynamic scale is halved.
        hysteresis: u32 = 2, KEY.from(1.0, u32::MAX as f64).foreign(&[(DEEPSPEED, "fp16.hysteresis", Same, "")]);
        /// Counts only consecutive overflows for `hysteresis`.
        consecutive_hysteresis: bool = false, KEY.foreign(&[(DEEPSPEED, "fp16.consecutive_hysteresis", Same, "")]);
        /// The smallest scale; an overflow at this scale ends the run.
        min_loss_scale: f64 = 1.0, KEY
            .foreign(&[(DEEPSPEED, "fp16.min_loss_scale", Same, "")]);
    }
}

/// Names of element types elsewhere.
const DTYPES: &[(&str, &str)] = &[
    ("fp32", "f32"),
    ("float32", "f32"),
    ("fp16", "f16"),
    ("float16", "f16"),
    ("bf16", "bf16"),
    ("bfp16", "bf16"),
    ("bfloat16", "bf16"),
];

impl PrecisionConfig {
    /// Method by which devices compute matrix products; None if each device chooses one that it supports.
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

words! {
    /// Ways to compute matrix products of f32 and f16.
    Products {
        /// The fastest of these: by multiply-adds on all processors that were measured. A run records which.
        Auto = "auto",
        /// By multiply-adds of f32.
        Fma = "fma",
        /// On tile registers: an f32 as the sum of three bf16, an f16 of two.
        Split = "split",
        /// On the tensor cores of cards: an f32 rounded to 11 bits.
        Tf32 = "tf32",
    }
}

words! {
    /// Element types of floating-point numbers.
    Float {
        /// IEEE binary32.
        F32 = "f32",
        /// Upper half of binary32.
        Bf16 = "bf16",
        /// IEEE binary16.
        F16 = "f16",
    }
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

table! {
    /// `[loss]`: terms of the training loss. Evaluation always reports the plain cross entropy.
    "loss" LossConfig {
        /// Probability that is spread over all tokens of the vocabulary instead of the target.
        label_smoothing: f64 = 0.0, KEY.resume(Said(OTHER_LOSS)).from(0.0, bounds::BELOW_1)
            .foreign(&[(HUGGING_FACE, "label_smoothing_factor", Same, "")]);
        /// Weight of the squared logarithm of the softmax's denominator, which keeps logits near zero.
        z_loss: f64 = 0.0, KEY.resume(Said(OTHER_LOSS)).from(0.0, f64::MAX);
    }
}
