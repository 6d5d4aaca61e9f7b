//! Attention in tiles (Dao et al., arXiv 2205.14135 and 2307.08691), forward and backward.
//!
//! A task is one head of one sample, or in forward one tile of its queries. Forward walks the key tiles with an online
//! softmax; backward computes probabilities again from `log_sum_exp`, key tile by key tile, query tiles
//! ascending inside, so that dk and dv of a tile are summed in one order and dq likewise. Tiles above
//! the diagonal of a causal mask are skipped.

use super::Cpu;
use super::matmul::{Matrix, small_product};
use super::pool::Shards;
use super::scratch::with_tile_scratch;
use super::simd::{Isa, LANES, Math, exp, max, max_lanes, sum_lanes, vectorized};
use crate::kernels::Heads;

/// Queries of a tile and keys of a tile.
const TILE: usize = 64;

/// What an attention is over.
#[derive(Clone, Copy)]
pub(super) struct Extents {
    batch: usize,
    seq: usize,
    heads: usize,
    /// Numbers of a head.
    size: usize,
    causal: bool,
}

impl Extents {
    pub(super) fn new([batch, seq, hidden3]: [usize; 3], heads: Heads) -> Extents {
        Extents { batch, seq, heads: heads.heads, size: hidden3 / 3 / heads.heads, causal: heads.causal }
    }

    fn hidden(&self) -> usize {
        self.heads * self.size
    }

    fn scale(&self) -> f32 {
        1.0 / (self.size as f32).sqrt()
    }

    /// Key tiles that a query tile sees.
    fn key_tiles(&self, query_tile: usize) -> usize {
        if self.causal { query_tile + 1 } else { self.seq.div_ceil(TILE) }
    }

    /// Rows of a tile.
    fn tile(&self, index: usize) -> std::ops::Range<usize> {
        index * TILE..self.seq.min((index + 1) * TILE)
    }
}

/// Rows `rows` of one head of q (0), k (1) or v (2) of one sample.
fn part<'a>(e: &Extents, qkv: &'a [f32], sample: usize, head: usize, which: usize, rows: &std::ops::Range<usize>) -> Matrix<'a> {
    let stride = 3 * e.hidden();
    let start = (sample * e.seq + rows.start) * stride + which * e.hidden() + head * e.size;
    Matrix::new(&qkv[start..], [rows.len(), e.size], stride)
}

/// The same of a tensor `[batch, seq, hidden]`.
fn plain<'a>(e: &Extents, x: &'a [f32], sample: usize, head: usize, rows: &std::ops::Range<usize>) -> Matrix<'a> {
    let start = (sample * e.seq + rows.start) * e.hidden() + head * e.size;
    Matrix::new(&x[start..], [rows.len(), e.size], e.hidden())
}

/// out `[batch, seq, hidden]` and log_sum_exp `[batch, heads, seq]` (both overwritten).
pub(super) fn attention(cpu: &Cpu, e: Extents, qkv: &[f32], out: &mut [f32], log_sum_exp: &mut [f32]) {
    let tiles = e.seq.div_ceil(TILE);
    let (out, log_sum_exp) = (Shards::new(out), Shards::new(log_sum_exp));
    cpu.pool.run(e.batch * e.heads * tiles, &|task| {
        // Long tiles of a causal mask first.
        let (tile, pair) = (tiles - 1 - task % tiles, task / tiles);
        let (sample, head) = (pair / e.heads, pair % e.heads);
        let rows = e.tile(tile);
        with_tile_scratch(TILE * (TILE + e.size + 2), |scratch| {
            let (scores, scratch) = scratch.split_at_mut(TILE * TILE);
            let (sums, statistics) = scratch.split_at_mut(TILE * e.size);
            let (largest, total) = statistics.split_at_mut(TILE);
            sums.fill(0.0);
            largest.fill(f32::NEG_INFINITY);
            total.fill(0.0);
            let q = part(&e, qkv, sample, head, 0, &rows);
            for key_tile in 0..e.key_tiles(tile) {
                let keys = e.tile(key_tile);
                let k = part(&e, qkv, sample, head, 1, &keys);
                let v = part(&e, qkv, sample, head, 2, &keys);
                small_product(cpu.isa, q, k.t(), scores, TILE, false);
                let diagonal = e.causal && key_tile == tile;
                online_softmax(cpu.isa, scores, rows.len(), keys.len(), diagonal, e.scale(), sums, largest, total);
                let p = Matrix::new(scores, [rows.len(), keys.len()], TILE);
                small_product(cpu.isa, p, v, sums, e.size, true);
            }
            for (i, row) in rows.clone().enumerate() {
                let at = (sample * e.seq + row) * e.hidden() + head * e.size;
                // SAFETY: this task alone writes these rows of this head, here and in log_sum_exp.
                let out = unsafe { out.piece(at..at + e.size) };
                let factor = 1.0 / total[i];
                for (o, s) in out.iter_mut().zip(&sums[i * e.size..]) {
                    *o = s * factor;
                }
                let at = pair * e.seq + row;
                // SAFETY: as above.
                let log_sum_exp = unsafe { log_sum_exp.piece(at..at + 1) };
                log_sum_exp[0] = largest[i] + total[i].ln();
            }
        });
    });
}

