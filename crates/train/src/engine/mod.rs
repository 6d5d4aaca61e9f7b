//! A rank: what it allocates and computes ([`spec`]), the groups that it speaks to, its step, evaluation, diagnosis and saving.
//!
//! It runs dry as it trains, and knows neither plans nor the loop of steps.

pub(crate) mod abridged_programs;
pub mod base;
pub(crate) mod batch;
mod below;
pub(crate) mod cut;
pub mod diagnose;
pub mod error;
pub(crate) mod evaluation;
pub mod groups;
mod new_rows;
pub mod non_finite;
pub(crate) mod parameter_sizes;
pub(crate) mod principal;
pub mod rank;
pub(crate) mod rule_mismatch;
pub(crate) mod rules;
pub mod saving;
pub(crate) mod scores;
pub mod spec;
pub mod state;
pub mod step;
pub mod targets;
pub(crate) mod ties;
pub mod weights;
