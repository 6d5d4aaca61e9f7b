//! The dry run of every rank, and what is decided from it before the first step.
//!
//! Each rank's init, step, diagnosis, evaluation, loading and saving run twice on `Meta`: once to learn in
//! which order blocks need chunks, once more with that order known. From the second come arena offsets and
//! peaks (`plan::memory`), the proof that all ranks say the same to each other (`plan::agreement`), and
//! what the step costs (`plan::cost`). The same [`Rank`] then trains.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_collectives::{Group, MetaGroup};
use phalanx_layers::{Checkpointing, Draw, Network};
use phalanx_models::{Dropouts, Gpt2};
use phalanx_optim::loss_scale::Dynamic;
use phalanx_optim::{LossScaling, Rule, Schedule, schedule::Decay};
use phalanx_plan::{
    ChunkError, ChunkLayout, ChunkSize, Cost, Disagreement, MemoryError, MemoryPlan, ParameterSize,
    Precision, Search, Stage, Textbook, compare, lay_out, plan_memory, textbook, use_order,
};
use phalanx_tensor::{CrossEntropy, Device};
use phalanx_trace::Trace;

use crate::config::{
    self, CheckpointingWord, Chunk, ChunkWord, Float, OptimizerKind, Reduce, RunConfig, ScheduleKind,
};
use crate::rank::{Batch, Rank};

/// Everything about a run that decides what a rank allocates and computes.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The model's shape, and what it drops.
    pub model: Gpt2,
    /// What backward computes again.
    pub checkpointing: Checkpointing,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Sequences computed at once.
    pub micro: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Ranks.
    pub world: usize,
    /// ZeRO stage.
    pub stage: Stage,
    /// Whether communication runs beside computation.
    pub overlap: bool,
    /// Chunks gathered ahead.
    pub prefetch: usize,
    /// Reduce once a step instead of once a micro-batch.
    pub defer: bool,
    /// Element types.
    pub precision: Precision,
    /// What the loss is multiplied by before backward.
    pub loss_scaling: LossScaling,
    /// The update rule.
    pub rule: Rule,
    /// The learning rate.
    pub schedule: Schedule,
    /// Largest gradient norm; 0 for none.
    pub clip: f32,
    /// Probability that training spreads over all classes.
    pub label_smoothing: f32,
    /// Weight of training's squared log-sum-exp.
    pub z_loss: f32,
    /// Of what layers draw.
    pub seed: u64,
    /// Where each parameter lies.
    pub layout: Arc<ChunkLayout>,
    /// Micro-batches of an evaluation on each rank; 0 without held-out data.
    pub evaluation_batches: usize,
    /// Threads of a rank.
    pub threads: usize,
}

impl Spec {
    /// From a checked configuration, for a model whose vocabulary is known; what it drops is replaced by what
    /// the configuration says. `evaluated`: windows of one evaluation over all ranks.
    ///
    /// # Errors
    /// When no chunk layout exists for the model.
    pub fn new(
        config: &RunConfig,
        model: Gpt2,
        evaluated: usize,
        threads: usize,
    ) -> Result<Spec, ChunkError> {
        let model = Gpt2 { dropout: dropouts(config), ..model };
        let network = model.network();
        let size = |p: &phalanx_layers::ParameterSpec| ParameterSize {
            name: p.name.clone(),
            elements: p.elements() as u64,
        };
        let sizes: Vec<_> = network.parameters.iter().map(size).collect();
        let world = config.parallel.data;
        let layout = lay_out(&sizes, world as u64, &chunk_size(config, &model))?;
        Ok(Spec {
            seq: config.model.seq,
            micro: config.micro(),
            micro_batches: config.micro_batches(),
            world,
            stage: Stage::from_number(config.parallel.zero).expect("a checked configuration"),
            overlap: config.parallel.overlap,
            prefetch: config.memory.prefetch,
            defer: config.batch.reduce == Reduce::Defer,
            precision: precision(config),
            loss_scaling: loss_scaling(config),
            rule: rule(config),
            schedule: schedule(config),
            clip: config.optimizer.clip as f32,
            label_smoothing: config.loss.label_smoothing as f32,
            z_loss: config.loss.z_loss as f32,
            seed: config.train.seed,
            checkpointing: checkpointing(config),
            layout: Arc::new(layout),
            evaluation_batches: evaluated / (config.micro() * world),
            threads,
            model,
        })
    }

    /// The network as it is trained.
    pub fn network(&self) -> Network {
        self.model.network_with(self.checkpointing)
    }

    /// First sample, within the global batch, of a rank's micro-batch: micro-batch m of a step is the m-th span of
    /// `world * micro` samples, of which rank r has the r-th part.
    pub fn first_sample(&self, micro_batch: usize, rank: usize) -> usize {
        (micro_batch * self.world + rank) * self.micro
    }

    /// What layers draw from in a rank's micro-batch of step `step`.
    pub fn draw(&self, step: u64, micro_batch: usize, rank: usize) -> Draw {
        Draw { seed: self.seed, step, first_sample: self.first_sample(micro_batch, rank) as u64 }
    }

    /// The numbers of a step's loss: the mean over the tokens of the global batch; its gradients are
    /// multiplied by `loss_scale`.
    pub fn cross_entropy(&self, loss_scale: f32) -> CrossEntropy {
        let scale = 1.0 / self.tokens_per_step() as f32;
        let (label_smoothing, z_loss) = (self.label_smoothing, self.z_loss);
        CrossEntropy { scale, gradient_scale: scale * loss_scale, label_smoothing, z_loss }
    }

