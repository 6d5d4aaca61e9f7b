//! dequantise: numbers of 8 or 4 bits in blocks, to floats.
//!
//! 16 numbers at a time are computed in f32 and rounded. Products read them as any other weight.

use half::f16;
use phalanx_plan::trace::DType;
use phalanx_simd::{Lanes, vectorized};
use phalanx_tensor::blocks::{BLOCK, NF4, NF4_CODES, NF4_SCALED, Q8_0_BYTES, Q8_0_SCALED, nf4_scales};
use phalanx_tensor::{View, ViewMut};

use crate::elementwise::{bytes, store};
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
    for (from, to) in from.chunks_exact(dtype.block_bytes()).zip(to.chunks_exact_mut(BLOCK)) {
        match dtype {
            DType::Q8_0 => {
                let groups = from.as_chunks().0.iter().zip(to.as_chunks_mut().0);
                groups.for_each(|(from, to)| q8_0_group::<L, T>(from, to));
            }
            _ => {
                let groups = from[..NF4_CODES].as_chunks().0.iter().zip(to.as_chunks_mut().0);
                groups
                    .zip(nf4_scales(from))
                    .for_each(|((from, to), scale)| nf4_group::<L, T>(from, scale, to));
            }
        }
    }
}

#[inline(always)]
fn q8_0_group<L: Lanes, T: Float>(from: &[u8; Q8_0_BYTES], to: &mut [T; Q8_0_SCALED]) {
    let [low, high, numbers @ ..] = from;
    let scale = [f16::from_le_bytes([*low, *high]); 16];
    // SAFETY: compiled for L; groups have 32 numbers.
    unsafe {
        let scale = L::load_f16(scale.as_ptr());
        for at in [0, 16] {
            let numbers = L::load_i8(numbers.as_ptr().add(at).cast());
            store::<L, T>(to, at, L::mul(numbers, scale), 16);
        }
    }
}

#[inline(always)]
fn nf4_group<L: Lanes, T: Float>(codes: &[u8; NF4_SCALED / 2], scale: f32, to: &mut [T; NF4_SCALED]) {
    // SAFETY: compiled for L; groups have 64 numbers, of which 16 have 8 bytes.
    unsafe {
        let scale = L::splat(scale);
        for at in [0, 16, 32, 48] {
            let numbers = L::look_up(&NF4, codes.as_ptr().add(at / 2));
            store::<L, T>(to, at, L::mul(numbers, scale), 16);
        }
    }
}
