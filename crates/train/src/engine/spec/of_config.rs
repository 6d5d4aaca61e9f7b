//! Takes a configuration apart: which part of a specification receives each key.
//!
//! The tables are taken apart without `..`. A key that is not named here does not compile (E0027), and one that no part uses is an unused
//! variable, which is denied. Keys that no part receives are named with `_`, beside who reads them.
#![deny(unused_variables)]

use std::path::PathBuf;
use std::sync::Arc;

use phalanx_data::Masking;
use phalanx_layers::{Checkpointing, Input, Lora, Network, POSITIONS};
use phalanx_models::{Model, Objective};
use phalanx_optim::loss_scale::Dynamic;
use phalanx_optim::rules::{Adafactor, Lion};
use phalanx_optim::{LossScaling, Optimizer};
use phalanx_parallel::InputOptions;
use phalanx_parallel::zero::{self, Residence};
use phalanx_plan::{ChunkSize, Precision, Search, ZeroStage, lay_out};
use phalanx_tensor::ProductMethod;

use super::{
    BatchPart, DevicePart, LossPart, MeshPart, ModelPart, PipelinePart, PrecisionPart, Spec, SpecError,
    UpdatePart,
};
use crate::config::check::refuse;
use crate::config::{
    self, BatchConfig, CheckpointingWord, Chunk, ChunkWord, ConfigError, DataConfig, DeviceConfig, Documents,
    Float, LoraConfig, LossConfig, MemoryConfig, ModelConfig, OptimizerConfig, OptimizerKind, ParallelConfig,
    PrecisionConfig, QuantisedBase, Reduce, RunConfig, ScheduleConfig, Sum, TrainConfig, Trainable, UpdateOn,
};
use crate::engine::evaluation::parts;
use crate::engine::parameter_sizes::sizes;

impl Spec {
    /// Everything except the stages and what depends on them; with the whole network.
    pub(super) fn uncut(
        config: &RunConfig,
        model: Arc<dyn Model>,
        evaluated: usize,
        threads: usize,
    ) -> Result<(Spec, Network), SpecError> {
        config.check_with(&*model)?;
        #[rustfmt::skip]
        let RunConfig {
            model: keys, lora, data, batch, parallel, device, memory, precision, loss, optimizer, train,
            // RunConfig::preference_loss
            preference: _,
            // RunConfig::learning_rate
            schedule: ScheduleConfig { kind: _, warmup: _, warmup_share: _, warmup_shape: _, min_lr: _, decay_steps: _, restart_step: _,
                cycles: _, power: _, timescale: _, last_steps: _, last_shape: _ },
            // The watchdog of ranks; names of keys, for a resumed run; RunFiles::open.
            run: _, recorded: _, metrics: _,
        } = config;
        let (axes, schedule, placement) = (config.mesh()?, config.schedule()?, config.placement_rule()?);
        let (sequence_parallel, of_zero) = of_parallel(parallel);
        let (of_batch, residence) = (of_batch(batch), vec![placement.before_dry_runs(); schedule.stages()]);
        let memory = OfMemory::new(memory, (of_zero, of_batch.1), residence);
        let (seq, init) = of_model(keys);
        let (adapters, adapter) = of_lora(lora);
        let quantised = QuantisedBase::of(lora, axes.tensor, &*model);
        let mut model = ModelPart {
            definition: model.dropping(keys.dropouts()),
            adapters,
            quantised,
            trainable: Trainable::default(),
            preference: config.preference_loss(),
            checkpointing: memory.checkpointing,
            init,
            adapter,
            seed: of_train(train),
        };
        let network = model.whole();
        model.trainable = Trainable::of(keys, model.adapters.is_some(), &network)?;
        let network = model.trainable.applied_to(network);
        config.check_work(axes, (&network, model.definition.vocab()), evaluated)?;
        let (optimizer_rule, clip) = of_optimizer(optimizer);
        let chunk_size = with_width(memory.chunk_size, network.width());
        let layout = Arc::new(lay_out(&sizes(&optimizer_rule, &network), axes.data as u64, &chunk_size)?);
        let (evaluation_parts, evaluation) = parts(config, axes, &schedule, evaluated);
        let evaluations = [evaluated, evaluation_parts, evaluation.micro_batches];
        let batch = BatchPart::of(&*model.definition, config, (seq, of_data(data)), of_batch, evaluations);
        check_whole(&*model.definition, evaluated, batch.evaluation_rows() * axes.data)?;
        let (precision, products) = of_precision(precision);
        let [host_addressable, linked] = of_device(device);
        let (stages, ties) = (Vec::new(), Vec::new());
        let spec = Spec {
            model,
            batch,
            mesh: MeshPart { axes, stages, ties, sequence_parallel, chunk_size, layout },
            pipeline: PipelinePart::new(schedule, evaluation),
            zero: memory.zero,
            inputs: memory.inputs,
            precision,
            loss: of_loss(loss),
            update: UpdatePart {
                rates: Arc::new(optimizer.rates(&network)?),
                optimizer: optimizer_rule,
                schedule_of_rate: Arc::new(config.learning_rate()),
                clip,
            },
            device: DevicePart {
                host_addressable,
                linked,
                slice_bytes: device.slice_bytes(),
                beside_plan: None,
                disk: config.disk(),
                pin_host: memory.pin_host,
                threads,
                products,
            },
            placement,
        };
        spec.check_rule(&network)?;
        Ok((spec, network))
    }
}

