//! GELU (Hendrycks and Gimpel, arXiv 1606.08415), forward and backward, in both forms.
//!
//! The tanh form: `0.5 (1 + tanh u) = 1 / (1 + exp(-2u))`, so one power of two and one division make it; with
//! `u = sqrt(2/pi) (x + 0.044715 x³)`. The erf form is `x` times the normal distribution up to x: with the upper
//! tail `Q(a) = exp(-a²/2) M(a)` of `a = |x|`, where M is smooth and positive, it is `max(x, 0) - a Q(a)`, in
//! which nothing cancels far out. Backward sums its result over rows as it goes, because a GELU's input has a
//! bias ([`bias`](crate::bias)).

use phalanx_simd::{Lanes, lanes, vectorized};
use phalanx_tensor::arguments::Gelu;
use phalanx_tensor::operations::GeluBackward;
use phalanx_tensor::{View, ViewMut};

use crate::bias::sum_blocks;
use crate::elementwise::{by_lanes, load, store};
use crate::float::{Float, by_float};
use crate::shards::Shards;
use crate::{Cpu, GRAIN};

/// -2 sqrt(2/pi), and the same divided by ln 2 as an exponent of 2.
const SLOPE: f32 = -1.595_769_2;
const SLOPE2: f32 = -2.302_208_2;
const CUBE: f32 = 0.044_715;

/// 1 / sqrt(2 pi): the normal density at 0.
const DENSITY: f32 = 0.398_942_3;

/// A formula of GELU, or of another function of one number, lane by lane.
///
/// # Safety
/// All functions: compiled for `L`.
pub(crate) trait Formula {
    /// `f(x)`
    unsafe fn value<L: Lanes>(x: L::V) -> L::V;
    /// `f'(x)`
    unsafe fn slope<L: Lanes>(x: L::V) -> L::V;
}

/// The formula of [`Gelu::Tanh`].
pub(crate) struct Tanh;
/// The formula of [`Gelu::Erf`].
pub(crate) struct Erf;

/// Runs `$body` with `$F` the type of the formula.
macro_rules! by_form {
    ($gelu:expr, $F:ident => $body:expr) => {
        match $gelu {
            Gelu::Tanh => {
                type $F = crate::gelu::Tanh;
                $body
            }
            Gelu::Erf => {
                type $F = crate::gelu::Erf;
                $body
            }
        }
    };
}
pub(crate) use by_form;

/// `y = gelu(x)` (overwrites).
pub(crate) fn gelu(cpu: &Cpu, x: View, gelu: Gelu, y: ViewMut) {
    by_float!(x.dtype(), T => by_form!(gelu, F => {
        let x = x.as_slice::<T>();
        cpu.over_mut(y.into_slice::<T>(), GRAIN, |range, y| forward::<T, F>(cpu.isa, &x[range], y));
    }));
}

vectorized!(fn forward<T: Float, F: Formula>(x: &[T], y: &mut [T]) = forward_body);
#[inline(always)]
fn forward_body<L: Lanes, T: Float, F: Formula>(x: &[T], y: &mut [T]) {
    assert_eq!(x.len(), y.len());
    // SAFETY: compiled for L; both slices have the same length.
    unsafe {
        by_lanes!(x.len(), |at, count| {
            store::<L, T>(y, at, F::value::<L>(load::<L, T>(x, at, count)), count);
        });
    }
}

impl Formula for Tanh {
    #[inline(always)]
    unsafe fn value<L: Lanes>(x: L::V) -> L::V {
        // SAFETY: the caller's promise.
        unsafe {
            // Below the bounds, e adds nothing to 1; above, it is infinite. The bounds are the first operands, so that
            // NaN stays NaN.
            let v = exponent::<L>(x, L::mul(x, x));
            let v = L::max(L::splat(-126.0), L::min(L::splat(128.0), v));
            L::div(x, L::add(L::splat(1.0), power::<L>(v)))
        }
    }

    /// With `e = exp(-2u)` and `s = 1 / (1 + e)`, so that `1 - s = e s` without cancellation:
    /// `gelu'(x) = s + x s (e s) 2u'`, `2u' = 2 sqrt(2/pi) (1 + 3 * 0.044715 x²)`.
    #[inline(always)]
    unsafe fn slope<L: Lanes>(x: L::V) -> L::V {
        // SAFETY: the caller's promise.
        unsafe {
            // Outside the bounds the slope is 0 or 1 up to 2e-31, but its factors are infinite. The bounds are the
            // first operands, so that NaN stays NaN.
            let x = L::max(L::splat(-9.5), L::min(L::splat(9.5), x));
            let (one, x_squared) = (L::splat(1.0), L::mul(x, x));
            let e = power::<L>(exponent::<L>(x, x_squared));
            let s = L::div(one, L::add(one, e));
            let slope = L::mul_add(x_squared, L::splat(-3.0 * CUBE * SLOPE), L::splat(-SLOPE));
            L::mul(s, L::mul_add(L::mul(e, s), L::mul(x, slope), one))
        }
    }
}

