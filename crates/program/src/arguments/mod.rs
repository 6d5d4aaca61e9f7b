//! The command line: what commands accept, and numbers as people write them.

pub mod args;
pub mod bench_args;
pub mod byte_size;
pub mod counts;
pub mod draw_args;
pub mod launch_args;
pub mod limits;
pub mod memory_args;
pub mod network_args;
pub mod overrides;
pub mod report_args;
pub mod sample_args;
pub mod search_args;
pub mod sized_args;
pub mod strategies_args;
pub mod train_args;
