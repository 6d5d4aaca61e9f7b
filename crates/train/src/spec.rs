//! The specification of a run: everything that decides what a rank allocates and computes.
//!
//! It is made from a checked configuration and a model. From it a rank derives its stages, and which parameters several
//! stages share.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use phalanx_collectives::Group;
use phalanx_data::Masking;
use phalanx_layers::{Checkpointing, Draw, Network};
use phalanx_models::{Model, Objective};
use phalanx_optim::loss_scale::Dynamic;
use phalanx_optim::{LearningRate, LossScaling, Optimizer, RatesByName, UpdateRule};
use phalanx_parallel::TensorParallel;
use phalanx_parallel::pipeline::{Program, steps_with_backward_from};
use phalanx_parallel::zero::Residence;
use phalanx_plan::{
    ChunkError, ChunkLayout, ChunkSize, CutError, Mesh, ParameterSize, Precision,
    Schedule as PipelineSchedule, Search, Stage, StageCost, lay_out,
    pipeline::{Abridged, depth},
};
use phalanx_tensor::{DeviceFactory, DiskOptions, Memory, ProductMethod};

pub use crate::abridged_programs::AbridgedPrograms;
use crate::config::check::refuse;
use crate::config::{
    self, CheckpointingWord, Chunk, ChunkWord, ConfigError, Documents, Float, OptimizerKind, PlacementRule,
    Reduce, RunConfig, Trainable, UpdateOn,
};
use crate::cut;
use crate::evaluation::parts;
use crate::parameter_sizes::sizes;
pub use crate::rule_mismatch::RuleMismatch;
pub use crate::ties::Tie;
use crate::ties::ties;

