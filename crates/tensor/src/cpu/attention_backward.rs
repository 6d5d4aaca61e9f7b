//! Attention in tiles, backward: probabilities are computed again from `log_sum_exp`.
//!
//! A task is one head of one sample. It walks the tiles of keys, and under each the tiles of queries that
//! see them, ascending: so dk and dv of a tile, and each row of dq, are summed in one order. With `p =
//! exp(scale q·kᵀ - lse)`: `dv = pᵀ·dout`, `ds = p * (dout·vᵀ - delta) * scale`, `dk = dsᵀ·q`, `dq = ds·k`,
//! where delta is the sum of `dout * out` of a query.

use std::ops::Range;

use super::Cpu;
use super::attention::{DownTiles, Extents, TILE, multiply, pack_across, pack_down, packed_len};
use super::lanes::{self, Lanes};
use super::matmul::Matrix;
use super::microkernel::{self, Across, Down, Panels};
use super::scratch::with_thread_scratch;
use super::shards::Shards;
use super::simd::{Isa, vectorized};

/// What forward kept.
#[derive(Clone, Copy)]
pub(super) struct Saved<'a> {
    /// `[batch, seq, 3 * hidden]`.
    pub(super) qkv: &'a [f32],
    /// `[batch, seq, hidden]`.
    pub(super) out: &'a [f32],
    /// `[batch, heads, seq]`.
    pub(super) log_sum_exp: &'a [f32],
}

/// dqkv `[batch, seq, 3 * hidden]` is overwritten; dout `[batch, seq, hidden]`.
pub(super) fn attention_backward(cpu: &Cpu, e: Extents, saved: Saved, dout: &[f32], dqkv: &mut [f32]) {
    let dqkv = Shards::new(dqkv);
    cpu.pool.run(e.batch * e.heads, &|pair| {
        with_thread_scratch(Head::len(cpu.isa, &e), |scratch| {
            let mut head = Head::new(cpu.isa, e, pair, saved, dout, scratch);
            for key_tile in 0..e.tiles() {
                head.key_tile(key_tile);
                head.store(1, &e.tile(key_tile), head.tiles.dk, &dqkv);
                head.store(2, &e.tile(key_tile), head.tiles.dv, &dqkv);
            }
            head.store(0, &(0..e.seq), head.dq, &dqkv);
        });
    });
}

/// One head of one sample on its way.
struct Head<'a> {
    isa: Isa,
    e: Extents,
    pair: usize,
    qkv: &'a [f32],
    lse: &'a [f32],
    /// Sum of dout * out by query.
    delta: &'a mut [f32],
    /// Queries and dout as left operands by tiles, steps of the head's size.
    down: [DownTiles; 2],
    /// Queries and dout as right operands, a step a query.
    across: [Across; 2],
    dq: &'a mut [f32],
    tiles: Tiles<'a>,
}

/// What belongs to one tile of keys.
struct Tiles<'a> {
    /// k and v as right operands, steps of the head's size.
    turned: [&'a mut [f32]; 2],
    /// k as right operand, a step a key.
    k: &'a mut [f32],
    /// Scores, then probabilities, `[query][key]`.
    p: &'a mut [f32],
    /// dout·vᵀ, then the derivative of the scores, `[query][key]`.
    ds: &'a mut [f32],
    /// ds as left operand, a step a key.
    ds_down: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
}

/// Cuts `lengths[i]` numbers each off the scratch.
fn cut<'a, const N: usize>(scratch: &mut &'a mut [f32], lengths: [usize; N]) -> [&'a mut [f32]; N] {
    lengths.map(|len| scratch.split_off_mut(..len).expect("the scratch is as long as was asked for"))
}

impl<'a> Head<'a> {
    fn lengths(isa: Isa, e: &Extents) -> [[usize; 6]; 2] {
        let down = DownTiles::len(isa, e.size, e.seq);
        let across = packed_len(isa, [e.seq, e.size]);
        let turned = packed_len(isa, [e.size, TILE]);
        let square = packed_len(isa, [TILE, TILE]);
        let whole = [down, down, across, across, e.seq, e.seq * e.size];
        [whole, [turned, turned, packed_len(isa, [TILE, e.size]), square, TILE * TILE, TILE * e.size]]
    }

