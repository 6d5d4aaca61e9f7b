//! Gated activations (Shazeer, arXiv 2002.05202), forward and backward: `y = f(gate) * up`, where a row is first all gates and then
//! what they let through. f is SiLU, `x / (1 + exp(-x))`, or a form of GELU ([`gelu`](crate::gelu)).

use phalanx_simd::{Lanes, lanes, vectorized};
use phalanx_tensor::arguments::{Gate, Gelu};
use phalanx_tensor::operations::{Gated, GatedBackward};

use crate::elementwise::{by_lanes, load, store};
use crate::float::{Float, by_float};
use crate::gelu::{Formula, by_form};
use crate::shards::Shards;
use crate::{Cpu, row_grain};

/// The formula of [`Gate::Silu`].
struct Silu;

impl Formula for Silu {
    #[inline(always)]
    unsafe fn value<L: Lanes>(x: L::V) -> L::V {
        // SAFETY: the caller's promise.
        unsafe {
            let e = lanes::exp::<L>(L::sub(L::splat(0.0), x));
            L::div(x, L::add(L::splat(1.0), e))
        }
    }

    /// With `e = exp(-x)` and `s = 1 / (1 + e)`, so that `1 - s = e s` without cancellation: `f'(x) = s + x s (e s)`.
    #[inline(always)]
    unsafe fn slope<L: Lanes>(x: L::V) -> L::V {
        // SAFETY: the caller's promise.
        unsafe {
            // Outside the bounds the slope is 0 or 1 up to 2e-36, but its factors are infinite. The bounds are the first
            // operands, so that NaN stays NaN.
            let x = L::max(L::splat(-87.0), L::min(L::splat(87.0), x));
            let one = L::splat(1.0);
            let e = lanes::exp::<L>(L::sub(L::splat(0.0), x));
            let s = L::div(one, L::add(one, e));
            L::mul(s, L::mul_add(L::mul(e, s), x, one))
        }
    }
}

/// Runs `$body` with `$F` the type of the formula.
macro_rules! by_gate {
    ($gate:expr, $F:ident => $body:expr) => {
        match $gate {
            Gate::Silu => {
                type $F = Silu;
                $body
            }
            Gate::Gelu(gelu) => by_form!(gelu, $F => $body),
        }
    };
}

/// `y = f(gate) * up` (overwrites). x `[.., 2 m]`, y `[.., m]`.
pub(crate) fn gated(cpu: &Cpu, call: Gated) {
    let Gated { x, gate, y } = call;
    let [rows, columns] = y.shape().rows_cols();
    by_float!(x.dtype(), T => by_gate!(gate, F => {
        let (x, y) = (x.as_slice::<T>(), Shards::new(y.into_slice::<T>()));
        cpu.over(rows, row_grain(columns), |rows| {
            for row in rows {
                let at = row * columns;
                // SAFETY: rows do not overlap, and each is given to one thread by `over`.
                let y = unsafe { y.piece(at..at + columns) };
                forward::<T, F>(cpu.isa, &x[2 * at..][..2 * columns], y);
            }
        });
    }));
}

vectorized!(fn forward<T: Float, F: Formula>(x: &[T], y: &mut [T]) = forward_body);
#[inline(always)]
fn forward_body<L: Lanes, T: Float, F: Formula>(x: &[T], y: &mut [T]) {
    let (gate, up) = x.split_at(y.len());
    // SAFETY: compiled for L; all three have the length of y.
    unsafe {
        by_lanes!(y.len(), |at, count| {
            let value = F::value::<L>(load::<L, T>(gate, at, count));
            store::<L, T>(y, at, L::mul(value, load::<L, T>(up, at, count)), count);
        });
    }
}

/// x becomes dx: `dy * up * f'(gate)`, and behind it `dy * f(gate)`. x `[.., 2 m]`, dy `[.., m]`.
pub(crate) fn gated_backward(cpu: &Cpu, call: GatedBackward) {
    let GatedBackward { x, gate, dy } = call;
    let [rows, columns] = dy.shape().rows_cols();
    by_float!(dy.dtype(), T => by_gate!(gate, F => {
        let (dy, x) = (dy.as_slice::<T>(), Shards::new(x.into_slice::<T>()));
        cpu.over(rows, row_grain(columns), |rows| {
            for row in rows {
                let at = row * columns;
                // SAFETY: rows do not overlap, and each is given to one thread by `over`.
                let x = unsafe { x.piece(2 * at..2 * (at + columns)) };
                backward::<T, F>(cpu.isa, x, &dy[at..][..columns]);
            }
        });
    }));
}

vectorized!(fn backward<T: Float, F: Formula>(x: &mut [T], dy: &[T]) = backward_body);
#[inline(always)]
fn backward_body<L: Lanes, T: Float, F: Formula>(x: &mut [T], dy: &[T]) {
    let (gate, up) = x.split_at_mut(dy.len());
    // SAFETY: compiled for L; all three have the length of dy.
    unsafe {
        by_lanes!(dy.len(), |at, count| {
            let (g, dy) = (load::<L, T>(gate, at, count), load::<L, T>(dy, at, count));
            let dgate = L::mul(L::mul(dy, load::<L, T>(up, at, count)), F::slope::<L>(g));
            store::<L, T>(up, at, L::mul(dy, F::value::<L>(g)), count);
            store::<L, T>(gate, at, dgate, count);
        });
    }
}
