//! Trains Transformer language models on many ranks with little memory; this is the public library.
//!
//! The program `phalanx` does all of it from the command line. From Rust, a run is four things: a
//! [`RunConfig`], a model's shape ([`Gpt2`]), the [`RunPlan`] that a dry run of the two gives, and the
//! engine of a rank ([`Rank`]) on a [`Device`] whose memory replays that plan.
//!
//! ```
//! use phalanx::{Batch, CpuFactory, Gpt2, PhaseName, RunConfig, RunPlan, Spec, on_threads};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut config = RunConfig::default();
//! config.model.seq = 16;
//! config.batch.global = 4;
//! config.parallel.data = Some(2); // data parallelism over two ranks
//! let model = Gpt2 { layers: 2, hidden: 32, heads: 4, vocab: 256, positions: 16, ..Gpt2::default() };
//!
//! // Before anything is allocated, every byte of every rank is known, and every collective checked.
//! let plan = RunPlan::new(Spec::new(&config, model, 0, 1)?)?;
//! println!("rank 0 takes {} bytes", plan.of(0).memory.arena_bytes);
//!
//! // The run takes exactly these bytes.
//! let losses = on_threads(&CpuFactory::new(), &plan, |rank| {
//!     rank.initialise(1).unwrap();
//!     let batch = Batch { tokens: vec![104; 2 * 16], targets: vec![105; 2 * 16], ..Batch::default() };
//!     let losses = [1, 2].map(|step| rank.step(step, &batch, false).unwrap().loss);
//!     assert_eq!(rank.device().arena().peak(), plan.of(0).memory.phase(PhaseName::Step).map(|step| step.peak));
//!     losses
//! })?;
//! assert!(losses[0][1] < losses[0][0]);
//! # Ok(())
//! # }
//! ```
//!
//! [`Training`] does the same with a [`DataSource`]. What is open:
//!
//! - a layer of your own implements [`layers::RowFunction`], or [`layers::Layer`] with kernels as an [`OwnOperation`];
//!   [`WithBlock`] puts it into a model;
//! - a model is a [`Model`]: a [`Network`] of layers, written once for [`TensorParallel`] and cut by the configuration;
//! - an optimizer is an [`UpdateRule`] ([`Spec::with_optimizer`]);
//! - a learning rate schedule is a [`LearningRate`] or a function of the step ([`Spec::with_learning_rate`]);
//! - a source of samples is a [`DataSource`];
//! - a model is a [`Model`], which may read floats beside tokens, and bring a loss of its own ([`layers::Head`]).
//!
//! Ranks are threads of this process ([`on_threads`], [`Training::on_threads`]), or processes that [`processes`] starts.
//! `examples/` has each of these in less than 60 lines: `own_layer`, `own_optimizer`, `own_data`, `processes`; and
//! `all_reduce` on three ranks, `ddp` in a few lines, `own_model` on a mesh of eight, and `own_inputs`: floats and a loss of its own.
//! A ConvNet is in the examples of `phalanx-bench`: `convnet`.
//!
//! The feature `tokenizers` adds the tokenizers `gpt2` and `tokenizer.json`, which take longer to build than everything
//! else; without it there are `byte`, `char` and token files.
#![forbid(unsafe_code)]

mod launch;

pub use launch::{LaunchError, Launcher, processes};
pub use phalanx_checkpoint::{
    Checkpoint, CheckpointError, FolderNames, HuggingFaceDir, Newest, newest, write_hugging_face,
};
pub use phalanx_collectives::{
    CollectiveError, Endpoint, Group, HostJob, MetaGroup, Pending, Solo, join, threads,
};
pub use phalanx_cpu::{self as cpu, Cpu, CpuFactory};
pub use phalanx_cuda::{self as cuda, CudaFactory};
pub use phalanx_data::{Corpus, CorpusSpec, DataError, TokenFile, Tokenizer, Tokens};
pub use phalanx_layers::{self as layers, Network};
pub use phalanx_models::{
    Activation, Arch, Bert, Dropouts, Gpt2, Input, Model, NumberedLayers, Objective, WithBlock, from_config,
};
pub use phalanx_optim::{
    Extent, LearningRate, Optimizer, StateSpec, Update, UpdateRule, UpdateStep, UpdatedParameter,
};
pub use phalanx_parallel::TensorParallel;
pub use phalanx_plan::trace::{Axis, PhaseName, Placement, Placements, Trace};
pub use phalanx_plan::{
    ChunkLayout, Coordinates, MemoryPlan, Mesh, Peak, PipelineSchedule, Precision, ZeroStage, plan_memory,
};
pub use phalanx_tensor::{
    Access, Arena, Category, CrossEntropy as LossNumbers, DType, Device, DeviceError, DeviceFactory,
    DeviceRequest, Gelu, Heads, IGNORED, Layout, Memory, OwnOperation, Patches, Region, Shape, Tensor, View,
    ViewMut,
};
pub use phalanx_train::dataset::DataDigests;
pub use phalanx_train::job::{Job, Start};
pub use phalanx_train::metrics::{EvaluationRecord, StepRecord};
pub use phalanx_train::non_finite::NonFinite;
pub use phalanx_train::planning::PlanError;
pub use phalanx_train::rank::{Batch, Numbers, SampleNumbers};
pub use phalanx_train::run::{RankEnvironment, ScaleChange, train};
pub use phalanx_train::sample::{Generator, Sampling};
pub use phalanx_train::step::Outcome;
pub use phalanx_train::{
    DataSource, Dataset, GroupSource, Groups, Observer, Rank, RankPlan, ResolvedConfig, RunConfig, RunError,
    RunPlan, Spec, SpecError, Summary, Training, config, on_endpoint, on_threads,
};
