//! A run: what is trained on what, planned, then done.
//!
//! [`config`] is what the user said; [`dataset`] the tokens; [`planning`] the dry run of every rank and
//! what follows from it; [`rank`] one rank's engine, with [`step`] as the way of a batch and [`diagnose`] for
//! one that is not finite; [`state`] fills, saves and restores; [`run`] loops over steps and tells an
//! [`run::Observer`]; [`sample`] continues text.
#![forbid(unsafe_code)]

pub mod config;
pub mod dataset;
pub mod diagnose;
pub mod metrics;
pub mod planning;
pub mod rank;
pub mod run;
pub mod sample;
pub mod state;
pub mod step;

pub use config::RunConfig;
pub use dataset::Dataset;
pub use planning::{RankPlan, RunPlan, Spec};
pub use rank::Rank;
pub use run::{Observer, RunError, Summary};
