//! Layer norm over the last dimension (Ba et al., arXiv 1607.06450), or over vectors among each row, forward and backward. RMS norm is
//! the same with a mean of 0.
//!
//! A row is read from memory once; its mean, its variance around that mean and the result are three
//! passes over the cache. Sums go through 16 lanes by position, so a row's result depends on the row alone.
#![allow(clippy::too_many_arguments, reason = "kernels take slices and numbers")]

use phalanx_simd::{Lanes, lanes, vectorized};
use phalanx_tensor::operations::{LayerNorm, LayerNormBackward, NormSums};
use phalanx_tensor::{RowNorm, WholeSums};

use crate::bias::sum_blocks;
use crate::elementwise::{by_lanes, load, store};
use crate::float::{Float, by_float};
use crate::shards::Shards;
use crate::{Cpu, row_grain};

/// Maximum number of rows per pass: the latency of one row's sum hides behind the next row.
const ROWS: usize = 4;

/// Rows per pass: as many as stay in L1.
fn rows_together(hidden: usize) -> usize {
    (4096 / hidden.max(1)).clamp(1, ROWS)
}

/// Sums that were added over the ranks, and the number of elements in each.
type Given<'a> = Option<(&'a [f32], usize)>;

/// `y = (x - mean) * rstd * gamma (+ beta)` per vector; x, y `[rows, columns]`, mean and rstd in f32 (overwrites).
pub(crate) fn layer_norm(cpu: &Cpu, call: LayerNorm) {
    let LayerNorm { x, gamma, beta, norm, squares, y, mean, rstd } = call;
    let ([rows, columns], hidden) = (x.shape().rows_cols(), gamma.elements());
    let squares = squares.map(|WholeSums { sums, elements }| (sums.as_slice::<f32>(), elements));
    let mean = mean.map(|mean| Shards::new(mean.into_slice::<f32>()));
    let rstd = Shards::new(rstd.into_slice::<f32>());
    by_float!(x.dtype(), T => {
        let (x, gamma, beta) = (x.as_slice::<T>(), gamma.as_slice(), beta.map(|beta| beta.as_slice()));
        let y = Shards::new(y.into_slice::<T>());
        cpu.over(rows, row_grain(norm.count * hidden), |rows| {
            for (flat, vectors) in norm.runs(rows, columns, hidden) {
                let squares = squares.map(|(sums, elements)| (&sums[vectors.clone()], elements));
                // SAFETY: row ranges are disjoint, and so are their pieces of y, mean and rstd.
                let (y, mean, rstd) = unsafe {
                    (y.piece(flat.clone()), mean.as_ref().map(|mean| mean.piece(vectors.clone())), rstd.piece(vectors))
                };
                forward_rows(cpu.isa, &x[flat], gamma, beta, norm, squares, y, mean, rstd);
            }
        });
    });
}

vectorized!(fn forward_rows<T: Float>(
    x: &[T], gamma: &[T], beta: Option<&[T]>, norm: RowNorm, squares: Given<'_>, y: &mut [T], mean: Option<&mut [f32]>,
    rstd: &mut [f32],
) = forward_rows_body);
#[inline(always)]
fn forward_rows_body<L: Lanes, T: Float>(
    x: &[T],
    gamma: &[T],
    beta: Option<&[T]>,
    norm: RowNorm,
    squares: Given<'_>,
    y: &mut [T],
    mut mean: Option<&mut [f32]>,
    rstd: &mut [f32],
) {
    let hidden = gamma.len();
    // SAFETY: compiled for L.
    let offset = unsafe { L::splat(norm.offset) };
    assert!(beta.is_none_or(|beta| beta.len() == hidden));
    let together = rows_together(hidden);
    let blocks = x.chunks(together * hidden).zip(y.chunks_mut(together * hidden));
    for (number, ((x, y), rstd)) in blocks.zip(rstd.chunks_mut(together)).enumerate() {
        let rows = || x.chunks_exact(hidden);
        let mut means = [0f32; ROWS];
        // SAFETY: compiled for L; all are rows of `hidden` elements.
        unsafe {
            if let Some(mean) = &mut mean {
                for (x, m) in rows().zip(&mut means) {
                    *m = lanes::sum_row!(L, hidden, |at, count| load::<L, T>(x, at, count)) / hidden as f32;
                }
                mean[number * together..][..rstd.len()].copy_from_slice(&means[..rstd.len()]);
            }
            if let Some((sums, elements)) = squares {
                for (r, sum) in rstd.iter_mut().zip(&sums[number * together..]) {
                    *r = 1.0 / (sum / elements as f32 + norm.eps).sqrt();
                }
            } else {
                for (x, (m, r)) in rows().zip(means.iter().zip(rstd.iter_mut())) {
                    let squares = lanes::sum_row!(L, hidden, |at, count| {
                        let d = L::sub(load::<L, T>(x, at, count), L::splat(*m));
                        L::mul(d, d)
                    });
                    *r = 1.0 / (squares / hidden as f32 + norm.eps).sqrt();
                }
            }
            for ((x, y), (m, r)) in rows().zip(y.chunks_exact_mut(hidden)).zip(means.iter().zip(rstd.iter()))
            {
                by_lanes!(hidden, |at, count| {
                    let n = L::mul(L::sub(load::<L, T>(x, at, count), L::splat(*m)), L::splat(*r));
                    let shift = beta.map_or(L::splat(0.0), |beta| load::<L, T>(beta, at, count));
                    let value = L::mul_add(n, L::add(load::<L, T>(gamma, at, count), offset), shift);
                    store::<L, T>(y, at, value, count);
                });
            }
        }
    }
}

