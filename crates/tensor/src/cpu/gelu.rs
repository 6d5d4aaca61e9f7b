//! GELU, tanh form (Hendrycks and Gimpel, arXiv 1606.08415), forward and backward.
//!
//! `0.5 (1 + tanh u) = 1 / (1 + exp(-2u))`, so one exponential and one division make it; with
//! `u = sqrt(2/pi) (x + 0.044715 x³)`.

use super::lanes::{self, Lanes};
use super::simd::{exp, vectorized};
use super::{Cpu, GRAIN};

/// -2 sqrt(2/pi).
const SLOPE: f32 = -1.595_769_2;
const CUBE: f32 = 0.044_715;

/// `y = gelu(x)` (overwrites).
pub(super) fn gelu(cpu: &Cpu, x: &[f32], y: &mut [f32]) {
    cpu.over_mut(y, GRAIN, |range, y| forward(cpu.isa, &x[range], y));
}

vectorized!(fn forward(x: &[f32], y: &mut [f32]) = forward_body);
#[inline(always)]
fn forward_body<L: Lanes>(x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = *x / (1.0 + exp::<L>(argument::<L>(*x)));
    }
}

/// -2u.
#[inline(always)]
fn argument<L: Lanes>(x: f32) -> f32 {
    SLOPE * x * L::fused(CUBE * x, x, 1.0)
}

/// `gelu(x)` by lanes, with the arithmetic of the kernel.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
pub(super) unsafe fn gelu_lanes<L: Lanes>(x: L::V) -> L::V {
    // SAFETY: the caller's promise.
    unsafe {
        let cube = L::mul_add(L::mul(L::splat(CUBE), x), x, L::splat(1.0));
        let e = lanes::exp::<L>(L::mul(L::mul(L::splat(SLOPE), x), cube));
        L::div(x, L::add(L::splat(1.0), e))
    }
}

/// dy becomes `dx = dy * gelu'(x)` (in place).
pub(super) fn gelu_backward(cpu: &Cpu, x: &[f32], dy: &mut [f32]) {
    cpu.over_mut(dy, GRAIN, |range, dy| backward(cpu.isa, &x[range], dy));
}

vectorized!(fn backward(x: &[f32], dy: &mut [f32]) = backward_body);
/// With `e = exp(-2u)` and `s = 1 / (1 + e)`, so that `1 - s = e s` without cancellation:
/// `gelu'(x) = s + x s (e s) 2u'`, `2u' = 2 sqrt(2/pi) (1 + 3 * 0.044715 x²)`.
#[inline(always)]
fn backward_body<L: Lanes>(x: &[f32], dy: &mut [f32]) {
    for (dy, x) in dy.iter_mut().zip(x) {
        let x = *x;
        let u = argument::<L>(x);
        let e = exp::<L>(u);
        let s = 1.0 / (1.0 + e);
        let slope = -SLOPE * L::fused(3.0 * CUBE * x, x, 1.0);
        // Far out the bend is 0, but its factors are infinite.
        let bend = if u.abs() < 80.0 { x * s * (e * s) * slope } else { 0.0 };
        *dy *= s + bend;
    }
}