/// Everything about a run that decides what a rank allocates and computes.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The model, with its dropout probabilities.
    pub model: Arc<dyn Model>,
    /// Which of its parameters are trained.
    pub trainable: Trainable,
    /// Which activations backward recomputes.
    pub checkpointing: Checkpointing,
    /// True if the host and the transports of collectives can read device memory in place. If not, tensors are staged through
    /// host memory.
    pub host_addressable: bool,
    /// True if large collectives go over links between the devices, and not through host memory.
    pub linked: bool,
    /// Largest number of bytes of a slice of logits. A quarter of it is received at once in sums over links between devices.
    pub slice_bytes: usize,
    /// Bytes that each device takes of its memory beside the plan; None where device memory is memory of the machine
    /// ([`DeviceFactory::beside_plan`]).
    pub beside_plan: Option<u64>,
    /// Number of tokens of a sequence.
    pub seq: usize,
    /// Number of sequences of a micro-batch, on each replica.
    pub micro_batch_size: usize,
    /// Number of micro-batches of a step.
    pub micro_batches: usize,
    /// Number of tokens of a sequence whose loss counts; 1 where the loss is one of samples.
    pub targets_per_sequence: usize,
    /// Number of tokens of a step, over all ranks, whose loss counts: the loss is the mean over them.
    pub targets_per_step: usize,
    /// True if a sequence may have several documents, which do not see each other; their positions are an input
    /// ([`POSITIONS`](phalanx_layers::POSITIONS)).
    pub documents: bool,
    /// True if samples may leave targets out, so that those of each step and evaluation are counted over all ranks.
    pub counts_targets: bool,
    /// The mesh of ranks.
    pub mesh: Mesh,
    /// The pipeline schedule of a step.
    pub schedule: Arc<PipelineSchedule>,
    /// The pipeline schedule of an evaluation.
    pub evaluation: Arc<PipelineSchedule>,
    /// Messages that the channels of a step, and of an evaluation, hold on each side.
    pub depths: [usize; 2],
    /// For each stage: its blocks; the head counts as the last block.
    pub stages: Vec<Range<usize>>,
    /// Parameters of which several stages have a copy.
    pub ties: Vec<Tie>,
    /// The first stage that has a trained parameter: backward ends there.
    pub lowest_stage: usize,
    /// True if the residual stream is sharded over the tensor axis (sequence parallelism).
    pub sequence_parallel: bool,
    /// ZeRO stage.
    pub stage: Stage,
    /// True if communication overlaps computation.
    pub overlap: bool,
    /// Number of chunks that are gathered ahead of their use.
    pub prefetch: usize,
    /// True if gradients are reduced once per step instead of once per micro-batch.
    pub defer: bool,
    /// Element types.
    pub precision: Precision,
    /// Policy for the loss scale.
    pub loss_scaling: LossScaling,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Parameters with another learning rate or weight decay, by full name.
    pub rates: Arc<RatesByName>,
    /// Rule that decides the memories of chunks.
    pub placement: PlacementRule,
    /// For each pipeline stage: the memories in which the parts of its chunks lie between their uses.
    pub residence: Vec<Residence>,
    /// Elements of the largest tile in which data outside of device memory is brought into it.
    pub buffer: usize,
    /// True if the host updates chunks whose optimizer states lie outside of the memory of a device of its own.
    pub updates_on_host: bool,
    /// True if the host computes each update during the next step.
    pub delayed_update: bool,
    /// True if reduced gradients take the place of parameters, in chunks whose parts all lie in device memory.
    pub gradients_in_place: bool,
    /// True if each chunk is updated within backward, as soon as its gradient is reduced.
    pub update_in_backward: bool,
    /// The memory in which the inputs of Transformer blocks wait for backward.
    pub block_inputs: Memory,
    /// True if each tensor-parallel rank keeps a part of the inputs that all of them have.
    pub partition_activations: bool,
    /// Options of disk memory, if there is any.
    pub disk: Option<DiskOptions>,
    /// True if host memory is locked; None: locked if a device copies from it by itself and the system allows it.
    pub pin_host: Option<bool>,
    /// The learning rate.
    pub schedule_of_rate: Arc<dyn LearningRate>,
    /// Gradients are clipped to this norm; 0 for no clipping.
    pub clip: f32,
    /// Label smoothing of training.
    pub label_smoothing: f32,
    /// Weight of the squared log-sum-exp in the loss of training (z-loss).
    pub z_loss: f32,
    /// Seed of dropout and initial values.
    pub seed: u64,
    /// A Hugging Face directory whose weights training starts from, instead of initial values.
    pub init: Option<PathBuf>,
    /// Rule for the size of chunks.
    pub chunk_size: ChunkSize,
    /// The chunk layout of the whole model on one rank, for reports.
    pub layout: Arc<ChunkLayout>,
    /// The chunk sizes that were planned to choose this one.
    pub tried_chunks: Vec<TriedChunks>,
    /// Number of windows of an evaluation, over all ranks.
    pub evaluated: usize,
    /// Number of micro-batches of a part of an evaluation on each rank, at most those of a step, the last ones perhaps without windows; 0
    /// without held-out data. Between parts, which run the same program, a run may be asked to stop.
    pub evaluation_batches: usize,
    /// Number of these parts.
    pub evaluation_parts: usize,
    /// Number of threads of a rank.
    pub threads: usize,
    /// Method by which devices compute matrix products; None if each device chooses one that it supports.
    pub products: Option<ProductMethod>,
    /// For a dry run of one rank: its programs without repetitions.
    pub abridged: Option<Arc<AbridgedPrograms>>,
}

/// A chunk size that was planned.
#[derive(Clone, Debug, PartialEq)]
pub struct TriedChunks {
    /// The size.
    pub size: ChunkSize,
    /// Number of chunks of the whole model.
    pub chunks: usize,
    /// Bytes that the planned rank needs.
    pub bytes: u64,
}

