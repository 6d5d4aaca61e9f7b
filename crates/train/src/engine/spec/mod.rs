//! The specification of a run: everything that decides what a rank allocates and computes, in ten parts.
//!
//! It is made from a checked configuration and a model (`of_config`). From it a rank derives its stages, and which parameters
//! several stages share. A function receives the part that it reads, and the whole only where it makes a rank or a report.

mod of_config;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use phalanx_collectives::Group;
use phalanx_layers::{Checkpointing, Input, Lora, Network, PreferenceHead};
use phalanx_models::Model;
use phalanx_optim::{LearningRate, LossScaling, Optimizer, RatesByName, UpdateRule};
use phalanx_parallel::pipeline::{Program, steps_with_backward_from};
use phalanx_parallel::zero::{self, Residence};
use phalanx_parallel::{InputOptions, TensorParallel};
use phalanx_plan::{
    ChunkError, ChunkLayout, ChunkSize, CutError, Mesh, ParameterSize, PipelineSchedule, Precision,
    StageCost, lay_out,
    pipeline::{Abridged, depth},
};
use phalanx_tensor::{DeviceFactory, DiskOptions, Preference, ProductMethod};

use crate::config::check::refuse;
use crate::config::{ConfigError, PlacementRule, QuantisedBase, RunConfig, Trainable};
pub use crate::engine::abridged_programs::AbridgedPrograms;
use crate::engine::cut;
use crate::engine::parameter_sizes::sizes;
pub use crate::engine::rule_mismatch::RuleMismatch;
pub use crate::engine::ties::Tie;
use crate::engine::ties::ties;

/// Everything about a run that decides what a rank allocates and computes.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The model and its initial values.
    pub model: ModelPart,
    /// Samples of a step and of an evaluation.
    pub batch: BatchPart,
    /// The mesh of ranks, and the division of the model over it.
    pub mesh: MeshPart,
    /// Schedules of the pipeline.
    pub pipeline: PipelinePart,
    /// Options of ZeRO over the data axis.
    pub zero: zero::Options,
    /// Options of the inputs of Transformer blocks between forward and backward.
    pub inputs: InputOptions,
    /// Element types and loss scale.
    pub precision: PrecisionPart,
    /// Terms of the loss of training.
    pub loss: LossPart,
    /// The optimizer, its rates and clipping.
    pub update: UpdatePart,
    /// The device of a rank, and what it takes of its host.
    pub device: DevicePart,
    /// Rule by which the planner decides `zero.residence`. No engine reads it.
    pub placement: PlacementRule,
}

/// The model and its initial values.
#[derive(Clone, Debug)]
pub struct ModelPart {
    /// Sizes and blocks of the model, with its dropout probabilities.
    pub definition: Arc<dyn Model>,
    /// Adapters of its linear layers, if it has any.
    pub adapters: Option<Arc<Lora>>,
    /// Which of the weights below adapters are kept in blocks of fewer bits, if any are.
    pub quantised: Option<QuantisedBase>,
    /// Which of its parameters are trained.
    pub trainable: Trainable,
    /// The loss of preferences that it learns by, if samples are pairs of answers.
    pub preference: Option<Preference>,
    /// Which activations backward recomputes.
    pub checkpointing: Checkpointing,
    /// A Hugging Face directory whose weights training starts from, instead of initial values.
    pub init: Option<PathBuf>,
    /// A folder with the adapters that training starts from, instead of initial values.
    pub adapter: Option<PathBuf>,
    /// Seed of dropout and initial values.
    pub seed: u64,
}

/// Samples of a step and of an evaluation.
#[derive(Clone, Debug)]
pub struct BatchPart {
    /// Number of tokens of a sequence.
    pub seq: usize,
    /// Inputs of a micro-batch: those of the model, and the positions if documents do not see each other.
    pub inputs: Vec<Input>,
    /// Number of sequences of a micro-batch, on each replica.
    pub micro_batch_size: usize,
    /// Number of micro-batches of a step.
    pub micro_batches: usize,
    /// True if the gradients of micro-batches, over all replicas, are added by one tree, and their losses as if one replica had them.
    pub sums_by_tree: bool,
    /// True if the micro-batches of a replica are neighbours in the global batch; else they lie among those of the others.
    pub has_neighbours: bool,
    /// Number of tokens of a sequence whose loss counts; 1 where the loss is one of samples.
    pub targets_per_sequence: usize,
    /// Number of tokens of a step, over all ranks, whose loss counts: the loss is the mean over them.
    pub targets_per_step: usize,
    /// True if a sequence may have several documents, which do not see each other; their positions are an input
    /// ([`POSITIONS`](phalanx_layers::POSITIONS)). The padding behind a labelled row is one.
    pub documents: bool,
    /// Number of classes of which the head chooses one for each sample; 0 for another head.
    pub classes: usize,
    /// True if two neighbouring sequences are answers that make a pair; the loss is a mean over pairs, which count as its targets.
    pub has_pairs: bool,
    /// True if samples may leave targets out, so that those of each step and evaluation are counted over all ranks.
    pub counts_targets: bool,
    /// Number of windows of an evaluation, over all ranks.
    pub evaluated: usize,
    /// Number of micro-batches of a part of an evaluation on each rank, at most those of a step, the last ones perhaps without windows; 0
    /// without held-out data. Between parts, which run the same program, a run may be asked to stop.
    pub evaluation_batches: usize,
    /// Number of these parts.
    pub evaluation_parts: usize,
}