/// Some rows of the input, and their statistics from forward.
#[derive(Clone, Copy)]
struct NormalizedRows<'a, T> {
    x: &'a [T],
    gamma: &'a [T],
    offset: f32,
    /// Sums of `d * x`.
    products: Given<'a>,
    /// None for RMS norm.
    mean: Option<&'a [f32]>,
    rstd: &'a [f32],
}

/// With `n = (x - mean) * rstd` and `d = dy * gamma`:
/// `dx (+)= rstd * (d - avg(d) - n * avg(d * n))`, `dgamma (+)= sum of dy * n`, `dbeta (+)= sum of dy`, where
/// they are wanted. RMS norm has a mean of 0, and no avg(d).
pub(crate) fn layer_norm_backward(cpu: &Cpu, call: LayerNormBackward) {
    let LayerNormBackward { x, gamma, norm, products, mean, rstd, dy, dx, gradients, .. } = call;
    let [accumulate_input, accumulate_parameters] = [call.accumulate_input, call.accumulate_parameters];
    let ([rows, columns], hidden) = (x.shape().rows_cols(), gamma.elements());
    let products = products.map(|WholeSums { sums, elements }| (sums.as_slice::<f32>(), elements));
    by_float!(dy.dtype(), T => {
        let (x, gamma, dy) = (x.as_slice::<T>(), gamma.as_slice(), dy.as_slice());
        let (mean, rstd) = (mean.map(|mean| mean.as_slice()), rstd.as_slice());
        let dx = Shards::new(dx.into_slice::<T>());
        sum_blocks(cpu, rows, hidden, gradients, accumulate_parameters, |isa, rows, [dgamma, dbeta]| {
            for (flat, vectors) in norm.runs(rows, columns, hidden) {
                let mean = mean.map(|mean| &mean[vectors.clone()]);
                let products = products.map(|(sums, elements)| (&sums[vectors.clone()], elements));
                let (x, rstd, offset) = (&x[flat.clone()], &rstd[vectors], norm.offset);
                let block = NormalizedRows { x, gamma, offset, products, mean, rstd };
                // SAFETY: blocks of rows are disjoint.
                let dx = unsafe { dx.piece(flat.clone()) };
                backward_rows(isa, block, &dy[flat], dx, accumulate_input, dgamma, dbeta);
            }
        });
    });
}

