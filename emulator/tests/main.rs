//! The integration tests of this crate, as one program.

mod cublaslt;
#[path = "support/driver.rs"]
mod driver;
mod faults;
mod instructions;
mod loading;
mod nccl;
mod numerics;
#[path = "../../crates/testing/src/process.rs"]
mod process;
mod rate;
mod regions;
mod sequences;
mod support;