/// The mesh of ranks, and the division of the model over it: stages over its pipeline axis, chunks over its data axis, layers over its
/// tensor axis.
#[derive(Clone, Debug)]
pub struct MeshPart {
    /// Ranks of each axis.
    pub axes: Mesh,
    /// For each stage: its blocks; the head counts as the last block.
    pub stages: Vec<Range<usize>>,
    /// Parameters of which several stages have a copy.
    pub ties: Vec<Tie>,
    /// True if the residual stream is sharded over the tensor axis (sequence parallelism).
    pub sequence_parallel: bool,
    /// Rule for the size of chunks.
    pub chunk_size: ChunkSize,
    /// The chunk layout of the whole model on one rank, for reports.
    pub layout: Arc<ChunkLayout>,
}

/// Schedules of the pipeline.
#[derive(Clone, Debug)]
pub struct PipelinePart {
    /// The schedule of a step.
    pub schedule: Arc<PipelineSchedule>,
    /// The schedule of an evaluation.
    pub evaluation: Arc<PipelineSchedule>,
    /// Messages that the channels of a step, and of an evaluation, hold on each side.
    pub depths: [usize; 2],
    /// The first stage that has a trained parameter: backward ends there.
    pub lowest_stage: usize,
    /// For a dry run of one rank: its programs without repetitions.
    pub abridged: Option<Arc<AbridgedPrograms>>,
}

/// Element types and loss scale.
#[derive(Clone, Copy, Debug)]
pub struct PrecisionPart {
    /// Element types.
    pub types: Precision,
    /// Policy for the loss scale.
    pub loss_scaling: LossScaling,
}

/// Terms of the loss of training.
#[derive(Clone, Copy, Debug)]
pub struct LossPart {
    /// Label smoothing.
    pub label_smoothing: f32,
    /// Weight of the squared log-sum-exp (z-loss).
    pub z_loss: f32,
}

/// The optimizer, its rates and clipping.
#[derive(Clone, Debug)]
pub struct UpdatePart {
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Parameters with another learning rate or weight decay, by full name.
    pub rates: Arc<RatesByName>,
    /// The learning rate.
    pub schedule_of_rate: Arc<dyn LearningRate>,
    /// Gradients are clipped to this norm; 0 for no clipping.
    pub clip: f32,
}

