//! The device of NVIDIA GPUs.
//!
//! [`CudaFactory`] makes a card the device of a rank, behind the same contract as the processor. The driver and NVRTC are
//! loaded when a device is made, so one program serves machines with and without CUDA. [`Found::look`] says whether there are any.
//!
//! - **Kernels** (`kernels/*.cu`, [`programs`]) have the names of the processor's files. NVRTC compiles them for the card
//!   ([`compiler`]), and a folder keeps what was compiled ([`cache`]).
//! - **Operations** (`launch`) become launches. Results do not depend on the number of blocks, and no float is added
//!   atomically.
//! - **Memory** (`memory`) is taken once, when the device is made: the plan's bytes, and scratch for partial sums.
//! - **Streams** (`streams`) are those of the trace, ordered by events. What the stream of kernels is given becomes segments
//!   (`segment`); one that comes again is launched as a graph (`graphs`).
//! - **Operations of the host** (`host_stream`) run on a thread of their own, ordered with the card by events.
//! - **Links** (`links`, `nccl`) move bytes between the cards of several ranks, where NCCL is found and asked for.
//! - **Failures**: the first is kept, with the call that failed. What only the data shows (`faults`), such as a token outside of
//!   the vocabulary, is reported by the next wait.
//!
//! | operation | kernels |
//! |---|---|
//! | `dequantise` | `blocks.cu` |
//! | `fill`, `convert`, `add`, `multiply`, `scaled`; `copy`, `copy_columns` | `elementwise.cu`, `elementwise_f64.cu`; the driver's copy |
//! | `linear`, `linear_gelu`, `linear_input_gradient`, `linear_weight_gradient` | cuBLASLt ([`Options::library_products`]), or `matmul.cu`: `product`, `product_with_transposed`, `product_of_transposed` |
//! | `bias_gradient`, and the last step of other sums over rows | `bias.cu`: `bias_sums`, `add_blocks` |
//! | `layer_norm`, `layer_norm_backward`, without a mean `rms_norm`, `rms_norm_backward`; `norm_sums` | `layer_norm.cu` |
//! | `weight_squares`, `rescale`, `rescale_gradient` | `magnitudes.cu` |
//! | `gelu`, `gelu_backward` | `gelu.cu` |
//! | `tanh`, `tanh_backward` | `tanh.cu` |
//! | `gated`, `gated_backward` | `gated.cu` |
//! | `dropout` | `dropout.cu` |
//! | `attention`, `attention_cached` | `attention.cu`; `store_keys_values` fills the cache |
//! | `attention_backward` | `attention_backward.cu`: delta, queries, keys and values |
//! | `rotary`, `rotary_backward` | `rotary.cu` |
//! | `embedding`, `add_positions`, `embedding_backward`, `position_gradient` | `embedding.cu` |
//! | `vocabulary_statistics`, `logits_statistics`, `vocabulary_loss` | `cross_entropy.cu`; `sum_losses` of `norm_f64.cu` |
//! | `preference_loss` | `preference.cu`: sums of answers, losses of pairs, factors of tokens |
//! | `adamw`, `sgd` | `adamw.cu`, `sgd.cu` |
//! | sums of what has come over a link | `sum_parts.cu` |
//! | `block_squares`, `count_non_finite`; `tree_sum`, `norm` | `norm.cu`; `norm_f64.cu` |

mod backend;
mod blas;
mod bounds;
pub mod cache;
pub mod checks;
pub mod compiler;
pub mod driver;
mod error;
mod factory;
mod faults;
mod found;
mod gate;
mod graphs;
mod host_stream;
mod launch;
mod libraries;
mod limits;
mod links;
mod memory;
mod modules;
mod nccl;
pub mod programs;
mod scratch;
mod search;
mod segment;
mod streams;

pub use blas::ALGORITHMS;
pub use driver::{Card, Clocks, Launches, Made, usable_cards};
pub use error::{CAPABILITY_MIN, DRIVER_MIN, Error};
pub use factory::{CONTEXT_BYTES, CudaFactory, DRIVER_HOST_BYTES, Options, SCRATCH_BYTES, unplanned_device};
pub use found::Found;
pub use launch::attention_shared_bytes;
pub use libraries::{LibraryState, libraries, nccl_version};
pub use limits::Limits;
pub use nccl::{NO_NCCL, communicator_bytes};
pub use scratch::{scratch_needed, scratch_planned};
pub use search::Folders;

/// The device's name, in errors and reports.
pub const NAME: &str = "cuda";