/// The v for which `2^v = exp(-2u)`.
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
        // The comparison is false in every lane.
        L::scale2(p, whole, L::splat(0.0), L::splat(0.0))
    }
}

/// `a = |x|`, at most 14, where its tail is below 1e-44; with `exp(-a²/2)` and `M(a)`, which the module describes. M is
/// half of the scaled complementary error function of `a / sqrt(2)`, and this quotient of polynomials, fitted for
/// the smallest maximum relative error on [0, 14], is 6e-9 off. All of its terms are positive.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
unsafe fn tail<L: Lanes>(x: L::V) -> [L::V; 3] {
    // SAFETY: the caller's promise.
    unsafe {
        // The bounds are the first operands, so that NaN stays NaN.
        let a = L::min(L::splat(14.0), L::max(x, L::sub(L::splat(0.0), x)));
        let mut above = L::splat(4.077_616e-3);
        for c in [4.037_258_4e-2, 0.182_461_9, 0.437_250_97, 0.5] {
            above = L::mul_add(above, a, L::splat(c));
        }
        let mut below = L::splat(1.022_093_9e-2);
        for c in [0.101_205_87, 0.467_429_28, 1.199_291, 1.672_386_9, 1.0] {
            below = L::mul_add(below, a, L::splat(c));
        }
        let e = lanes::exp::<L>(L::mul(L::splat(-0.5), L::mul(a, a)));
        [a, e, L::div(above, below)]
    }
}

impl Formula for Erf {
    /// `max(x, 0) - a Q(a)`
    #[inline(always)]
    unsafe fn value<L: Lanes>(x: L::V) -> L::V {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, e, m] = tail::<L>(x);
            L::sub(L::max(L::splat(0.0), x), L::mul(a, L::mul(e, m)))
        }
    }

    /// With `d = exp(-a²/2) (a / sqrt(2 pi) - M(a))`: `1 + d` above zero, `-d` below.
    #[inline(always)]
    unsafe fn slope<L: Lanes>(x: L::V) -> L::V {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, e, m] = tail::<L>(x);
            let d = L::mul(e, L::sub(L::mul(a, L::splat(DENSITY)), m));
            // 1 above zero, 0 below.
            let above = L::scale2(L::splat(1.0), L::splat(0.0), x, L::splat(0.0));
            let sign = L::mul_add(above, L::splat(2.0), L::splat(-1.0));
            L::mul_add(sign, d, above)
        }
    }
}

/// Replaces dy by `dx = dy * gelu'(x)`; `db (+)= sum over rows of dx` before rounding, where it is wanted. x, dy `[rows, width]`,
/// db `[width]`.
pub(crate) fn gelu_backward(cpu: &Cpu, call: GeluBackward) {
    let GeluBackward { x, gelu, dy, db, accumulate } = call;
    let [rows, width] = x.shape().rows_cols();
    by_float!(x.dtype(), T => by_form!(gelu, F => {
        let x = x.as_slice::<T>();
        let dy = Shards::new(dy.into_slice::<T>());
        sum_blocks(cpu, rows, width, [db], accumulate, |isa, rows, [sums]| {
            let flat = rows.start * width..rows.end * width;
            // SAFETY: blocks of rows are disjoint.
            let dy = unsafe { dy.piece(flat.clone()) };
            backward_rows::<T, F>(isa, &x[flat], dy, sums);
        });
    }));
}

vectorized!(fn backward_rows<T: Float, F: Formula>(x: &[T], dy: &mut [T], sums: &mut [f32]) = backward_body);
#[inline(always)]
fn backward_body<L: Lanes, T: Float, F: Formula>(x: &[T], dy: &mut [T], sums: &mut [f32]) {
    let width = sums.len();
    for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact_mut(width)) {
        // SAFETY: compiled for L; all are rows of `width` elements.
        unsafe {
            by_lanes!(width, |at, count| {
                let slope = F::slope::<L>(load::<L, T>(x, at, count));
                let dx = L::mul(load::<L, T>(dy, at, count), slope);
                store::<L, T>(dy, at, dx, count);
                lanes::store::<L>(sums, at, L::add(lanes::load::<L>(sums, at, count), dx), count);
            });
        }
    }
}
