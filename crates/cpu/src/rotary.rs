//! Rotary positions (Su et al., arXiv 2104.09864), in place, as [`RotaryPositions`] says. A task has some rows of all
//! sequences: it computes the cosines and sines of a position in f64, once for the rows that have it, and turns all heads by them.

use phalanx_simd::{Lanes, lanes, vectorized};
use phalanx_tensor::RowPositions;
use phalanx_tensor::operations::RotaryPositions;
use phalanx_tensor::rotary::ROTARY_FREQUENCIES_MAX;

use crate::elementwise::{by_lanes, load, store};
use crate::float::{Float, by_float};
use crate::shards::Shards;
use crate::{Cpu, row_grain};

/// Turns the first heads of each row by its position, in place.
pub(crate) fn rotary(cpu: &Cpu, call: RotaryPositions) {
    let RotaryPositions { x, rotary, heads, positions, inverse } = call;
    let ([batch, seq, width], count) = (x.dims(), rotary.frequencies().len());
    let scales = [rotary.scale(), if inverse { -rotary.scale() } else { rotary.scale() }];
    by_float!(x.dtype(), T => {
        let x = Shards::new(x.into_slice::<T>());
        cpu.over(seq, row_grain(batch * heads * rotary.rotated()), |rows| {
            let mut factors = [[0f32; ROTARY_FREQUENCIES_MAX]; 2];
            let [cos, sin] = factors.each_mut().map(|factors| &mut factors[..count]);
            for row in rows {
                let mut known = None;
                for sample in 0..batch {
                    let position = match positions {
                        RowPositions::From(first) => first + row,
                        RowPositions::Each(positions) => positions.as_slice::<u32>()[sample * seq + row] as usize,
                    };
                    if known != Some(position) {
                        turns(cpu.isa, rotary.frequencies(), position as f64, scales, cos, sin);
                        known = Some(position);
                    }
                    let at = (sample * seq + row) * width;
                    // SAFETY: rows do not overlap, and each is given to one thread by `over`.
                    let heads = unsafe { x.piece(at..at + heads * rotary.head_dim()) };
                    turn::<T>(cpu.isa, heads, rotary.head_dim(), cos, sin);
                }
            }
        });
    });
}

vectorized!(fn turns(frequencies: &[f64], position: f64, scales: [f64; 2], cos: &mut [f32], sin: &mut [f32]) = turns_body);
/// Cosine and sine of `position` times each frequency, times their scales, rounded once.
#[inline(always)]
#[expect(clippy::extra_unused_type_parameters, reason = "it names the instructions for which it is compiled")]
fn turns_body<L: Lanes>(
    frequencies: &[f64],
    position: f64,
    scales: [f64; 2],
    cos: &mut [f32],
    sin: &mut [f32],
) {
    for ((frequency, cos), sin) in frequencies.iter().zip(cos).zip(sin) {
        let [c, s] = cos_sin(position * frequency);
        (*cos, *sin) = ((scales[0] * c) as f32, (scales[1] * s) as f32);
    }
}

/// Cosine and sine of an angle of at least 0, 2e-16 off, or as far as the last bit of a large angle is: reduced by quarters of a
/// circle, and the polynomials of FreeBSD's `k_cos.c` and `k_sin.c`. There is no branch and no multiply-add, so that loops of it
/// are vectors, and have the same bits on every processor.
#[inline(always)]
fn cos_sin(angle: f64) -> [f64; 2] {
    // 1.5 * 2^52: adding it rounds to a whole number, which the lower bits then are.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // A quarter of a circle: its first 33 bits, so that up to 2^20 quarters are exact, and the rest.
    const QUARTER: [f64; 2] = [1.570_796_326_734_125_6, 6.077_100_506_506_192e-11];
    const COS: [f64; 6] = [
        -1.135_964_755_778_819_5e-11,
        2.087_572_321_298_175e-9,
        -2.755_731_435_139_066_3e-7,
        2.480_158_728_947_673e-5,
        -1.388_888_888_887_411e-3,
        4.166_666_666_666_66e-2,
    ];
    const SIN: [f64; 6] = [
        1.589_690_995_211_55e-10,
        -2.505_076_025_340_686_3e-8,
        2.755_731_370_707_006_8e-6,
        -1.984_126_982_985_795e-4,
        8.333_333_333_322_49e-3,
        -1.666_666_666_666_663_2e-1,
    ];
    let rounded = angle * std::f64::consts::FRAC_2_PI + ROUND;
    let (quarters, bits) = (rounded - ROUND, rounded.to_bits());
    let r = (angle - quarters * QUARTER[0]) - quarters * QUARTER[1];
    let z = r * r;
    let polynomial = |c: [f64; 6]| c[1..].iter().fold(c[0], |p, c| p * z + c);
    let cos = 1.0 - 0.5 * z + z * z * polynomial(COS);
    let sin = r + r * z * polynomial(SIN);
    // All ones in odd quarters, in which the two change places.
    let odd = (bits & 1).wrapping_neg();
    let swap = (cos.to_bits() ^ sin.to_bits()) & odd;
    // The cosine is negative in the second and third quarter, the sine in the last two.
    let sign = |of: f64, negative: u64| f64::from_bits(of.to_bits() ^ swap ^ ((negative & 2) << 62));
    [sign(cos, bits + 1), sign(sin, bits)]
}

vectorized!(fn turn<T: Float>(heads: &mut [T], head_dim: usize, cos: &[f32], sin: &[f32]) = turn_body);
#[inline(always)]
fn turn_body<L: Lanes, T: Float>(heads: &mut [T], head_dim: usize, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for head in heads.chunks_exact_mut(head_dim) {
        let (low, high) = head[..2 * half].split_at_mut(half);
        // SAFETY: compiled for L; all four are rows of `half` elements.
        unsafe {
            by_lanes!(half, |at, count| {
                let (a, b) = (load::<L, T>(low, at, count), load::<L, T>(high, at, count));
                let c = lanes::load::<L>(cos, at, count);
                let s = lanes::load::<L>(sin, at, count);
                let minus_b = L::sub(L::splat(0.0), b);
                store::<L, T>(low, at, L::mul_add(minus_b, s, L::mul(a, c)), count);
                store::<L, T>(high, at, L::mul_add(a, s, L::mul(b, c)), count);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::cos_sin;

    /// Angles of all quarters, near their borders, and of positions far beyond those of models.
    #[test]
    fn cosine_and_sine_are_those_of_the_library() {
        let quarters = (0..2000u32).map(|i| f64::from(i) * std::f64::consts::FRAC_PI_4);
        let small = (0..100_000u32).map(|i| f64::from(i) * 1.7e-3);
        let large = (0..100_000u32).map(|i| f64::from(i) * 10.123_456_7);
        for angle in quarters.chain(small).chain(large).chain([0.0, 1e-300, 1e-9, 1_048_575.0]) {
            let ([c, s], (sin, cos)) = (cos_sin(angle), angle.sin_cos());
            assert!(
                (c - cos).abs() <= 3e-16 && (s - sin).abs() <= 3e-16,
                "{angle}: {c}, {s}, not {cos}, {sin}"
            );
        }
        // Beyond 2^20 quarters: within the last bit of the angle.
        let angle = 1.234_567_89e9;
        let ([c, s], (sin, cos)) = (cos_sin(angle), angle.sin_cos());
        assert!((c - cos).abs() <= 3e-7 && (s - sin).abs() <= 3e-7, "{c}, {s}, not {cos}, {sin}");
    }
}
