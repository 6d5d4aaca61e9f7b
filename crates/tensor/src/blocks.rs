//! Element types whose elements are stored in blocks: [`DType::Q8_0`] and [`DType::Nf4`], for weights that are only read.
//!
//! | type | block | group with a scale | a block's bytes |
//! |---|---|---|---|
//! | Q8_0 | 4,096 | 32 | 128 times: the scale (f16), 32 whole numbers (i8) |
//! | NF4 | 4,096 | 64 | codes (4 bits each, the first of two in the high half), codes of the 64 scales (u8), smallest scale and step (f32) |
//!
//! A block stands for itself, whatever lies beside it: shards, tiles and messages are cut between blocks. Groups are consecutive elements of the
//! flattened weight. Q8_0 is GGUF's. NF4 has the codes and scales of bitsandbytes (Dettmers et al., "QLoRA", arXiv 2305.14314), and quantises
//! the scales again, within a block instead of over the whole tensor, and evenly between the smallest and the largest.

use half::f16;
use phalanx_plan::trace::DType;

/// Elements of a block.
pub const BLOCK: usize = DType::Nf4.block();

/// Elements of Q8_0 that share a scale.
pub const Q8_0_SCALED: usize = 32;

/// Bytes of a group of Q8_0.
pub const Q8_0_BYTES: usize = 2 + Q8_0_SCALED;

/// Elements of NF4 that share a scale.
pub const NF4_SCALED: usize = 64;

/// The numbers of NF4's codes, of which each is as likely as another in a normal distribution.
#[rustfmt::skip]
pub const NF4: [f32; 16] = [
    -1.0, -0.696_192_8, -0.525_073_05, -0.394_917_5, -0.284_441_38, -0.184_773_43, -0.091_050_036, 0.0,
    0.079_580_3, 0.160_930_2, 0.246_112_3, 0.337_915_24, 0.440_709_83, 0.562_617, 0.722_956_84, 1.0,
];

/// Scales of a block of NF4.
const SCALES: usize = BLOCK / NF4_SCALED;

/// Bytes of the codes of a block of NF4.
pub const NF4_CODES: usize = BLOCK / 2;

/// Byte of a block of NF4 where its smallest scale lies; the step follows.
pub const NF4_RANGE: usize = NF4_CODES + SCALES;

/// Largest number that a type of blocks represents.
pub fn largest(dtype: DType) -> f32 {
    match dtype {
        DType::Q8_0 => 127.0 * f16::MAX.to_f32(),
        _ => f32::MAX,
    }
}

/// The words ([`DType::moved`]) of whole blocks of numbers.
///
/// # Panics
/// As [`quantise`].
pub fn quantised(dtype: DType, from: &[f32]) -> Vec<u32> {
    let mut words = vec![0; dtype.bytes_of(from.len()) / 4];
    quantise(dtype, from, bytemuck::cast_slice_mut(&mut words));
    words
}

/// The numbers of whole blocks, given as words.
///
/// # Panics
/// As [`dequantise`].
pub fn dequantised(dtype: DType, words: &[u32]) -> Vec<f32> {
    let mut numbers = vec![0.0; 4 * words.len() / dtype.block_bytes() * BLOCK];
    dequantise(dtype, bytemuck::cast_slice(words), &mut numbers);
    numbers
}

/// Whole blocks of numbers as blocks of `dtype`, which has them.
///
/// # Panics
/// For another type, or parts of blocks.
pub fn quantise(dtype: DType, from: &[f32], to: &mut [u8]) {
    let (from, rest) = from.as_chunks::<BLOCK>();
    assert!(rest.is_empty() && to.len() == dtype.bytes_of(from.len() * BLOCK), "whole blocks");
    for (from, to) in from.iter().zip(to.chunks_exact_mut(dtype.bytes_of(BLOCK))) {
        match dtype {
            DType::Q8_0 => {
                let groups = from.as_chunks::<Q8_0_SCALED>().0.iter();
                groups.zip(to.as_chunks_mut().0).for_each(|(from, to)| *to = quantise_q8_0(from));
            }
            DType::Nf4 => quantise_nf4(from, to),
            other => panic!("{} has no blocks", other.name()),
        }
    }
}

/// The numbers of whole blocks of `dtype`.
///
/// # Panics
/// As [`quantise`].
pub fn dequantise(dtype: DType, from: &[u8], to: &mut [f32]) {
    let (to, rest) = to.as_chunks_mut::<BLOCK>();
    assert!(rest.is_empty() && from.len() == dtype.bytes_of(to.len() * BLOCK), "whole blocks");
    for (from, to) in from.chunks_exact(dtype.bytes_of(BLOCK)).zip(to) {
        match dtype {
            DType::Q8_0 => {
                for (from, to) in from.as_chunks::<Q8_0_BYTES>().0.iter().zip(to.as_chunks_mut().0) {
                    dequantise_q8_0(from, to);
                }
            }
            DType::Nf4 => {
                let scales = nf4_scales(from);
                let groups = from[..NF4_CODES].as_chunks().0.iter().zip(to.as_chunks_mut().0);
                groups.zip(scales).for_each(|((codes, to), scale)| dequantise_nf4(codes, scale, to));
            }
            other => panic!("{} has no blocks", other.name()),
        }
    }
}

