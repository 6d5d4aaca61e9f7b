//! One command a file.

pub mod asked;
pub mod bench_collectives;
pub mod bench_disk;
pub mod bench_kernels;
pub mod bench_memory;
pub mod bench_step;
pub mod bench_strategies;
pub mod chat;
pub mod completions;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod import;
pub mod import_config;
pub mod inspect;
pub mod keys;
pub mod launch;
pub mod man;
pub mod plan;
pub mod plan_programs;
pub mod plan_schedule;
pub mod plan_search;
pub mod sample;
pub mod tokenize;
pub mod train;
pub mod train_joined;
