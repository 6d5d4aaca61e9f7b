//! A double of the CUDA driver for tests: it executes PTX, the very text that a card would get, on the host processor,
//! and checks every access to memory.
//!
//! - `ptx` reads the text, `decode` gives it a meaning, `alu` has the instructions that compute.
//! - `execute` runs a launch; `memory` is the device's memory.
//! - `checks` reports races, unwritten memory, addresses out of bounds and so on, with kernel, source line and thread.
//! - `queues` has streams, events and graphs, whose work runs in an order that a seed decides; `driver` is the C interface
//!   over all of this; `cublaslt` and `nccl` are those of cuBLASLt and NCCL.
//!
//! What a card does differently: `mma.sync` and the approximate functions have other last bits, memory models are weaker,
//! clocks run. Clusters, the tensor memory accelerator, textures, cooperative launches, and 8-bit floats are refused.

pub mod alu;
mod arenas;
mod bits;
pub mod checks;
pub mod cublaslt;
pub mod decode;
pub mod driver;
pub mod execute;
pub mod kernel;
mod mapping;
pub mod memory;
pub mod module;
pub mod nccl;
pub mod numbers;
mod parts;
pub mod ptx;
pub mod queues;
mod regions;
pub mod registers;
mod shared;
mod vectors;