/// The device of a rank, and what it takes of its host.
#[derive(Clone, Debug)]
pub struct DevicePart {
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
    /// Options of disk memory, if there is any.
    pub disk: Option<DiskOptions>,
    /// True if host memory is locked; None: locked if a device copies from it by itself and the system allows it.
    pub pin_host: Option<bool>,
    /// Number of threads of a rank.
    pub threads: usize,
    /// Method by which devices compute matrix products; None if each device chooses one that it supports.
    pub products: Option<ProductMethod>,
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
        let (spec, network) = Spec::uncut(config, model.into(), evaluated, threads)?;
        let by = config.parallel.cut;
        let stages = cut::stages(&spec.micro_batch(), &network, spec.pipeline.schedule.stages(), by)?;
        Ok(spec.cut_into(stages, &network))
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
        let mut spec = spec.cut_into(stages, &network);
        spec.zero.residence = residence;
        Ok(spec.with_chunks(chunks)?)
    }

    /// The same with its stages, and what depends on them.
    fn cut_into(mut self, stages: Vec<Range<usize>>, network: &Network) -> Spec {
        let is_trained = |stage: &Range<usize>| network.lowest() < stage.end;
        self.pipeline.lowest_stage = stages.iter().position(is_trained).unwrap_or(stages.len());
        (self.mesh.ties, self.mesh.stages) = (ties(network, &stages), stages);
        self
    }

    /// The same run on devices of `factory`: whether the host can read their memory in place, and what they take beside the plan.
    #[must_use]
    pub fn for_devices(mut self, factory: &dyn DeviceFactory) -> Spec {
        self.device.host_addressable = factory.is_host_addressable();
        self.device.beside_plan = factory.beside_plan();
        self
    }

    /// The same run with an optimizer of the caller's own.
    ///
    /// # Errors
    /// Groups of parameters with a weight decay, which the rule would not know; a rule with impossible states, or with an extent that parts of parameters on tensor-parallel ranks do not have; no layout of
    /// chunks in which whole parameters lie on one rank.
    pub fn with_optimizer(mut self, rule: impl UpdateRule + 'static) -> Result<Spec, SpecError> {
        if let Some((name, _)) = self.update.rates.iter().find(|(_, rates)| rates.weight_decay.is_some()) {
            let expected = "is not known to an optimizer of your own, which decides its decay by each parameter's name and kind: \
                            leave it out";
            return Err(refuse("optimizer.group.weight_decay", format!("(of `{name}`)"), expected).into());
        }
        self.update.optimizer = Optimizer::Own(Arc::new(rule));
        self.check_rule(&self.model.whole())?;
        Ok(self.with_chunks(self.mesh.chunk_size.clone())?)
    }

    /// The same run with a learning rate schedule of the caller's own.
    #[must_use]
    pub fn with_learning_rate(mut self, schedule: impl LearningRate + 'static) -> Spec {
        self.update.schedule_of_rate = Arc::new(schedule);
        self
    }

    /// The same run with chunks of another size.
    ///
    /// # Errors
    /// A size for which there is no layout.
    pub fn with_chunks(&self, size: ChunkSize) -> Result<Spec, ChunkError> {
        let mut spec = self.clone();
        spec.mesh.chunk_size = size;
        spec.mesh.layout = Arc::new(spec.mesh.lay_out(&sizes(&spec.update.optimizer, &spec.model.whole()))?);
        Ok(spec)
    }

    /// The network of a rank with this group of the tensor axis: the rank's part of each layer.
    pub fn network(&self, tensor: &Arc<dyn Group>) -> Network {
        self.model.network(&TensorParallel::new(Arc::clone(tensor), self.mesh.sequence_parallel))
    }

    /// Operations of a micro-batch in each stage, of all ranks together that share its layers.
    pub fn stage_costs(&self) -> Vec<StageCost> {
        cut::stage_costs(&self.micro_batch(), &self.model.whole(), &self.mesh.stages)
    }

    fn micro_batch(&self) -> cut::MicroBatch {
        let tokens = [self.batch.micro_batch_size, self.batch.seq];
        cut::MicroBatch { tokens, inputs: self.batch.inputs.clone(), precision: self.precision.types }
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.mesh.axes.world_size()
    }

    /// Number of tokens of one step, over all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        let BatchPart { micro_batch_size, micro_batches, seq, .. } = self.batch;
        (micro_batch_size * micro_batches * self.mesh.axes.data * seq) as u64
    }
}

impl ModelPart {
    /// The network of a rank of the tensor axis, with the parameters frozen that are not trained.
    pub(crate) fn network(&self, tensor: &TensorParallel) -> Network {
        let adapting = self.adapters.as_ref().map(|adapters| tensor.adapting(Arc::clone(adapters)));
        let network = self.definition.network(adapting.as_ref().unwrap_or(tensor), self.checkpointing);
        let network =
            self.trainable.applied_to(network.expect("the configuration was checked with the model"));
        let network = match &self.quantised {
            None => network,
            Some(quantised) => quantised.applied_to(network),
        };
        match self.preference {
            None => network,
            Some(preference) => network.heading(|head| Box::new(PreferenceHead { head, preference })),
        }
    }

    /// The whole network, as one rank has it.
    pub fn whole(&self) -> Network {
        self.network(&TensorParallel::solo())
    }
}

impl BatchPart {
    /// Number, in the global batch, of a micro-batch of a data-parallel rank.
    pub fn number_of(&self, axes: Mesh, micro_batch: usize, rank: usize) -> usize {
        match self.has_neighbours {
            true => rank * self.micro_batches + micro_batch,
            false => micro_batch * axes.data + rank,
        }
    }

    /// Index, in the global batch, of the first sample of a data-parallel rank's micro-batch.
    pub fn first_sample(&self, axes: Mesh, micro_batch: usize, rank: usize) -> usize {
        self.number_of(axes, micro_batch, rank) * self.micro_batch_size
    }
}

impl MeshPart {
    /// The chunk layout of some parameters, for the ranks of the data axis.
    pub(crate) fn lay_out(&self, sizes: &[ParameterSize]) -> Result<ChunkLayout, ChunkError> {
        lay_out(sizes, self.axes.data as u64, &self.chunk_size)
    }
}

impl PipelinePart {
    fn new(schedule: PipelineSchedule, evaluation: PipelineSchedule) -> PipelinePart {
        let depths = [depth(&schedule), depth(&evaluation)];
        let (schedule, evaluation) = (Arc::new(schedule), Arc::new(evaluation));
        PipelinePart { schedule, evaluation, depths, lowest_stage: 0, abridged: None }
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
}
