//! dequantise: numbers of 8 or 4 bits in blocks, to floats.
//!
//! A block's numbers are computed in f32 in L1, and rounded from there. Products read them as any other weight.

use phalanx_plan::trace::DType;
use phalanx_simd::{Lanes, vectorized};
use phalanx_tensor::blocks::{BLOCK, NF4_CODES, dequantise_nf4, dequantise_q8_0, nf4_scales};
use phalanx_tensor::{View, ViewMut};

use crate::elementwise::{bytes, convert_body};
use crate::float::{Float, by_float};
use crate::{Cpu, GRAIN};

/// `to` = the numbers of `from`, rounded.
pub(crate) fn dequantise(cpu: &Cpu, from: View, to: ViewMut) {
    let (dtype, read) = (from.dtype(), bytes(&from));
    // A task has whole blocks.
    const { assert!(GRAIN.is_multiple_of(BLOCK)) };
    by_float!(to.dtype(), T => cpu.over_mut(to.into_slice::<T>(), GRAIN, |range, to| {
        let from = &read[dtype.bytes_of(range.start)..dtype.bytes_of(range.end)];
        dequantise_piece(cpu.isa, dtype, from, to);
    }));
}

vectorized!(fn dequantise_piece<T: Float>(dtype: DType, from: &[u8], to: &mut [T]) = dequantise_body);
#[inline(always)]
fn dequantise_body<L: Lanes, T: Float>(dtype: DType, from: &[u8], to: &mut [T]) {
    let mut numbers = [0f32; BLOCK];
    for (from, to) in from.chunks_exact(dtype.block_bytes()).zip(to.chunks_exact_mut(BLOCK)) {
        match dtype {
            DType::Q8_0 => {
                let groups = from.as_chunks().0.iter().zip(numbers.as_chunks_mut().0);
                groups.for_each(|(from, to)| dequantise_q8_0(from, to));
            }
            _ => {
                let groups = from[..NF4_CODES].as_chunks().0.iter().zip(numbers.as_chunks_mut().0);
                groups.zip(nf4_scales(from)).for_each(|((from, to), scale)| dequantise_nf4(from, scale, to));
            }
        }
        convert_body::<L, f32, T>(&numbers, to);
    }
}
