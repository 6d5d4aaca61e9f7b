//! Dropout (Srivastava et al., 2014), with an optional residual: bound by memory, because the mask is made
//! where it is needed ([`random`](crate::random)) and never stored.

use phalanx_simd::{Lanes, vectorized};
use phalanx_tensor::arguments::Dropout;
use phalanx_tensor::{View, ViewMut};

use crate::elementwise::{by_lanes, load, store};
use crate::float::{Float, by_float};
use crate::random::DropoutMask;
use crate::{Cpu, GRAIN};

/// `to = from * factor (+ residual)` with the factors of [`DropoutMask`] (overwrites).
pub(crate) fn dropout(cpu: &Cpu, from: View, dropout: Dropout, residual: Option<View>, to: ViewMut) {
    let keep = DropoutMask::new(dropout);
    by_float!(from.dtype(), T => {
        let (from, residual) = (from.as_slice::<T>(), residual.map(|r| r.as_slice::<T>()));
        cpu.over_mut(to.into_slice::<T>(), GRAIN, |range, to| {
            let first = range.start as u64;
            drop_piece(cpu.isa, keep, first, &from[range.clone()], residual.map(|r| &r[range]), to);
        });
    });
}

vectorized!(fn drop_piece<T: Float>(
    keep: DropoutMask, first: u64, from: &[T], residual: Option<&[T]>, to: &mut [T],
) = drop_body);
#[inline(always)]
fn drop_body<L: Lanes, T: Float>(
    keep: DropoutMask,
    first: u64,
    from: &[T],
    residual: Option<&[T]>,
    to: &mut [T],
) {
    assert_eq!(from.len(), to.len());
    assert!(residual.is_none_or(|r| r.len() == to.len()));
    // SAFETY: compiled for L; all slices have the same length.
    unsafe {
        by_lanes!(to.len(), |at, count| {
            let factors = keep.factors::<L>(first + at as u64);
            // Not fused, so that every instruction set gives the same bits.
            let mut x = L::mul(load::<L, T>(from, at, count), factors);
            if let Some(residual) = residual {
                x = L::add(x, load::<L, T>(residual, at, count));
            }
            store::<L, T>(to, at, x, count);
        });
    }
}