    fn len(isa: Isa, e: &Extents) -> usize {
        let [whole, tile] = Head::lengths(isa, e);
        whole.iter().chain(&tile).sum::<usize>() + TILE * TILE + TILE * e.size
    }

    fn new(
        isa: Isa,
        e: Extents,
        pair: usize,
        saved: Saved<'a>,
        dout: &[f32],
        mut scratch: &'a mut [f32],
    ) -> Head<'a> {
        let [whole, tile] = Head::lengths(isa, &e);
        let [q_down, d_down, q_across, d_across, delta, dq] = cut(&mut scratch, whole);
        let [k_turned, v_turned, k, ds_down, p, dk] = cut(&mut scratch, tile);
        let [ds, dv] = cut(&mut scratch, [TILE * TILE, TILE * e.size]);
        let q = e.part(saved.qkv, pair, 0, &(0..e.seq));
        let d = Matrix::new(&dout[e.head_at(pair, 0)..], [e.seq, e.size], e.hidden());
        for (row, delta) in delta.iter_mut().enumerate() {
            let at = e.head_at(pair, row);
            *delta = dot(isa, &dout[at..at + e.size], &saved.out[at..at + e.size]);
        }
        dq.fill(0.0);
        Head {
            isa,
            e,
            pair,
            qkv: saved.qkv,
            lse: &saved.log_sum_exp[pair * e.seq..][..e.seq],
            delta,
            down: [DownTiles::pack(isa, q, q_down), DownTiles::pack(isa, d, d_down)],
            across: [pack_across(isa, q, q_across), pack_across(isa, d, d_across)],
            dq,
            tiles: Tiles { turned: [k_turned, v_turned], k, p, ds, ds_down, dk, dv },
        }
    }

    /// dk and dv of one tile of keys, and its part of dq.
    fn key_tile(&mut self, key_tile: usize) {
        let (isa, e) = (self.isa, self.e);
        let keys = e.tile(key_tile);
        let [k, v] = [1, 2].map(|which| e.part(self.qkv, self.pair, which, &keys));
        let [k_turned, v_turned] = &mut self.tiles.turned;
        let turned = [pack_across(isa, k.t(), k_turned), pack_across(isa, v.t(), v_turned)];
        let k = pack_across(isa, k, self.tiles.k);
        self.tiles.dk.fill(0.0);
        self.tiles.dv.fill(0.0);
        for query_tile in if e.causal { key_tile } else { 0 }..e.tiles() {
            let rows = e.tile(query_tile);
            let diagonal = e.causal && query_tile == key_tile;
            let size = [rows.len(), keys.len()];
            self.scores(query_tile, size, diagonal, turned);
            let Tiles { p, ds, .. } = &mut self.tiles;
            let (lse, delta) = (&self.lse[rows.clone()], &self.delta[rows.clone()]);
            probabilities(isa, p, ds, lse, delta, keys.len(), diagonal, e.scale());
            self.add_keys(rows.start, size, diagonal);
            self.add_queries(rows, keys.len(), diagonal, k);
        }
    }

    /// p = q·kᵀ and ds = dout·vᵀ of a tile, `[queries, keys]`.
    fn scores(
        &mut self,
        query_tile: usize,
        [queries, keys]: [usize; 2],
        diagonal: bool,
        turned: [Across; 2],
    ) {
        let Panels { rows: panel, .. } = microkernel::panels(self.isa);
        let step = if diagonal { panel } else { queries };
        for (which, to) in [&mut *self.tiles.p, &mut *self.tiles.ds].into_iter().enumerate() {
            let down = self.down[which].get(query_tile);
            for top in (0..queries).step_by(step) {
                // On the diagonal, queries before `bottom` see keys before `bottom`.
                let bottom = queries.min(top + step);
                let size = [bottom - top, if diagonal { bottom.min(keys) } else { keys }, self.e.size];
                let down = Down { from: down.from.wrapping_add(top / panel * down.panel), ..down };
                // SAFETY: the panels were packed for these tiles.
                unsafe { multiply(self.isa, size, down, turned[which], &mut to[top * TILE..], TILE, false) };
            }
        }
    }

    /// dv += pᵀ·dout, dk += dsᵀ·q; p and ds are left operands as they lie, a step a query.
    fn add_keys(&mut self, first: usize, [queries, keys]: [usize; 2], diagonal: bool) {
        let Panels { rows: panel, columns: width, .. } = microkernel::panels(self.isa);
        let Tiles { p, ds, dk, dv, .. } = &mut self.tiles;
        let step = if diagonal { panel } else { keys };
        for (from, across, to) in [(p, self.across[1], dv), (ds, self.across[0], dk)] {
            for top in (0..keys).step_by(step) {
                // On the diagonal, keys from `top` on are seen by queries from `top` on.
                let start = if diagonal { top } else { 0 };
                let size = [step.min(keys - top), self.e.size, queries - start];
                let down = Down { from: from[start * TILE + top..].as_ptr(), step: TILE, panel };
                let across = Across { from: across.from.wrapping_add((first + start) * width), ..across };
                // SAFETY: p and ds hold the tile; `across` was packed for all queries.
                unsafe {
                    multiply(self.isa, size, down, across, &mut to[top * self.e.size..], self.e.size, true)
                };
            }
        }
    }

    /// dq += ds·k.
    fn add_queries(&mut self, rows: Range<usize>, keys: usize, diagonal: bool, k: Across) {
        let Panels { rows: panel, .. } = microkernel::panels(self.isa);
        let queries = rows.len();
        let ds = Matrix::new(self.tiles.ds, [queries, keys], TILE);
        let down = pack_down(self.isa, ds.t(), self.tiles.ds_down);
        let step = if diagonal { panel } else { queries };
        for top in (0..queries).step_by(step) {
            let bottom = queries.min(top + step);
            let size = [bottom - top, self.e.size, if diagonal { bottom.min(keys) } else { keys }];
            let down = Down { from: down.from.wrapping_add(top / panel * down.panel), ..down };
            let to = &mut self.dq[(rows.start + top) * self.e.size..];
            // SAFETY: the panels were packed for this tile.
            unsafe { multiply(self.isa, size, down, k, to, self.e.size, true) };
        }
    }

    /// Rows of dq (0), dk (1) or dv (2) to their place.
    fn store(&self, which: usize, rows: &Range<usize>, from: &[f32], dqkv: &Shards<f32>) {
        for (row, from) in rows.clone().zip(from.chunks_exact(self.e.size)) {
            let at = self.e.part_at(self.pair, which, row);
            // SAFETY: this task alone writes this head of this sample.
            unsafe { dqkv.piece(at..at + self.e.size) }.copy_from_slice(from);
        }
    }
}

