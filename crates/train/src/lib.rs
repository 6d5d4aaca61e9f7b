//! A training run, in five rooms, of which each imports only those before it: `config`, `engine` (a rank), `data`, `planner`, and `jobs`
//! (the loop of steps). From outside, their modules are used by name.
//!
//! [`config`] is what the user said; [`dataset`] the tokens, of [`token_data`], in two [`parts`]; [`spec`] what both make of a model; [`planning`] the
//! dry run of every rank and what follows from it; [`groups`] who speaks to whom; [`rank`] one rank's engine, with
//! [`step`] as the way of a batch and [`diagnose`] for one that is not finite; [`state`] fills, saves and restores, [`base`] is what adapters lie beside, and [`weights`] are those of a checkpoint with its adapters;
//! [`run`] trains a [`job`]: it loops over steps and tells an [`run::Observer`], [`run_files`] is what it writes;
//! [`sample`] continues text;
//! [`on_threads`] runs all ranks in this process, and [`training`] is a run without a folder.
#![forbid(unsafe_code)]

pub mod config;
mod data;
mod engine;
mod jobs;
mod planner;

pub use config::{ResolvedConfig, RunConfig};
pub use data::dataset::{self, Dataset};
pub use data::source::{self, DataSource};
pub use data::{chats, learned, parts, rows, token_data};
pub use engine::error::{self, RunError};
pub use engine::groups::{self, GroupSource, Groups};
pub use engine::rank::{self, Rank};
pub use engine::spec::{self, Spec, SpecError};
pub use engine::{base, diagnose, non_finite, saving, state, step, targets, weights};
pub use jobs::on_ranks::{device_request, on_endpoint, on_threads};
pub use jobs::run::{self, Observer, Summary};
pub use jobs::training::{self, Training};
pub use jobs::{
    best, job, measured, metric_names, metric_sinks, metrics, metrics_lines, position, references, run_files,
    sample,
};
pub use planner::planning::{self, RankPlan, RunPlan};
pub use planner::{appraisal, chunk_alternatives, chunk_programs, placement_table};
