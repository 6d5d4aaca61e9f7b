//! The hyperbolic tangent, forward and backward.

use phalanx_simd::{Lanes, lanes, vectorized};
use phalanx_tensor::operations::{TanhBackward, TanhForward};

use crate::elementwise::{by_lanes, load, store};
use crate::float::{Float, by_float};
use crate::{Cpu, GRAIN};

/// `y = tanh(x)` (overwrites).
pub(crate) fn tanh(cpu: &Cpu, TanhForward { x, y }: TanhForward) {
    by_float!(x.dtype(), T => {
        let x = x.as_slice::<T>();
        cpu.over_mut(y.into_slice::<T>(), GRAIN, |range, y| forward::<T>(cpu.isa, &x[range], y));
    });
}

vectorized!(fn forward<T: Float>(x: &[T], y: &mut [T]) = forward_body);
#[inline(always)]
fn forward_body<L: Lanes, T: Float>(x: &[T], y: &mut [T]) {
    assert_eq!(x.len(), y.len());
    // SAFETY: compiled for L; both slices have the same length.
    unsafe {
        by_lanes!(x.len(), |at, count| {
            store::<L, T>(y, at, lanes::tanh::<L>(load::<L, T>(x, at, count)), count);
        });
    }
}

/// `dy` becomes `dx = dy * (1 - y²)`.
pub(crate) fn tanh_backward(cpu: &Cpu, TanhBackward { y, dy }: TanhBackward) {
    by_float!(y.dtype(), T => {
        let y = y.as_slice::<T>();
        cpu.over_mut(dy.into_slice::<T>(), GRAIN, |range, dy| backward::<T>(cpu.isa, &y[range], dy));
    });
}

vectorized!(fn backward<T: Float>(y: &[T], dy: &mut [T]) = backward_body);
#[inline(always)]
fn backward_body<L: Lanes, T: Float>(y: &[T], dy: &mut [T]) {
    assert_eq!(y.len(), dy.len());
    // SAFETY: compiled for L; both slices have the same length.
    unsafe {
        by_lanes!(y.len(), |at, count| {
            let y = load::<L, T>(y, at, count);
            let slope = L::sub(L::splat(1.0), L::mul(y, y));
            store::<L, T>(dy, at, L::mul(load::<L, T>(dy, at, count), slope), count);
        });
    }
}