vectorized!(fn online_softmax(
    scores: &mut [f32], rows: usize, keys: usize, diagonal: bool, scale: f32,
    sums: &mut [f32], largest: &mut [f32], total: &mut [f32],
) = online_softmax_body);
/// Scores become `exp(scale * score - new maximum)`; what was summed before is brought to that maximum.
#[inline(always)]
fn online_softmax_body<M: Math>(
    scores: &mut [f32],
    rows: usize,
    keys: usize,
    diagonal: bool,
    scale: f32,
    sums: &mut [f32],
    largest: &mut [f32],
    total: &mut [f32],
) {
    let size = sums.len() / TILE;
    for i in 0..rows {
        let row = &mut scores[i * TILE..(i + 1) * TILE];
        let seen = if diagonal { i + 1 } else { keys };
        row[seen..].fill(f32::NEG_INFINITY);
        let row = row.as_chunks_mut::<LANES>().0;
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for x in row.iter_mut() {
            for (x, l) in x.iter_mut().zip(&mut lanes) {
                *x *= scale;
                *l = max(*x, *l);
            }
        }
        let top = max(max_lanes(lanes), largest[i]);
        let mut lanes = [0f32; LANES];
        for x in row {
            for (x, l) in x.iter_mut().zip(&mut lanes) {
                *x = exp::<M>(*x - top);
                *l += *x;
            }
        }
        let fade = exp::<M>(largest[i] - top);
        total[i] = M::mul_add(total[i], fade, sum_lanes(lanes));
        largest[i] = top;
        if fade != 1.0 {
            for s in &mut sums[i * size..(i + 1) * size] {
                *s *= fade;
            }
        }
    }
}

/// What forward kept.
#[derive(Clone, Copy)]
pub(super) struct Saved<'a> {
    pub(super) qkv: &'a [f32],
    pub(super) out: &'a [f32],
    pub(super) log_sum_exp: &'a [f32],
}

/// dqkv is overwritten. With `p = exp(scale q·kᵀ - lse)`: `dv = pᵀ·dout`, `ds = p * (dout·vᵀ - delta) * scale`,
/// `delta = sum of dout * out` by row, `dq = ds·k`, `dk = dsᵀ·q`.
pub(super) fn attention_backward(cpu: &Cpu, e: Extents, saved: Saved, dout: &[f32], dqkv: &mut [f32]) {
    let dqkv = Shards::new(dqkv);
    cpu.pool.run(e.batch * e.heads, &|pair| {
        let whole = e.seq * e.size;
        with_tile_scratch(2 * TILE * TILE + 2 * TILE * e.size + e.seq + whole, |scratch| {
            let (p, scratch) = scratch.split_at_mut(TILE * TILE);
            let (ds, scratch) = scratch.split_at_mut(TILE * TILE);
            let (dk, scratch) = scratch.split_at_mut(TILE * e.size);
            let (dv, scratch) = scratch.split_at_mut(TILE * e.size);
            let (delta, dq) = scratch.split_at_mut(e.seq);
            backward_head(cpu.isa, &e, saved, dout, pair, [p, ds], [dq, dk, dv], delta, &dqkv);
        });
    });
}

