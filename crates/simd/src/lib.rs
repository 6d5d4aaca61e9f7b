//! Instruction sets of the processor, vectors of 16 f32 on each of them, [sums] of the values of ranks, and
//! [tile registers](tiles).
//!
//! A loop is written once, as an `#[inline(always)]` function over slices or over the vectors of [`Lanes`], and
//! [`vectorized!`] compiles it three times: for AVX-512, for AVX2 with FMA, and for any processor. The caller
//! chooses among them with an [`Isa`]; nothing here reads the environment. Rust never contracts or reorders
//! floating point, so an element has the same bits in a full vector and in a tail. [`Lanes::fused`] and
//! [`Lanes::mul_add`] are fused only where the processor fuses, so bits may differ between instruction sets, never
//! between positions or thread counts.

mod cache;
mod copy;
mod isa;
pub mod lanes;
mod number;
pub mod sums;
pub mod tiles;

pub use cache::l2_bytes;
pub use copy::copy;
pub use isa::Isa;
#[cfg(target_arch = "x86_64")]
pub use lanes::{Avx2, Avx512};
pub use lanes::{Lanes, Portable};
pub use number::Number;
