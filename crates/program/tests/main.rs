//! The integration tests of this crate, as one program.

mod bad_input;
mod bench;
mod cards;
mod cuda;
mod deepspeed;
mod disk;
mod faults;
mod files;
mod frozen;
mod gguf;
mod hostile;
mod hosts;
mod import_config;
mod instruction_sets;
mod joined;
mod kernels;
mod learning_rate;
mod limits;
mod mesh;
mod model_tokenizer;
mod mpi;
mod output;
mod own_files;
mod plan;
mod precision;
mod resume_damage;
mod rig;
mod run_folder;
mod simulated;
mod standing;
#[path = "../../mpi/tests/started/mod.rs"]
mod started;
mod strategies;
mod task;
mod token_files;
mod train;
