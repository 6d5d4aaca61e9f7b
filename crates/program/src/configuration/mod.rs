//! The configuration of a run: its keys, files, changes, and those of other systems.

pub mod adapter;
pub mod changed_keys;
pub mod changes;
pub mod earlier;
pub mod foreign_keys;
pub mod kept_kernels;
pub mod key_reference;
pub mod keys;
pub mod learning_rate;
pub mod left_out;
pub mod profiles;
pub mod schedule_file;
pub mod shape;
pub mod translation;
pub mod user_config;