vectorized!(fn backward_rows<T: Float>(
    saved: NormalizedRows<'_, T>, dy: &[T], dx: &mut [T], accumulate: bool, dgamma: &mut [f32], dbeta: &mut [f32],
) = backward_rows_body);
#[inline(always)]
fn backward_rows_body<L: Lanes, T: Float>(
    saved: NormalizedRows<'_, T>,
    dy: &[T],
    dx: &mut [T],
    accumulate: bool,
    dgamma: &mut [f32],
    dbeta: &mut [f32],
) {
    let NormalizedRows { x, gamma, offset, products, mean, rstd } = saved;
    let hidden = gamma.len();
    // SAFETY: compiled for L.
    let offset = unsafe { L::splat(offset) };
    assert_eq!([dgamma.len(), dbeta.len()], [hidden; 2]);
    let together = rows_together(hidden);
    let (x, dy) = (x.chunks(together * hidden), dy.chunks(together * hidden));
    let blocks = x.zip(dy).zip(dx.chunks_mut(together * hidden));
    for (number, (((x, dy), dx), rstd)) in blocks.zip(rstd.chunks(together)).enumerate() {
        let mut means = [0f32; ROWS];
        if let Some(mean) = mean {
            means[..rstd.len()].copy_from_slice(&mean[number * together..][..rstd.len()]);
        }
        let rows = || x.chunks_exact(hidden).zip(dy.chunks_exact(hidden)).zip(means.iter().zip(rstd));
        // For each row: -rstd * avg(d) and -rstd * avg(d * n).
        let mut averages = [[0f32; 2]; ROWS];
        // SAFETY: compiled for L; all are rows of `hidden` elements.
        unsafe {
            if let Some((sums, elements)) = products {
                for ((r, sum), averages) in rstd.iter().zip(&sums[number * together..]).zip(&mut averages) {
                    *averages = [0.0, -r / elements as f32 * r * sum];
                }
            }
            for (((x, dy), (m, r)), averages) in rows().zip(&mut averages).filter(|_| products.is_none()) {
                let (m, mut sum_d, mut sum_dn) = (L::splat(*m), L::splat(0.0), L::splat(0.0));
                by_lanes!(hidden, |at, count| {
                    // Lanes beyond the row add 0, because their d is 0.
                    let weight = L::add(load::<L, T>(gamma, at, count), offset);
                    let d = L::mul(load::<L, T>(dy, at, count), weight);
                    sum_d = L::add(sum_d, d);
                    sum_dn = L::mul_add(d, L::sub(load::<L, T>(x, at, count), m), sum_dn);
                });
                let scale = -r / hidden as f32;
                let shift = if mean.is_some() { scale * lanes::sum::<L>(sum_d) } else { 0.0 };
                *averages = [shift, scale * r * lanes::sum::<L>(sum_dn)];
            }
            for ((((x, dy), (m, r)), averages), dx) in rows().zip(&averages).zip(dx.chunks_exact_mut(hidden))
            {
                let (m, r) = (L::splat(*m), L::splat(*r));
                let (shift, slope) = (L::splat(averages[0]), L::splat(averages[1]));
                by_lanes!(hidden, |at, count| {
                    let n = L::mul(L::sub(load::<L, T>(x, at, count), m), r);
                    let dy = load::<L, T>(dy, at, count);
                    let d = L::mul(dy, L::add(load::<L, T>(gamma, at, count), offset));
                    let mut value = L::mul_add(n, slope, L::mul_add(r, d, shift));
                    if accumulate {
                        value = L::add(load::<L, T>(dx, at, count), value);
                    }
                    store::<L, T>(dx, at, value, count);
                    let sum = L::mul_add(dy, n, lanes::load::<L>(dgamma, at, count));
                    lanes::store::<L>(dgamma, at, sum, count);
                    let sum = L::add(lanes::load::<L>(dbeta, at, count), dy);
                    lanes::store::<L>(dbeta, at, sum, count);
                });
            }
        }
    }
}

/// `sums = sum of x²` of each vector, or with dy `sum of x (gamma + offset) dy` (overwrites).
pub(crate) fn norm_sums(cpu: &Cpu, call: NormSums) {
    let NormSums { x, gamma, norm, dy, sums } = call;
    let ([rows, columns], hidden) = (x.shape().rows_cols(), gamma.elements());
    let sums = Shards::new(sums.into_slice::<f32>());
    by_float!(x.dtype(), T => {
        let (x, gamma, dy) = (x.as_slice::<T>(), gamma.as_slice::<T>(), dy.map(|dy| dy.as_slice::<T>()));
        cpu.over(rows, row_grain(norm.count * hidden), |rows| {
            for (flat, vectors) in norm.runs(rows, columns, hidden) {
                // SAFETY: row ranges are disjoint.
                let sums = unsafe { sums.piece(vectors) };
                row_sums(cpu.isa, &x[flat.clone()], gamma, norm.offset, dy.map(|dy| &dy[flat]), sums);
            }
        });
    });
}

vectorized!(fn row_sums<T: Float>(
    x: &[T], gamma: &[T], offset: f32, dy: Option<&[T]>, sums: &mut [f32],
) = row_sums_body);
#[inline(always)]
fn row_sums_body<L: Lanes, T: Float>(x: &[T], gamma: &[T], offset: f32, dy: Option<&[T]>, sums: &mut [f32]) {
    let hidden = gamma.len();
    // SAFETY: compiled for L.
    let offset = unsafe { L::splat(offset) };
    for (row, sum) in sums.iter_mut().enumerate() {
        let at = row * hidden..(row + 1) * hidden;
        let (x, dy) = (&x[at.clone()], dy.map(|dy| &dy[at]));
        // SAFETY: compiled for L; all are rows of `hidden` elements.
        *sum = unsafe {
            lanes::sum_row!(L, hidden, |at, count| {
                let x = load::<L, T>(x, at, count);
                let other = dy.map_or(x, |dy| {
                    let weight = L::add(load::<L, T>(gamma, at, count), offset);
                    L::mul(load::<L, T>(dy, at, count), weight)
                });
                L::mul(x, other)
            })
        };
    }
}
