//! A training run: configuration, plan, engine and loop.
//!
//! [`config`] is what the user said; [`dataset`] the tokens, of [`token_data`], in two [`parts`]; [`spec`] what both make of a model; [`planning`] the
//! dry run of every rank and what follows from it; [`groups`] who speaks to whom; [`rank`] one rank's engine, with
//! [`step`] as the way of a batch and [`diagnose`] for one that is not finite; [`state`] fills, saves and restores;
//! [`run`] trains a [`job`]: it loops over steps and tells an [`run::Observer`], [`run_files`] is what it writes;
//! [`sample`] continues text;
//! [`on_threads`] runs all ranks in this process, and [`training`] is a run without a folder.
#![forbid(unsafe_code)]

mod abridged_programs;
mod batch;
pub mod best;
mod budget;
pub mod chunk_alternatives;
mod chunk_choice;
mod chunk_note;
pub mod config;
mod cut;
pub mod dataset;
pub mod diagnose;
mod disk_notes;
mod dry_run;
pub mod error;
mod evaluation;
pub mod groups;
pub mod job;
pub mod learned;
pub mod metrics;
pub mod metrics_lines;
pub mod non_finite;
mod on_ranks;
mod parameter_sizes;
pub mod parts;
pub mod placement_table;
mod placing;
pub mod planning;
mod played;
pub mod rank;
mod rank_plan;
mod rule_mismatch;
mod rules;
pub mod run;
pub mod run_files;
pub mod sample;
mod sampling;
pub mod saving;
pub mod source;
pub mod spec;
pub mod state;
pub mod step;
pub mod targets;
mod ties;
pub mod token_data;
pub mod training;

pub use config::{ResolvedConfig, RunConfig};
pub use dataset::Dataset;
pub use error::RunError;
pub use groups::{GroupSource, Groups};
pub use on_ranks::{device_request, on_endpoint, on_threads};
pub use planning::{RankPlan, RunPlan};
pub use rank::Rank;
pub use run::{Observer, Summary};
pub use source::DataSource;
pub use spec::{Spec, SpecError};
pub use training::Training;