/// Tokens of a sequence, and the folder of initial weights.
fn of_model(keys: &ModelConfig) -> (usize, Option<PathBuf>) {
    #[rustfmt::skip]
    let ModelConfig {
        seq, init,
        // ModelConfig::build
        arch: _, vocab: _, keys: _,
        // ModelConfig::dropouts
        dropout: _, embedding_dropout: _, attention_dropout: _, residual_dropout: _,
        // Trainable::of
        trainable: _, frozen: _,
        // Learned::adding
        add_tokens: _,
    } = keys;
    (*seq, init.as_ref().map(PathBuf::from))
}

/// The adapters, and the folder of their initial values.
fn of_lora(keys: &LoraConfig) -> (Option<Arc<Lora>>, Option<PathBuf>) {
    #[rustfmt::skip]
    let LoraConfig {
        adapter,
        // LoraConfig::adapters
        rank: _, alpha: _, dropout: _, targets: _, rslora: _, dora: _, init: _, new_rows: _,
        // QuantisedBase::of
        base: _,
    } = keys;
    (keys.adapters(), adapter.as_ref().map(PathBuf::from))
}

/// True if documents in a sequence do not see each other.
fn of_data(data: &DataConfig) -> bool {
    #[rustfmt::skip]
    let DataConfig {
        documents, chat,
        // RunConfig::preference_loss
        pairs: _,
        // What samples are read from, and in which order: `dataset`.
        text: _, extensions: _, text_key: _, plain: _, max_skipped: _, tokens: _, validation_tokens: _, rows: _,
        validation_rows: _, token_type: _, unusual_tokens: _, tokenizer: _, new_tokenizer: _, mask_token: _, end_token: _, order: _, validation: _,
        validation_chat: _, validation_pairs: _, format: _, template: _, train_on: _, pack: _, date: _,
    } = data;
    *documents == Documents::Apart || chat.is_some()
}

/// Sequences of a step, whether gradients are reduced once per step, and whether those of micro-batches are added by a tree.
fn of_batch(batch: &BatchConfig) -> (usize, bool, bool) {
    // RunConfig::micro_batch_size
    let BatchConfig { global, reduce, sum, micro: _ } = batch;
    (*global, *reduce == Reduce::Defer, *sum == Sum::Tree)
}

/// Sequence parallelism, and ZeRO stage and overlap.
fn of_parallel(parallel: &ParallelConfig) -> (bool, (ZeroStage, bool)) {
    #[rustfmt::skip]
    let ParallelConfig {
        sequence_parallel, zero, overlap,
        // RunConfig::mesh
        ranks: _, pipeline: _, data: _, tensor: _,
        // RunConfig::schedule
        schedule: _, chunks: _,
        // RunConfig::micro_batches, Spec::new
        micro_batches: _, cut: _,
        // The program, which chooses the engine, and the asynchronous engine.
        updates: _, max_staleness: _,
    } = parallel;
    (*sequence_parallel, (ZeroStage::from_number(*zero).expect("a checked configuration"), *overlap))
}

