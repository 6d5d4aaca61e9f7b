//! Trains Transformer language models on many ranks with little memory; this is the library's face.
//!
//! The program `phalanx` does all of it from the command line. From Rust, a run is four things: a
//! [`RunConfig`], a model's shape ([`Gpt2`]), the [`RunPlan`] that a dry run of the two gives, and the
//! engine of a rank ([`Rank`]) on a [`Device`] whose memory replays that plan.
//!
//! ```
//! use phalanx::{Arena, Batch, Cpu, Device, Dropouts, Gpt2, Rank, Region, RunConfig, RunPlan, Solo, Spec};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut config = RunConfig::default();
//! config.model.seq = 16;
//! config.batch.global = 4;
//! config.check()?;
//! let dropout = Dropouts::default(); // replaced by what the configuration says
//! let model = Gpt2 { layers: 2, hidden: 32, heads: 4, vocab: 256, positions: 16, eps: 1e-5, dropout };
//!
//! // Before anything is allocated, every byte of every rank is known.
//! let plan = RunPlan::new(Spec::new(&config, model, 0, 1)?)?;
//! let memory = plan.ranks[0].memory.clone();
//!
//! // The run takes exactly these bytes.
//! let region = Region::anonymous(memory.arena_bytes as usize)?;
//! let device = Device::new(Cpu::new(1), Arena::replaying(memory.clone(), region));
//! let mut rank = Rank::new(device.clone(), Arc::new(Solo::new("data")), &plan.spec, &plan.orders);
//! rank.initialise(1)?;
//! let batch = Batch { tokens: vec![104; 4 * 16], targets: vec![105; 4 * 16] };
//! let first = rank.step(1, &batch, false)?.loss;
//! let second = rank.step(2, &batch, false)?.loss;
//! assert!(second < first);
//! assert_eq!(device.arena().peak(), memory.phase("step").map(|step| step.peak));
//! # Ok(())
//! # }
//! ```
//!
//! More ranks: [`threads`] gives each thread of this process a group, [`HostJob`] and [`join`] do the same
//! for processes. A model of your own is a [`Network`] of [`layers`].
#![forbid(unsafe_code)]

pub use phalanx_checkpoint::{
    Checkpoint, CheckpointError, HuggingFaceDir, Newest, newest, write_hugging_face,
};
pub use phalanx_collectives::{
    CollectiveError, Endpoint, Group, HostJob, MetaGroup, Pending, Solo, join, threads,
};
pub use phalanx_data::{Corpus, CorpusSpec, DataError, TokenFile, Tokenizer, Tokens};
pub use phalanx_layers::{self as layers, Network};
pub use phalanx_models::{Dropouts, Gpt2};
pub use phalanx_plan::{ChunkLayout, MemoryPlan, Peak, Precision, Stage};
pub use phalanx_tensor::{Arena, Cpu, Device, Region, Tensor, cpu};
pub use phalanx_train::rank::Batch;
pub use phalanx_train::run::{Job, Place, Start, train};
pub use phalanx_train::sample::{Generator, Sampling};
pub use phalanx_train::{
    Dataset, Observer, Rank, RankPlan, RunConfig, RunError, RunPlan, Spec, Summary, config,
};
