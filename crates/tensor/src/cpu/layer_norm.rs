//! Layer norm over the last dimension (Ba et al., arXiv 1607.06450), forward and backward.
//!
//! A row is read from memory once; its mean, its variance around that mean and the result are three
//! passes over the cache. Sums go through 16 lanes by position, so a row's result depends on the row alone.

use super::bias::sum_blocks;
use super::pool::Shards;
use super::simd::{LANES, Math, sum_lanes, vectorized};
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
        let (y, mean, rstd) =
            unsafe { (y.piece(flat.clone()), mean.piece(rows.clone()), rstd.piece(rows)) };
        forward_rows(cpu.isa, &x[flat], gamma, beta, eps, y, mean, rstd);
    });
}

vectorized!(fn forward_rows(
    x: &[f32], gamma: &[f32], beta: &[f32], eps: f32, y: &mut [f32], mean: &mut [f32], rstd: &mut [f32],
) = forward_rows_body);
#[inline(always)]
fn forward_rows_body<M: Math>(
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
        let m = sum_of::<M>(x, |x| x) / hidden as f32;
        let variance = sum_of::<M>(x, |x| (x - m) * (x - m)) / hidden as f32;
        let r = 1.0 / (variance + eps).sqrt();
        for ((y, x), (g, b)) in y.iter_mut().zip(x).zip(gamma.iter().zip(beta)) {
            *y = M::mul_add((x - m) * r, *g, *b);
        }
        *mean = m;
        *rstd = r;
    }
}

/// Sum of `f(x)` over a row, in 16 lanes by position.
#[inline(always)]
fn sum_of<M: Math>(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (whole, tail) = x.as_chunks::<LANES>();
    for x in whole {
        for (l, x) in lanes.iter_mut().zip(x) {
            *l += f(*x);
        }
    }
    for (l, x) in lanes.iter_mut().zip(tail) {
        *l += f(*x);
    }
    sum_lanes(lanes)
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
    sum_blocks(cpu, saved.mean.len(), hidden, parameters, accumulate_parameters, |isa, rows, [dgamma, dbeta]| {
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
    });
}

vectorized!(fn backward_rows(
    saved: Saved<'_>, dy: &[f32], dx: &mut [f32], accumulate: bool, dgamma: &mut [f32], dbeta: &mut [f32],
) = backward_rows_body);
#[inline(always)]
fn backward_rows_body<M: Math>(
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
        let (mut sum_d, mut sum_dn) = ([0f32; LANES], [0f32; LANES]);
        let (whole_x, tail_x) = x.as_chunks::<LANES>();
        let (whole_dy, tail_dy) = dy.as_chunks::<LANES>();
        let (whole_g, tail_g) = saved.gamma.as_chunks::<LANES>();
        let mut add = |x: &[f32], dy: &[f32], g: &[f32]| {
            for (((x, dy), g), (sd, sdn)) in x.iter().zip(dy).zip(g).zip(sum_d.iter_mut().zip(&mut sum_dn)) {
                let d = dy * g;
                *sd += d;
                *sdn = M::mul_add(d, (x - m) * r, *sdn);
            }
        };
        for ((x, dy), g) in whole_x.iter().zip(whole_dy).zip(whole_g) {
            add(x, dy, g);
        }
        add(tail_x, tail_dy, tail_g);
        let average_d = sum_lanes(sum_d) / hidden as f32;
        let average_dn = sum_lanes(sum_dn) / hidden as f32;
        for i in 0..hidden {
            let n = (x[i] - m) * r;
            let value = r * M::mul_add(-n, average_dn, dy[i] * saved.gamma[i] - average_d);
            dx[i] = if accumulate { dx[i] + value } else { value };
            dgamma[i] = M::mul_add(dy[i], n, dgamma[i]);
            dbeta[i] += dy[i];
        }
    }
}