fn backward_head(
    isa: Isa,
    e: &Extents,
    saved: Saved,
    dout: &[f32],
    pair: usize,
    [p, ds]: [&mut [f32]; 2],
    [dq, dk, dv]: [&mut [f32]; 3],
    delta: &mut [f32],
    dqkv: &Shards<f32>,
) {
    let (sample, head) = (pair / e.heads, pair % e.heads);
    let lse = &saved.log_sum_exp[pair * e.seq..][..e.seq];
    for (row, delta) in delta.iter_mut().enumerate() {
        let at = (sample * e.seq + row) * e.hidden() + head * e.size;
        *delta = dot(isa, &dout[at..at + e.size], &saved.out[at..at + e.size]);
    }
    dq.fill(0.0);
    let store = |which: usize, rows: &std::ops::Range<usize>, from: &[f32]| {
        for (row, from) in rows.clone().zip(from.chunks_exact(e.size)) {
            let at = (sample * e.seq + row) * 3 * e.hidden() + which * e.hidden() + head * e.size;
            // SAFETY: this task alone writes this head of this sample.
            unsafe { dqkv.piece(at..at + e.size) }.copy_from_slice(from);
        }
    };
    let tiles = e.seq.div_ceil(TILE);
    for key_tile in 0..tiles {
        let keys = e.tile(key_tile);
        let k = part(e, saved.qkv, sample, head, 1, &keys);
        let v = part(e, saved.qkv, sample, head, 2, &keys);
        dk.fill(0.0);
        dv.fill(0.0);
        for query_tile in if e.causal { key_tile } else { 0 }..tiles {
            let rows = e.tile(query_tile);
            let q = part(e, saved.qkv, sample, head, 0, &rows);
            let d = plain(e, dout, sample, head, &rows);
            small_product(isa, q, k.t(), p, TILE, false);
            small_product(isa, d, v.t(), ds, TILE, false);
            let diagonal = e.causal && query_tile == key_tile;
            probabilities(isa, p, ds, &lse[rows.clone()], &delta[rows.clone()], keys.len(), diagonal, e.scale());
            let shape = [rows.len(), keys.len()];
            let (p, ds) = (Matrix::new(p, shape, TILE), Matrix::new(ds, shape, TILE));
            small_product(isa, p.t(), d, dv, e.size, true);
            small_product(isa, ds.t(), q, dk, e.size, true);
            small_product(isa, ds, k, &mut dq[rows.start * e.size..], e.size, true);
        }
        store(1, &keys, dk);
        store(2, &keys, dv);
    }
    store(0, &(0..e.seq), dq);
}

vectorized!(fn probabilities(
    p: &mut [f32], ds: &mut [f32], lse: &[f32], delta: &[f32], keys: usize, diagonal: bool, scale: f32,
) = probabilities_body);
/// p: scores to probabilities; ds: dout·vᵀ to the derivative of the unscaled scores.
#[inline(always)]
fn probabilities_body<M: Math>(
    p: &mut [f32],
    ds: &mut [f32],
    lse: &[f32],
    delta: &[f32],
    keys: usize,
    diagonal: bool,
    scale: f32,
) {
    for (i, (lse, delta)) in lse.iter().zip(delta).enumerate() {
        let row = i * TILE..i * TILE + keys;
        let (p, ds) = (&mut p[row.clone()], &mut ds[row]);
        let seen = if diagonal { i + 1 } else { keys };
        for (p, ds) in p.iter_mut().zip(ds.iter_mut()) {
            *p = exp::<M>(M::mul_add(*p, scale, -lse));
            *ds = *p * (*ds - delta) * scale;
        }
        p[seen..].fill(0.0);
        ds[seen..].fill(0.0);
    }
}

vectorized!(fn dot(a: &[f32], b: &[f32]) -> f32 = dot_body);
#[inline(always)]
fn dot_body<M: Math>(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (whole_a, tail_a) = a.as_chunks::<LANES>();
    let (whole_b, tail_b) = b.as_chunks::<LANES>();
    let mut add = |a: &[f32], b: &[f32]| {
        for (l, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *l = M::mul_add(*a, *b, *l);
        }
    };
    whole_a.iter().zip(whole_b).for_each(|(a, b)| add(a, b));
    add(tail_a, tail_b);
    sum_lanes(lanes)
}