/// Seed of dropout and initial values.
fn of_train(train: &TrainConfig) -> u64 {
    #[rustfmt::skip]
    let TrainConfig {
        seed,
        // The loop of steps, and the program.
        steps: _, epochs: _, eval_every: _, eval_first: _, patience: _, eval_samples: _, save_every: _, keep: _, keep_best: _, sample: _,
        // The caller, who counts the cores of the machine.
        threads: _,
    } = train;
    *seed
}

/// Decisions of the keys of `[memory]`.
struct OfMemory {
    checkpointing: Checkpointing,
    chunk_size: ChunkSize,
    zero: zero::Options,
    inputs: InputOptions,
    pin_host: Option<bool>,
}

impl OfMemory {
    fn new(
        memory: &MemoryConfig,
        ((stage, overlap), defer): ((ZeroStage, bool), bool),
        residence: Vec<Residence>,
    ) -> OfMemory {
        #[rustfmt::skip]
        let &MemoryConfig {
            chunk, search_range_mb, min_chunk_size_mb, hidden_dim, prefetch, checkpointing,
            update, delayed_update, gradients_in_place, update_in_backward,
            activations, partition_activations, pin_memory,
            // MemoryConfig::buffer
            buffer_mb: _,
            // RunConfig::placement_rule
            parameters: _, gradients: _, optimizer: _, placement: _,
            shard_param_frac: _, offload_optim_frac: _, offload_param_frac: _,
            device_budget_mb: _, host_budget_mb: _, headroom: _,
            // RunConfig::disk
            nvme_path: _, nvme_checksums: _,
            // The program, which compares plans with it.
            limit_mb: _,
        } = memory;
        let search = Search { search_range_mb, hidden_dim, min_chunk_size_mb };
        OfMemory {
            checkpointing: of_checkpointing(checkpointing),
            chunk_size: match chunk {
                Chunk::Word(ChunkWord::None) => ChunkSize::None,
                Chunk::Word(ChunkWord::Auto) => ChunkSize::Auto(search),
                Chunk::Mebibytes(size) => {
                    ChunkSize::Elements(((size * f64::from(1 << 20) / 4.0) as u64).max(1))
                }
            },
            zero: zero::Options {
                stage,
                overlap,
                prefetch,
                defer,
                residence,
                buffer: memory.buffer(),
                updates_on_host: update != UpdateOn::Device,
                delayed_update,
                gradients_in_place,
                update_in_backward,
            },
            inputs: InputOptions { memory: activations.memory(), partition: partition_activations },
            pin_host: pin_memory,
        }
    }
}

fn of_checkpointing(checkpointing: config::Checkpointing) -> Checkpointing {
    match checkpointing {
        config::Checkpointing::Word(CheckpointingWord::None) => Checkpointing::None,
        config::Checkpointing::Word(CheckpointingWord::Selective) => Checkpointing::Selective,
        config::Checkpointing::Word(CheckpointingWord::Block) => Checkpointing::Blocks { every: 1 },
        config::Checkpointing::Every(every) => Checkpointing::Blocks { every },
    }
}

/// A search steps by the width of the model, unless its step was given.
fn with_width(mut size: ChunkSize, width: usize) -> ChunkSize {
    if let ChunkSize::Auto(search) = &mut size {
        search.hidden_dim.get_or_insert(width as u64);
    }
    size
}

