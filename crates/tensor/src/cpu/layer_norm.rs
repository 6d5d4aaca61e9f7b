//! Layer norm over the last dimension (Ba et al., arXiv 1607.06450), forward and backward.
//!
//! A row is read from memory once; its mean, its variance around that mean and the result are three
//! passes over the cache. Sums go through 16 lanes by position, so a row's result depends on the row alone.

use super::bias::sum_blocks;
use super::lanes::{self, Lanes};
use super::shards::Shards;
use super::simd::vectorized;
use super::{Cpu, row_grain};

/// `y = (x - mean) * rstd * gamma + beta` by rows; x, y `[rows, hidden]`, statistics (mean, rstd) `[rows]`.
/// All overwritten.
pub(super) fn layer_norm(
    cpu: &Cpu,
    x: &[f32],
    [gamma, beta]: [&[f32]; 2],
    eps: f32,
    y: &mut [f32],
    [mean, rstd]: [&mut [f32]; 2],
) {
    let hidden = gamma.len();
    let rows = mean.len();
    let (y, mean, rstd) = (Shards::new(y), Shards::new(mean), Shards::new(rstd));
    cpu.over(rows, row_grain(hidden), |rows| {
        let flat = rows.start * hidden..rows.end * hidden;
        // SAFETY: row ranges are disjoint, and so are their pieces of y, mean and rstd.
        let (y, mean, rstd) = unsafe { (y.piece(flat.clone()), mean.piece(rows.clone()), rstd.piece(rows)) };
        forward_rows(cpu.isa, &x[flat], gamma, beta, eps, y, mean, rstd);
    });
}

vectorized!(fn forward_rows(
    x: &[f32], gamma: &[f32], beta: &[f32], eps: f32, y: &mut [f32], mean: &mut [f32], rstd: &mut [f32],
) = forward_rows_body);
#[inline(always)]
fn forward_rows_body<L: Lanes>(
    x: &[f32],
    gamma: &[f32],
    beta: &[f32],
    eps: f32,
    y: &mut [f32],
    mean: &mut [f32],
    rstd: &mut [f32],
) {
    let hidden = gamma.len();
    let rows = x.chunks_exact(hidden).zip(y.chunks_exact_mut(hidden));
    for ((x, y), (mean, rstd)) in rows.zip(mean.iter_mut().zip(rstd)) {
        // SAFETY: compiled for L; x is a row of `hidden` numbers.
        let (m, variance) = unsafe {
            let m = lanes::sum_row!(L, hidden, |at, count| lanes::load::<L>(x, at, count)) / hidden as f32;
            let squares = lanes::sum_row!(L, hidden, |at, count| {
                let d = L::sub(lanes::load::<L>(x, at, count), L::splat(m));
                L::mul(d, d)
            });
            (m, squares / hidden as f32)
        };
        let r = 1.0 / (variance + eps).sqrt();
        for ((y, x), (g, b)) in y.iter_mut().zip(x).zip(gamma.iter().zip(beta)) {
            *y = L::fused((x - m) * r, *g, *b);
        }
        *mean = m;
        *rstd = r;
    }
}

/// What forward kept. x `[rows, hidden]`, gamma `[hidden]`, mean, rstd `[rows]`.
#[derive(Clone, Copy)]
pub(super) struct Saved<'a> {
    pub(super) x: &'a [f32],
    pub(super) gamma: &'a [f32],
    pub(super) mean: &'a [f32],
    pub(super) rstd: &'a [f32],
}

/// With `n = (x - mean) * rstd` and `d = dy * gamma`:
/// `dx (+)= rstd * (d - avg(d) - n * avg(d * n))`, `dgamma (+)= sum of dy * n`, `dbeta (+)= sum of dy`.
pub(super) fn layer_norm_backward(
    cpu: &Cpu,
    saved: Saved,
    dy: &[f32],
    dx: &mut [f32],
    accumulate_input: bool,
    parameters: [&mut [f32]; 2],
    accumulate_parameters: bool,
) {
    let hidden = saved.gamma.len();
    let dx = Shards::new(dx);
    sum_blocks(
        cpu,
        saved.mean.len(),
        hidden,
        parameters,
        accumulate_parameters,
        |isa, rows, [dgamma, dbeta]| {
            let flat = rows.start * hidden..rows.end * hidden;
            let block = Saved {
                x: &saved.x[flat.clone()],
                gamma: saved.gamma,
                mean: &saved.mean[rows.clone()],
                rstd: &saved.rstd[rows],
            };
            // SAFETY: blocks of rows are disjoint.
            let dx = unsafe { dx.piece(flat.clone()) };
            backward_rows(isa, block, &dy[flat], dx, accumulate_input, dgamma, dbeta);
        },
    );
}

vectorized!(fn backward_rows(
    saved: Saved<'_>, dy: &[f32], dx: &mut [f32], accumulate: bool, dgamma: &mut [f32], dbeta: &mut [f32],
) = backward_rows_body);
#[inline(always)]
fn backward_rows_body<L: Lanes>(
    saved: Saved<'_>,
    dy: &[f32],
    dx: &mut [f32],
    accumulate: bool,
    dgamma: &mut [f32],
    dbeta: &mut [f32],
) {
    let hidden = saved.gamma.len();
    let rows = saved.x.chunks_exact(hidden).zip(dy.chunks_exact(hidden)).zip(dx.chunks_exact_mut(hidden));
    for (((x, dy), dx), (m, r)) in rows.zip(saved.mean.iter().zip(saved.rstd)) {
        // SAFETY: compiled for L; all are rows of `hidden` numbers.
        let (average_d, average_dn) = unsafe {
            let sum_d = lanes::sum_row!(L, hidden, |at, count| {
                L::mul(lanes::load::<L>(dy, at, count), lanes::load::<L>(saved.gamma, at, count))
            });
            let sum_dn = lanes::sum_row!(L, hidden, |at, count| {
                let n = L::mul(L::sub(lanes::load::<L>(x, at, count), L::splat(*m)), L::splat(*r));
                let d = L::mul(lanes::load::<L>(dy, at, count), lanes::load::<L>(saved.gamma, at, count));
                L::mul(d, n)
            });
            (sum_d / hidden as f32, sum_dn / hidden as f32)
        };
        for i in 0..hidden {
            let n = (x[i] - m) * r;
            let value = r * L::fused(-n, average_dn, dy[i] * saved.gamma[i] - average_d);
            dx[i] = if accumulate { dx[i] + value } else { value };
            dgamma[i] = L::fused(dy[i], n, dgamma[i]);
            dbeta[i] += dy[i];
        }
    }
}