/// A scale and 32 whole numbers. The scale is max |x| / 127, and the numbers are x / scale by the scale before it is rounded, halves away from
/// zero (`quantize_row_q8_0_ref` of ggml). Numbers above [`largest`] have an infinite scale.
pub fn quantise_q8_0(group: &[f32; Q8_0_SCALED]) -> [u8; Q8_0_BYTES] {
    let largest = group.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let scale = largest / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let mut out = [0; Q8_0_BYTES];
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    out[2..].iter_mut().zip(group).for_each(|(to, x)| *to = (x * inverse).round() as i8 as u8);
    out
}

/// The numbers of a group of Q8_0.
fn dequantise_q8_0(group: &[u8; Q8_0_BYTES], to: &mut [f32; Q8_0_SCALED]) {
    let scale = f16::from_le_bytes([group[0], group[1]]).to_f32();
    to.iter_mut().zip(&group[2..]).for_each(|(to, number)| *to = f32::from(*number as i8) * scale);
}

/// A block of NF4.
fn quantise_nf4(from: &[f32; BLOCK], to: &mut [u8]) {
    let mut scales = [0f32; SCALES];
    let groups = from.as_chunks::<NF4_SCALED>().0.iter().zip(to.as_chunks_mut::<{ NF4_SCALED / 2 }>().0);
    for ((group, codes), scale) in groups.zip(&mut scales) {
        *scale = group.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let inverse = 1.0 / scale.max(1e-38);
        let scaled: [f32; NF4_SCALED] = std::array::from_fn(|i| (group[i] * inverse).clamp(-1.0, 1.0));
        // The number of midpoints below x: of two codes that are equally near the lower.
        let mut counts = [0u32; NF4_SCALED];
        for pair in NF4.windows(2) {
            let middle = (pair[0] + pair[1]) / 2.0;
            counts.iter_mut().zip(scaled).for_each(|(count, x)| *count += u32::from(middle < x));
        }
        for (pair, byte) in counts.as_chunks::<2>().0.iter().zip(codes) {
            *byte = (pair[0] << 4 | pair[1]) as u8;
        }
    }
    let ends = |of: fn(f32, f32) -> f32| scales.iter().copied().reduce(of).expect("a block has scales");
    let (low, high) = (ends(f32::min), ends(f32::max));
    let step = (high - low) / 255.0;
    let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
    for (byte, scale) in to[NF4_CODES..NF4_RANGE].iter_mut().zip(scales) {
        *byte = ((scale - low) * inverse).round() as u8;
    }
    to[NF4_RANGE..][..4].copy_from_slice(&low.to_le_bytes());
    to[NF4_RANGE + 4..][..4].copy_from_slice(&step.to_le_bytes());
}

/// The scales of a block of NF4.
#[inline(always)]
pub fn nf4_scales(block: &[u8]) -> [f32; SCALES] {
    let number = |at: usize| f32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"));
    let (low, step) = (number(NF4_RANGE), number(NF4_RANGE + 4));
    std::array::from_fn(|group| low + f32::from(block[NF4_CODES + group]) * step)
}

/// The numbers of a group of NF4.
fn dequantise_nf4(codes: &[u8; NF4_SCALED / 2], scale: f32, to: &mut [f32; NF4_SCALED]) {
    for (codes, to) in codes.iter().zip(to.as_chunks_mut::<2>().0) {
        *to = [NF4[usize::from(codes >> 4)] * scale, NF4[usize::from(codes & 15)] * scale];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of many sizes, and a group of zeros.
    fn numbers() -> Vec<f32> {
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..2 * BLOCK).map(|i| if i / 64 == 3 { 0.0 } else { next() * (1 + i / 64 % 7) as f32 }).collect()
    }

    #[test]
    fn numbers_come_back_within_half_a_step() {
        let from = numbers();
        for (dtype, share) in [(DType::Q8_0, 0.5 / 127.0 + 1e-3), (DType::Nf4, 0.16)] {
            let mut blocks = vec![0; dtype.bytes_of(from.len())];
            quantise(dtype, &from, &mut blocks);
            let mut back = vec![0.0; from.len()];
            dequantise(dtype, &blocks, &mut back);
            for (from, back) in from.chunks(32).zip(back.chunks(32)) {
                // NF4's widest gap is 0.304 of a scale, of which 64 elements may have the largest.
                let largest = from.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                let largest = if dtype == DType::Nf4 { 3.5 } else { largest };
                let worst = from.iter().zip(back).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
                assert!(worst <= share * largest, "{dtype:?}: {worst} of {largest}");
            }
            // What was quantised once stays as it is, but for the rounding of scales.
            assert!(from.iter().zip(&back).all(|(from, back)| *from != 0.0 || *back == 0.0), "{dtype:?}");
        }
    }
}
