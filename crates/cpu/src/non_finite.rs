//! Counts numbers that are infinite or NaN: those whose exponent bits are all ones.

use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_simd::{Lanes, vectorized};
use phalanx_tensor::View;

use crate::elementwise::{PIECE, widened};
use crate::float::{Float, by_float};
use crate::{Cpu, GRAIN};

/// Number of elements of x that are not finite.
pub(crate) fn count_non_finite(cpu: &Cpu, x: View) -> u64 {
    by_float!(x.dtype(), T => count::<T>(cpu, x.as_slice()))
}

fn count<T: Float>(cpu: &Cpu, x: &[T]) -> u64 {
    // An integer sum does not depend on the order.
    let sum = AtomicU64::new(0);
    cpu.over(x.len(), GRAIN, |range| {
        let mut buffer = [0f32; PIECE];
        let pieces = x[range].chunks(PIECE);
        let found =
            pieces.map(|piece| u64::from(count_piece(cpu.isa, widened(cpu.isa, piece, &mut buffer)))).sum();
        sum.fetch_add(found, Ordering::Relaxed);
    });
    sum.into_inner()
}

vectorized!(fn count_piece(x: &[f32]) -> u32 = count_body);
#[inline(always)]
#[expect(
    clippy::extra_unused_type_parameters,
    reason = "the compiler makes the vectors; L only selects them"
)]
fn count_body<L: Lanes>(x: &[f32]) -> u32 {
    const EXPONENT: u32 = 0x7f80_0000;
    let mut count = 0;
    for x in x {
        count += u32::from(x.to_bits() & EXPONENT == EXPONENT);
    }
    count
}
