//! Dropout (Srivastava et al., 2014), with an optional residual: bound by memory, because the mask is made
//! where it is needed ([`random`](crate::random)) and never stored.

use std::ops::Range;

use phalanx_simd::{Lanes, vectorized};
use phalanx_tensor::operations::DropoutForward;

use crate::elementwise::{by_lanes, load, store};
use crate::float::{Float, by_float};
use crate::random::DropoutMask;
use crate::shards::Shards;
use crate::{Cpu, GRAIN, row_grain};

/// `to = from * factor (+ residual)` with the factors of [`DropoutMask`] (overwrites).
pub(crate) fn dropout(cpu: &Cpu, call: DropoutForward) {
    let DropoutForward { from, dropout, row, residual, to } = call;
    let (keep, [rows, columns]) = (DropoutMask::new(dropout), from.shape().rows_cols());
    by_float!(from.dtype(), T => {
        let (from, residual) = (from.as_slice::<T>(), residual.map(|r| r.as_slice::<T>()));
        let piece = |first: u64, range: Range<usize>, to: &mut [T]| {
            drop_piece(cpu.isa, keep, first, &from[range.clone()], residual.map(|r| &r[range]), to);
        };
        let to = to.into_slice::<T>();
        if row == 0 || row == columns {
            return cpu.over_mut(to, GRAIN, |range, to| piece(range.start as u64, range, to));
        }
        let to = Shards::new(to);
        cpu.over(rows, row_grain(columns), |some| {
            for number in some {
                let range = number * columns..(number + 1) * columns;
                // SAFETY: rows are disjoint.
                piece((number * row) as u64, range.clone(), unsafe { to.piece(range) });
            }
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
