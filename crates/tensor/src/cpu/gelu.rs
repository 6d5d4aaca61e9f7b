//! GELU, tanh form (Hendrycks and Gimpel, arXiv 1606.08415), forward and backward.
//!
//! `0.5 (1 + tanh u) = 1 / (1 + exp(-2u))`, so one power of two and one division make it; with
//! `u = sqrt(2/pi) (x + 0.044715 x³)`. Backward sums its result over rows as it goes, because a GELU's input
//! has a bias: see [`bias`](super::bias).

use super::bias::sum_blocks;
use super::elementwise::{by_lanes, load, store};
use super::lanes::{self, Lanes};
use super::number::{Number, by_float};
use super::shards::Shards;
use super::simd::vectorized;
use super::{Cpu, GRAIN};
use crate::buffer::{View, ViewMut};

/// -2 sqrt(2/pi), and as an exponent of two: over ln 2.
const SLOPE: f32 = -1.595_769_2;
const SLOPE2: f32 = -2.302_208_2;
const CUBE: f32 = 0.044_715;

/// `y = gelu(x)` (overwrites).
pub(super) fn gelu(cpu: &Cpu, x: View, y: ViewMut) {
    by_float!(x.dtype(), T => {
        let x = x.as_slice::<T>();
        cpu.over_mut(y.into_slice::<T>(), GRAIN, |range, y| forward(cpu.isa, &x[range], y));
    });
}

vectorized!(fn forward<T: Number>(x: &[T], y: &mut [T]) = forward_body);
#[inline(always)]
fn forward_body<L: Lanes, T: Number>(x: &[T], y: &mut [T]) {
    assert_eq!(x.len(), y.len());
    // SAFETY: compiled for L; both are as long as said.
    unsafe {
        by_lanes!(x.len(), |at, count| {
            store::<L, T>(y, at, gelu_lanes::<L>(load::<L, T>(x, at, count)), count);
        });
    }
}

/// `gelu(x)`, lane by lane: the arithmetic of [`gelu`], for kernels that end in it.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
pub(super) unsafe fn gelu_lanes<L: Lanes>(x: L::V) -> L::V {
    // SAFETY: the caller's promise.
    unsafe {
        // Below, e adds nothing to 1; above, it is infinite. The bounds come first, so that what is not a
        // number stays so.
        let v = exponent::<L>(x, L::mul(x, x));
        let v = L::max(L::splat(-126.0), L::min(L::splat(128.0), v));
        L::div(x, L::add(L::splat(1.0), power::<L>(v)))
    }
}

/// v, where `2^v = exp(-2u)`.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
unsafe fn exponent<L: Lanes>(x: L::V, x_squared: L::V) -> L::V {
    // SAFETY: the caller's promise.
    unsafe { L::mul(x, L::mul_add(x_squared, L::splat(CUBE * SLOPE2), L::splat(SLOPE2))) }
}

/// `2^v` for v in [-126, 128]: a polynomial for the fraction (Cephes' exp2f, 2e-8 off), then the whole part.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
unsafe fn power<L: Lanes>(v: L::V) -> L::V {
    // SAFETY: the caller's promise.
    unsafe {
        // 1.5 * 2^23: adding it rounds to a whole number.
        let round = L::splat(12_582_912.0);
        let whole = L::sub(L::add(v, round), round);
        let fraction = L::sub(v, whole);
        let mut p = L::splat(1.535_336_2e-4);
        for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 0.240_226_48, std::f32::consts::LN_2, 1.0] {
            p = L::mul_add(p, fraction, L::splat(c));
        }
        // No lane is below what it is held against.
        L::scale2(p, whole, L::splat(0.0), L::splat(0.0))
    }
}

/// In place: dy becomes `dx = dy * gelu'(x)`; `db (+)= sum over rows of dx`, before it is rounded. x, dy
/// `[rows, width]`, db `[width]`.
pub(super) fn gelu_backward(cpu: &Cpu, x: View, dy: ViewMut, db: ViewMut, accumulate: bool) {
    let [rows, width] = x.shape().rows_cols();
    by_float!(x.dtype(), T => {
        let x = x.as_slice::<T>();
        let dy = Shards::new(dy.into_slice::<T>());
        sum_blocks(cpu, rows, width, [db], accumulate, |isa, rows, [sums]| {
            let flat = rows.start * width..rows.end * width;
            // SAFETY: blocks of rows are disjoint.
            let dy = unsafe { dy.piece(flat.clone()) };
            backward_rows(isa, &x[flat], dy, sums);
        });
    });
}

vectorized!(fn backward_rows<T: Number>(x: &[T], dy: &mut [T], sums: &mut [f32]) = backward_body);
#[inline(always)]
fn backward_body<L: Lanes, T: Number>(x: &[T], dy: &mut [T], sums: &mut [f32]) {
    let width = sums.len();
    for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact_mut(width)) {
        // SAFETY: compiled for L; all are rows of `width` numbers.
        unsafe {
            by_lanes!(width, |at, count| {
                let slope = slope_lanes::<L>(load::<L, T>(x, at, count));
                let dx = L::mul(load::<L, T>(dy, at, count), slope);
                store::<L, T>(dy, at, dx, count);
                lanes::store::<L>(sums, at, L::add(lanes::load::<L>(sums, at, count), dx), count);
            });
        }
    }
}

/// With `e = exp(-2u)` and `s = 1 / (1 + e)`, so that `1 - s = e s` without cancellation:
/// `gelu'(x) = s + x s (e s) 2u'`, `2u' = 2 sqrt(2/pi) (1 + 3 * 0.044715 x²)`.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
unsafe fn slope_lanes<L: Lanes>(x: L::V) -> L::V {
    // SAFETY: the caller's promise.
    unsafe {
        // Farther out it is 0 or 1 up to 2e-31, but its factors are infinite. The bounds come first, so that
        // what is not a number stays so.
        let x = L::max(L::splat(-9.5), L::min(L::splat(9.5), x));
        let (one, x_squared) = (L::splat(1.0), L::mul(x, x));
        let e = power::<L>(exponent::<L>(x, x_squared));
        let s = L::div(one, L::add(one, e));
        let slope = L::mul_add(x_squared, L::splat(-3.0 * CUBE * SLOPE), L::splat(-SLOPE));
        L::mul(s, L::mul_add(L::mul(e, s), L::mul(x, slope), one))
    }
}