impl BatchPart {
    fn of(
        model: &dyn Model,
        config: &RunConfig,
        (seq, documents): (usize, bool),
        (global, defer, sums_by_tree): (usize, bool, bool),
        [evaluated, evaluation_parts, evaluation_batches]: [usize; 3],
    ) -> BatchPart {
        let has_pairs = config.data.pairs.is_some();
        let targets_per_sequence = match model.objective() {
            _ if has_pairs => 1,
            _ if !model.has_targets() => 1,
            Objective::Causal => seq,
            Objective::Masked => Masking::predicted(seq),
            Objective::Classes => 1,
        };
        let (apart, mut inputs) = (documents, model.inputs());
        let has_positions = inputs.iter().any(|input| input.name == POSITIONS);
        inputs.extend((apart && !has_positions).then(|| Input::ids(POSITIONS, seq)));
        inputs.extend(has_pairs.then(Input::references));
        BatchPart {
            seq,
            inputs,
            micro_batch_size: config.micro_batch_size(),
            micro_batches: config.micro_batches(),
            targets_per_sequence,
            targets_per_step: global * targets_per_sequence,
            sums_by_tree,
            has_neighbours: sums_by_tree && defer,
            documents: apart || has_positions,
            counts_targets: apart || has_pairs,
            has_pairs,
            classes: model.labels().len(),
            evaluated,
            evaluation_batches,
            evaluation_parts,
        }
    }
}

/// Element types and loss scale, and the method of matrix products.
fn of_precision(precision: &PrecisionConfig) -> (PrecisionPart, Option<ProductMethod>) {
    #[rustfmt::skip]
    let &PrecisionConfig {
        compute, accumulate, communicate, loss_scale, initial_scale_power, loss_scale_window, hysteresis,
        consecutive_hysteresis, min_loss_scale,
        // PrecisionConfig::product_method
        products: _,
    } = precision;
    let communicate = communicate.unwrap_or(accumulate).into();
    let types = Precision { compute: compute.into(), accumulate: accumulate.into(), communicate };
    let loss_scaling = match compute {
        Float::F32 | Float::Bf16 => LossScaling::Off,
        Float::F16 if loss_scale > 0.0 => LossScaling::Static(loss_scale as f32),
        Float::F16 => LossScaling::Dynamic(Dynamic {
            initial: 2f32.powi(initial_scale_power as i32),
            window: loss_scale_window,
            hysteresis,
            consecutive_hysteresis,
            min_scale: min_loss_scale as f32,
        }),
    };
    (PrecisionPart { types, loss_scaling }, precision.product_method())
}

fn of_loss(loss: &LossConfig) -> LossPart {
    let LossConfig { label_smoothing, z_loss } = *loss;
    LossPart { label_smoothing: label_smoothing as f32, z_loss: z_loss as f32 }
}

/// The optimizer, and the norm to which gradients are clipped.
fn of_optimizer(optimizer: &OptimizerConfig) -> (Optimizer, f32) {
    #[rustfmt::skip]
    let &OptimizerConfig {
        kind, beta1, beta2, eps, weight_decay, clip,
        // RunConfig::learning_rate, OptimizerConfig::rates
        lr: _, group: _,
    } = optimizer;
    let weight_decay = weight_decay as f32;
    let optimizer = match kind {
        OptimizerKind::Adamw => {
            Optimizer::AdamW { beta1: beta1 as f32, beta2: beta2 as f32, eps: eps as f32, weight_decay }
        }
        OptimizerKind::Sgd => Optimizer::Sgd { momentum: beta1 as f32, weight_decay },
        OptimizerKind::Lion => {
            Optimizer::Own(Arc::new(Lion { beta1: beta1 as f32, beta2: beta2 as f32, weight_decay }))
        }
        OptimizerKind::Adafactor => Optimizer::Own(Arc::new(Adafactor { weight_decay })),
    };
    (optimizer, clip as f32)
}

/// True if the host reads device memory; true if there are links between devices.
fn of_device(device: &DeviceConfig) -> [bool; 2] {
    #[rustfmt::skip]
    let DeviceConfig {
        kind,
        // DeviceConfig::is_linked, DeviceConfig::slice_bytes
        communication: _, slice_mb: _,
        // The program, which makes the device.
        kernels: _, memory_mb: _, copy_gb_per_s: _, seed: _,
    } = device;
    [kind.is_processor(), device.is_linked()]
}

/// Refuses an evaluation of fewer samples than its micro-batches have, by a model that can leave none out.
fn check_whole(model: &dyn Model, evaluated: usize, windows: usize) -> Result<(), ConfigError> {
    if model.has_targets() || evaluated == windows {
        return Ok(());
    }
    let expected = format!(
        "evaluates {evaluated} samples by a model without targets, which can leave none out: give {windows}"
    );
    Err(refuse("train.eval_samples", evaluated, expected))
}