/// Why a specification cannot be made from a configuration.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// A key of the configuration has an impossible value.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The parameters cannot be laid out in chunks.
    #[error("the chunks of [memory]: {0}")]
    Chunks(#[from] ChunkError),
    /// The optimizer's rule does not fit the run.
    #[error(transparent)]
    Rule(#[from] RuleMismatch),
    /// The model cannot be cut into the stages.
    #[error("parallel.cut: {0}")]
    Cut(#[from] CutError),
}

impl Spec {
    /// Makes the specification from a configuration and a model whose vocabulary is known. The dropout
    /// probabilities of the configuration replace those of the model. `evaluated`: windows of one evaluation over all
    /// ranks.
    ///
    /// # Errors
    /// An invalid configuration, or one for which no chunk layout, mesh, schedule or cut into stages exists.
    pub fn new(
        config: &RunConfig,
        model: impl Into<Arc<dyn Model>>,
        evaluated: usize,
        threads: usize,
    ) -> Result<Spec, SpecError> {
        let (mut spec, network) = Spec::uncut(config, model.into(), evaluated, threads)?;
        spec.stages =
            cut::stages(&spec.micro_batch(), &network, spec.schedule.stages(), config.parallel.cut)?;
        spec.ties = ties(&network, &spec.stages);
        spec.lowest_stage = lowest_stage(&network, &spec.stages);
        Ok(spec)
    }

    /// As [`Spec::new`], with the stages into which the plan of the run has cut the model, the chunk size that it has
    /// chosen, and the memories of all chunks.
    ///
    /// # Errors
    /// As [`Spec::new`].
    pub fn with_stages(
        config: &RunConfig,
        model: impl Into<Arc<dyn Model>>,
        evaluated: usize,
        threads: usize,
        (stages, chunks, residence): (Vec<Range<usize>>, ChunkSize, Vec<Residence>),
    ) -> Result<Spec, SpecError> {
        let (spec, network) = Spec::uncut(config, model.into(), evaluated, threads)?;
        let lowest_stage = lowest_stage(&network, &stages);
        let spec = Spec { ties: ties(&network, &stages), lowest_stage, stages, residence, ..spec };
        Ok(spec.with_chunks(chunks)?)
    }

    /// Everything except the stages and what depends on them; with the whole network.
    fn uncut(
        config: &RunConfig,
        model: Arc<dyn Model>,
        evaluated: usize,
        threads: usize,
    ) -> Result<(Spec, Network), SpecError> {
        config.check_with(&*model)?;
        let (model, seq) = (model.dropping(config.model.dropouts()), config.model.seq);
        let (network, trainable) = whole_network(config, &*model)?;
        let (mesh, schedule, placement) = (config.mesh()?, config.schedule()?, config.placement_rule()?);
        config.check_work(mesh, (&network, model.vocab()), evaluated)?;
        let (chunk_size, optimizer) = (chunk_size(config, network.width()), optimizer(config));
        let layout = Arc::new(lay_out(&sizes(&optimizer, &network), mesh.data as u64, &chunk_size)?);
        let (evaluation_parts, evaluation) = parts(config, mesh, &schedule, evaluated);
        let windows = evaluation_parts * evaluation.micro_batches * config.micro_batch_size() * mesh.data;
        check_whole(&*model, evaluated, windows)?;
        let spec = Spec {
            host_addressable: config.device.kind.is_processor(),
            linked: config.device.is_linked(),
            slice_bytes: config.device.slice_bytes(),
            beside_plan: None,
            seq,
            targets_per_sequence: targets_per_sequence(&*model, seq),
            targets_per_step: config.batch.global * targets_per_sequence(&*model, seq),
            documents: config.data.documents == Documents::Apart,
            counts_targets: config.data.documents == Documents::Apart,
            micro_batch_size: config.micro_batch_size(),
            micro_batches: config.micro_batches(),
            mesh,
            depths: [depth(&schedule), depth(&evaluation)],
            evaluation_batches: evaluation.micro_batches,
            evaluation: Arc::new(evaluation),
            stages: Vec::new(),
            ties: Vec::new(),
            lowest_stage: 0,
            sequence_parallel: config.parallel.sequence_parallel,
            stage: Stage::from_number(config.parallel.zero).expect("a checked configuration"),
            overlap: config.parallel.overlap,
            prefetch: config.memory.prefetch,
            defer: config.batch.reduce == Reduce::Defer,
            precision: precision(config),
            loss_scaling: loss_scaling(config),
            optimizer,
            rates: Arc::new(config.optimizer.rates(&network)?),
            placement,
            residence: vec![placement.before_dry_runs(); schedule.stages()],
            schedule: Arc::new(schedule),
            buffer: config.memory.buffer(),
            updates_on_host: config.memory.update != UpdateOn::Device,
            delayed_update: config.memory.delayed_update,
            gradients_in_place: config.memory.gradients_in_place,
            update_in_backward: config.memory.update_in_backward,
            block_inputs: config.memory.activations.memory(),
            partition_activations: config.memory.partition_activations,
            disk: config.disk(),
            pin_host: config.memory.pin_memory,
            schedule_of_rate: Arc::new(config.learning_rate()),
            clip: config.optimizer.clip as f32,
            label_smoothing: config.loss.label_smoothing as f32,
            z_loss: config.loss.z_loss as f32,
            seed: config.train.seed,
            init: config.model.init.as_ref().map(PathBuf::from),
            trainable,
            checkpointing: checkpointing(config),
            layout,
            chunk_size,
            tried_chunks: Vec::new(),
            evaluated,
            evaluation_parts,
            threads,
            products: config.precision.product_method(),
            abridged: None,
            model,
        };
        spec.check_rule(&network)?;
        Ok((spec, network))
    }

    /// The same run on devices of `factory`: whether the host can read their memory in place, and what they take beside the plan.
    #[must_use]
    pub fn for_devices(self, factory: &dyn DeviceFactory) -> Spec {
        let (host_addressable, beside_plan) = (factory.is_host_addressable(), factory.beside_plan());
        Spec { host_addressable, beside_plan, ..self }
    }

    /// The same run with an optimizer of the caller's own.
    ///
    /// # Errors
    /// Groups of parameters with a weight decay, which the rule would not know; a rule with impossible states, or with an extent that parts of parameters on tensor-parallel ranks do not have; no layout of
    /// chunks in which whole parameters lie on one rank.
    pub fn with_optimizer(self, rule: impl UpdateRule + 'static) -> Result<Spec, SpecError> {
        if let Some((name, _)) = self.rates.iter().find(|(_, rates)| rates.weight_decay.is_some()) {
            let expected = "is not known to an optimizer of your own, which decides its decay by each parameter's name and kind: \
                            leave it out";
            return Err(refuse("optimizer.group.weight_decay", format!("(of `{name}`)"), expected).into());
        }
        let spec = Spec { optimizer: Optimizer::Own(Arc::new(rule)), ..self };
        spec.check_rule(&spec.whole())?;
        Ok(spec.with_chunks(spec.chunk_size.clone())?)
    }

    /// The same run with a learning rate schedule of the caller's own.
    #[must_use]
    pub fn with_learning_rate(self, schedule: impl LearningRate + 'static) -> Spec {
        Spec { schedule_of_rate: Arc::new(schedule), ..self }
    }

    /// The network of a rank with this group of the tensor axis: the rank's part of each layer.
    pub fn network(&self, tensor: &Arc<dyn Group>) -> Network {
        let tensor = TensorParallel::new(Arc::clone(tensor), self.sequence_parallel);
        self.applied(&tensor)
    }

    fn applied(&self, tensor: &TensorParallel) -> Network {
        let network = self.model.network(tensor, self.checkpointing);
        self.trainable.applied_to(network.expect("the configuration was checked with the model"))
    }

    /// The whole network, as one rank has it.
    pub fn whole(&self) -> Network {
        self.applied(&TensorParallel::solo())
    }

    /// Operations of a micro-batch in each stage, of all ranks together that share its layers.
    pub fn stage_costs(&self) -> Vec<StageCost> {
        cut::stage_costs(&self.micro_batch(), &self.whole(), &self.stages)
    }

    fn micro_batch(&self) -> cut::MicroBatch {
        let tokens = [self.micro_batch_size, self.seq];
        cut::MicroBatch { tokens, inputs: self.model.inputs(), precision: self.precision }
    }

    /// The programs of a step and of an evaluation, at a coordinate of the pipeline.
    pub(crate) fn programs(&self, pipeline: usize) -> [Program; 2] {
        let short = self.abridged.as_deref();
        let program = |abridged: Option<&Abridged>, schedule: &PipelineSchedule, depth| {
            let steps = match abridged {
                Some(abridged) => abridged.steps.clone(),
                None => steps_with_backward_from(schedule, pipeline, self.lowest_stage),
            };
            Program::of(steps, depth)
        };
        let [step, evaluation] = self.depths;
        [
            program(short.and_then(|short| short.step.as_ref()), &self.schedule, step),
            program(short.and_then(|short| short.evaluation.as_ref()), &self.evaluation, evaluation),
        ]
    }

    /// The same run with chunks of another size.
    ///
    /// # Errors
    /// A size for which there is no layout.
    pub fn with_chunks(&self, size: ChunkSize) -> Result<Spec, ChunkError> {
        let whole = self.whole();
        let layout = Arc::new(lay_out(&sizes(&self.optimizer, &whole), self.mesh.data as u64, &size)?);
        Ok(Spec { chunk_size: size, layout, ..self.clone() })
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.mesh.world_size()
    }

    /// The chunk layout of some parameters, for the ranks of the data axis.
    pub(crate) fn lay_out(&self, sizes: &[ParameterSize]) -> Result<ChunkLayout, ChunkError> {
        lay_out(sizes, self.mesh.data as u64, &self.chunk_size)
    }

    /// Index, in the global batch, of the first sample of a data-parallel rank's micro-batch. Micro-batch m of a step
    /// is the m-th range of `data * micro_batch_size` samples, of which rank r has the r-th part.
    pub fn first_sample(&self, micro_batch: usize, rank: usize) -> usize {
        (micro_batch * self.mesh.data + rank) * self.micro_batch_size
    }

    /// Key of the dropout masks in a data-parallel rank's micro-batch of step `step`.
    pub fn draw(&self, step: u64, micro_batch: usize, rank: usize) -> Draw {
        Draw { seed: self.seed, step, first_sample: self.first_sample(micro_batch, rank) as u64 }
    }

    /// Number of tokens of one step, over all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        (self.micro_batch_size * self.micro_batches * self.mesh.data * self.seq) as u64
    }
}

/// The whole network of a model, of which the configuration freezes some parameters.
fn whole_network(config: &RunConfig, model: &dyn Model) -> Result<(Network, Trainable), ConfigError> {
    let network = model.network(&TensorParallel::solo(), checkpointing(config));
    let network = network.expect("one rank divides nothing");
    let trainable = Trainable::of(&config.model, &network)?;
    Ok((trainable.applied_to(network), trainable))
}

/// The first stage that has a trained parameter.
fn lowest_stage(network: &Network, stages: &[Range<usize>]) -> usize {
    stages.iter().position(|stage| network.lowest() < stage.end).unwrap_or(stages.len())
}

fn chunk_size(config: &RunConfig, hidden: usize) -> ChunkSize {
    let memory = &config.memory;
    match memory.chunk {
        Chunk::Word(ChunkWord::None) => ChunkSize::None,
        Chunk::Word(ChunkWord::Auto) => ChunkSize::Auto(Search {
            search_range_mb: memory.search_range_mb,
            hidden_dim: Some(memory.hidden_dim.unwrap_or(hidden as u64)),
            min_chunk_size_mb: memory.min_chunk_size_mb,
        }),
        Chunk::Mebibytes(size) => ChunkSize::Elements(((size * f64::from(1 << 20) / 4.0) as u64).max(1)),
    }
}

fn checkpointing(config: &RunConfig) -> Checkpointing {
    match config.memory.checkpointing {
        config::Checkpointing::Word(CheckpointingWord::None) => Checkpointing::None,
        config::Checkpointing::Word(CheckpointingWord::Selective) => Checkpointing::Selective,
        config::Checkpointing::Word(CheckpointingWord::Block) => Checkpointing::Blocks { every: 1 },
        config::Checkpointing::Every(every) => Checkpointing::Blocks { every },
    }
}

fn targets_per_sequence(model: &dyn Model, seq: usize) -> usize {
    match model.objective() {
        _ if !model.has_targets() => 1,
        Objective::Causal => seq,
        Objective::Masked => Masking::predicted(seq),
    }
}

fn precision(config: &RunConfig) -> Precision {
    let p = &config.precision;
    let communicate = p.communicate.unwrap_or(p.accumulate).into();
    Precision { compute: p.compute.into(), accumulate: p.accumulate.into(), communicate }
}

fn loss_scaling(config: &RunConfig) -> LossScaling {
    let p = &config.precision;
    match p.compute {
        Float::F32 | Float::Bf16 => LossScaling::Off,
        Float::F16 if p.loss_scale > 0.0 => LossScaling::Static(p.loss_scale as f32),
        Float::F16 => LossScaling::Dynamic(Dynamic {
            initial: 2f32.powi(p.initial_scale_power as i32),
            window: p.loss_scale_window,
            hysteresis: p.hysteresis,
            consecutive_hysteresis: p.consecutive_hysteresis,
            min_scale: p.min_loss_scale as f32,
        }),
    }
}

fn optimizer(config: &RunConfig) -> Optimizer {
    let o = &config.optimizer;
    let weight_decay = o.weight_decay as f32;
    match o.kind {
        OptimizerKind::Adamw => {
            Optimizer::AdamW { beta1: o.beta1 as f32, beta2: o.beta2 as f32, eps: o.eps as f32, weight_decay }
        }
        OptimizerKind::Sgd => Optimizer::Sgd { momentum: o.beta1 as f32, weight_decay },
    }
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