    /// Tokens of one step, over all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        (self.micro * self.micro_batches * self.world * self.seq) as u64
    }
}

fn chunk_size(config: &RunConfig, model: &Gpt2) -> ChunkSize {
    let memory = &config.memory;
    match memory.chunk {
        Chunk::Word(ChunkWord::None) => ChunkSize::None,
        Chunk::Word(ChunkWord::Auto) => ChunkSize::Auto(Search {
            search_range_mb: memory.search_range_mb,
            hidden_dim: Some(memory.hidden_dim.unwrap_or(model.hidden as u64)),
            min_chunk_size_mb: memory.min_chunk_size_mb,
        }),
        Chunk::Mebibytes(size) => ChunkSize::Elements(((size * f64::from(1 << 20) / 4.0) as u64).max(1)),
    }
}

fn dropouts(config: &RunConfig) -> Dropouts {
    let model = &config.model;
    let p = |own: Option<f64>| own.unwrap_or(model.dropout) as f32;
    Dropouts {
        embedding: p(model.embedding_dropout),
        attention: p(model.attention_dropout),
        residual: p(model.residual_dropout),
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
            least: p.min_loss_scale as f32,
        }),
    }
}

fn rule(config: &RunConfig) -> Rule {
    let o = &config.optimizer;
    let weight_decay = o.weight_decay as f32;
    match o.kind {
        OptimizerKind::Adamw => {
            Rule::AdamW { beta1: o.beta1 as f32, beta2: o.beta2 as f32, eps: o.eps as f32, weight_decay }
        }
        OptimizerKind::Sgd => Rule::Sgd { momentum: o.beta1 as f32, weight_decay },
    }
}

fn schedule(config: &RunConfig) -> Schedule {
    let decay = match config.schedule.kind {
        ScheduleKind::Cosine => Decay::Cosine,
        ScheduleKind::Linear => Decay::Linear,
        ScheduleKind::Constant => Decay::Constant,
    };
    Schedule {
        decay,
        lr: config.optimizer.lr,
        min_lr: config.schedule.min_lr,
        warmup: config.schedule.warmup,
        steps: config.train.steps,
    }
}

/// The plan of one rank.
pub struct RankPlan {
    /// The rank.
    pub rank: usize,
    /// Offsets and peaks.
    pub memory: MemoryPlan,
}

/// The plan of a run.
pub struct RunPlan {
    /// What was planned.
    pub spec: Spec,
    /// By rank.
    pub ranks: Vec<RankPlan>,
    /// By phase: chunks in order of use.
    pub orders: BTreeMap<&'static str, Vec<u32>>,
    /// Of one step of rank 0.
    pub step: Cost,
    /// Trained numbers.
    pub parameters: u64,
    /// What papers say a rank holds.
    pub textbook: Textbook,
}

/// Why no plan was made.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// Ranks would not say the same to each other.
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    /// The trace cannot be placed: a bug of the engine.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl RunPlan {
    /// Runs every rank dry.
    ///
    /// # Errors
    /// When the ranks disagree, or a phase keeps what it must give back.
    pub fn new(spec: Spec) -> Result<RunPlan, PlanError> {
        let first = dry_run(&spec, 0, &BTreeMap::new());
        let order = |phase| (phase, use_order(&first, phase));
        let orders: BTreeMap<_, _> = ["step", "evaluate"].map(order).into();
        let traces: Vec<Trace> = (0..spec.world).map(|rank| dry_run(&spec, rank, &orders)).collect();
        compare(&traces)?;
        let memory = |t: &Trace| Ok(RankPlan { rank: t.rank, memory: plan_memory(t)? });
        let ranks = traces.iter().map(memory).collect::<Result<_, MemoryError>>()?;
        let step = Cost::of(traces[0].phase("step").expect("every dry run has a step"));
        let parameters = spec.model.network().elements() as u64;
        let textbook = textbook(parameters, spec.world as u64, spec.stage, spec.precision);
        Ok(RunPlan { ranks, orders, step, parameters, textbook, spec })
    }

    /// Floating-point operations of one step over all ranks.
    pub fn flops_per_step(&self) -> u64 {
        self.step.flops * self.spec.world as u64
    }

    /// Bytes that all ranks together send in one step.
    pub fn collective_bytes_per_step(&self) -> u64 {
        self.step.sent_bytes * self.spec.world as u64
    }
}

/// One rank's life on `Meta`.
fn dry_run(spec: &Spec, rank: usize, orders: &BTreeMap<&'static str, Vec<u32>>) -> Trace {
    let device = Device::meta(spec.threads);
    let recorder = Arc::clone(device.recorder().expect("Meta records"));
    let group: Arc<dyn Group> = Arc::new(MetaGroup::new("data", rank, spec.world, recorder));
    let mut engine = Rank::new(device.clone(), group, spec, orders);
    let batch = Batch::with_rows(spec.micro * spec.micro_batches, spec.seq);
    let windows = Batch::with_rows(spec.micro * spec.evaluation_batches, spec.seq);
    let never = "nothing fails on Meta";
    engine.load(|_, _, _, _| Ok(())).expect(never);
    engine.step(1, &batch, false).expect(never);
    engine.diagnose(1, &batch, 1.0).expect(never);
    if spec.evaluation_batches > 0 {
        engine.evaluate(&windows).expect(never);
    }
    engine.save(|_, _| Ok(())).expect(never);
    engine.report(|_| Ok(())).expect(never);
    device.take_trace(rank)
}