vectorized!(fn probabilities(
    p: &mut [f32], ds: &mut [f32], lse: &[f32], delta: &[f32], keys: usize, diagonal: bool, scale: f32,
) = probabilities_body);
/// p: scores to probabilities; ds: dout·vᵀ to the derivative of the unscaled scores.
#[inline(always)]
fn probabilities_body<L: Lanes>(
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
        let seen = if diagonal { keys.min(i + 1) } else { keys };
        for at in (0..seen).step_by(16) {
            let count = 16.min(seen - at);
            // SAFETY: compiled for L; `count` numbers lie in the row.
            unsafe {
                let score = lanes::load::<L>(p, at, count);
                let e = lanes::exp::<L>(L::mul_add(score, L::splat(scale), L::splat(-lse)));
                let d = L::sub(lanes::load::<L>(ds, at, count), L::splat(*delta));
                lanes::store::<L>(p, at, e, count);
                lanes::store::<L>(ds, at, L::mul(L::mul(e, d), L::splat(scale)), count);
            }
        }
        p[seen..].fill(0.0);
        ds[seen..].fill(0.0);
    }
}

vectorized!(fn dot(a: &[f32], b: &[f32]) -> f32 = dot_body);
#[inline(always)]
fn dot_body<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // SAFETY: compiled for L; the vectors lie in both rows.
    unsafe {
        lanes::sum_row!(L, a.len(), |at, count| L::mul(
            lanes::load::<L>(a, at, count),
            lanes::load::<L>(b, at, count)
        ))
    }
}
