//! Attention in tiles (Dao et al., arXiv 2205.14135 and 2307.08691): forward.
//!
//! A task is one head of one sample. Its queries go in tiles; a tile walks the keys it sees with an online
//! softmax. Scores are computed transposed, `[key][query]`: then the running maximum and sum of all queries
//! of a tile are vectors, and the probabilities are, as they lie, the left operand of `p · v`. Tiles above
//! the diagonal of a causal mask are skipped, and in the tile on the diagonal what no query sees is not
//! multiplied.

use std::ops::Range;

use super::Cpu;
use super::epilogue::{Place, Target};
use super::lanes::{self, Lanes};
use super::matmul::Matrix;
use super::microkernel::{self, Across, Down, Kind, Panels};
use super::packing::{Form, pack};
use super::scratch::with_thread_scratch;
use super::shards::Shards;
use super::simd::{Isa, vectorized};
use crate::kernels::Heads;

/// Queries of a tile and keys of a tile.
pub(super) const TILE: usize = 64;

/// What an attention is over.
#[derive(Clone, Copy)]
pub(super) struct Extents {
    pub(super) batch: usize,
    pub(super) seq: usize,
    pub(super) heads: usize,
    /// Numbers of a head.
    pub(super) size: usize,
    pub(super) causal: bool,
}

impl Extents {
    pub(super) fn new([batch, seq, hidden3]: [usize; 3], heads: Heads) -> Extents {
        Extents { batch, seq, heads: heads.heads, size: hidden3 / 3 / heads.heads, causal: heads.causal }
    }

    pub(super) fn hidden(&self) -> usize {
        self.heads * self.size
    }

    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.size as f32).sqrt()
    }

    pub(super) fn tiles(&self) -> usize {
        self.seq.div_ceil(TILE)
    }

    /// Rows of a tile.
    pub(super) fn tile(&self, index: usize) -> Range<usize> {
        index * TILE..self.seq.min((index + 1) * TILE)
    }

    /// Rows `rows` of q (0), k (1) or v (2) of one head of one sample (`pair`), `[rows, size]`.
    pub(super) fn part<'a>(
        &self,
        qkv: &'a [f32],
        pair: usize,
        which: usize,
        rows: &Range<usize>,
    ) -> Matrix<'a> {
        let stride = 3 * self.hidden();
        let at = self.part_at(pair, which, rows.start);
        Matrix::new(&qkv[at..], [rows.len(), self.size], stride)
    }

    /// Where a row of q, k or v of one head starts in `[batch, seq, 3 * hidden]`.
    pub(super) fn part_at(&self, pair: usize, which: usize, row: usize) -> usize {
        let (sample, head) = (pair / self.heads, pair % self.heads);
        (sample * self.seq + row) * 3 * self.hidden() + which * self.hidden() + head * self.size
    }

    /// Where a row of one head starts in `[batch, seq, hidden]`.
    pub(super) fn head_at(&self, pair: usize, row: usize) -> usize {
        let (sample, head) = (pair / self.heads, pair % self.heads);
        (sample * self.seq + row) * self.hidden() + head * self.size
    }
}

/// Packs all of `x`, steps by lanes, as rows (left operand) of tiles' products.
pub(super) fn pack_down(isa: Isa, x: Matrix, to: &mut [f32]) -> Down {
    let Panels { rows, row_width, .. } = microkernel::panels(isa);
    let form = pack_whole(isa, x, rows, row_width, to);
    Down { from: to.as_ptr(), step: row_width, panel: form.stride }
}

/// Packs all of `x`, steps by lanes, as columns (right operand).
pub(super) fn pack_across(isa: Isa, x: Matrix, to: &mut [f32]) -> Across {
    let Panels { columns, .. } = microkernel::panels(isa);
    let form = pack_whole(isa, x, columns, columns, to);
    Across { from: to.as_ptr(), panel: form.stride }
}

fn pack_whole(isa: Isa, x: Matrix, lanes: usize, width: usize, to: &mut [f32]) -> Form {
    let [steps, all] = x.shape();
    let form = Form { kind: Kind::Single, lanes, width, stride: width * steps };
    assert!(all.div_ceil(lanes) * form.stride <= to.len());
    // SAFETY: the panels fit (asserted), `Matrix::piece` checks what is read.
    unsafe { pack(isa, x.piece(0..steps, 0..all), form, to.as_mut_ptr()) };
    form
}

/// Packed numbers of `steps x lanes`, whichever operand.
pub(super) fn packed_len(isa: Isa, [steps, lanes]: [usize; 2]) -> usize {
    let Panels { rows, row_width, columns } = microkernel::panels(isa);
    steps * (lanes.div_ceil(rows) * row_width).max(lanes.next_multiple_of(columns))
}

/// `to (+)= a · b` for `[rows, columns, depth]`; rows of `to` are `stride` apart.
///
/// # Safety
/// The panels hold the block.
pub(super) unsafe fn multiply(
    isa: Isa,
    size: [usize; 3],
    a: Down,
    b: Across,
    to: &mut [f32],
    stride: usize,
    add: bool,
) {
    let [rows, columns, _] = size;
    assert!(columns <= stride && (rows == 0 || (rows - 1) * stride + columns <= to.len()));
    let to = Place::of(to.as_mut_ptr(), stride);
    let target = Target { add: if add { to } else { Place::none() }, ..Target::new(to) };
    // SAFETY: the caller's promise for the panels; the target was checked.
    unsafe { microkernel::block(isa, Kind::Single, size, a, b, &target) }
}

/// A matrix packed as left operand tile of rows by tile of rows.
#[derive(Clone, Copy)]
pub(super) struct DownTiles {
    first: Down,
    tile: usize,
}

impl DownTiles {
    /// Packed numbers of `steps` by `lanes` rows.
    pub(super) fn len(isa: Isa, steps: usize, lanes: usize) -> usize {
        let Panels { rows, row_width, .. } = microkernel::panels(isa);
        lanes.div_ceil(TILE) * TILE.div_ceil(rows) * row_width * steps
    }

    /// Packs the rows of `x`.
    pub(super) fn pack(isa: Isa, x: Matrix, to: &mut [f32]) -> DownTiles {
        let [rows, steps] = x.shape();
        let tile = DownTiles::len(isa, steps, TILE);
        for (index, to) in to[..DownTiles::len(isa, steps, rows)].chunks_exact_mut(tile).enumerate() {
            let rows = index * TILE..rows.min((index + 1) * TILE);
            pack_down(isa, x.rows(rows).t(), to);
        }
        let Panels { row_width, .. } = microkernel::panels(isa);
        DownTiles { first: Down { from: to.as_ptr(), step: row_width, panel: row_width * steps }, tile }
    }

    /// The panels of a tile.
    pub(super) fn get(&self, index: usize) -> Down {
        Down { from: self.first.from.wrapping_add(index * self.tile), ..self.first }
    }
}

/// out `[batch, seq, hidden]` and log_sum_exp `[batch, heads, seq]` (both overwritten).
pub(super) fn attention(cpu: &Cpu, e: Extents, qkv: &[f32], out: &mut [f32], log_sum_exp: &mut [f32]) {
    let (out, log_sum_exp) = (Shards::new(out), Shards::new(log_sum_exp));
    let isa = cpu.isa;
    // With few heads the tiles of queries are tasks too, and each packs the keys anew.
    let few = e.batch * e.heads < 16;
    let parts = if few { e.tiles() } else { 1 };
    cpu.pool.run(e.batch * e.heads * parts, &|task| {
        let (pair, part) = (task / parts, task % parts);
        // Long tiles of a causal mask first.
        let tiles = if few { e.tiles() - 1 - part..e.tiles() - part } else { 0..e.tiles() };
        let keys = 0..if e.causal { e.tile(tiles.end - 1).end } else { e.seq };
        let lengths = [
            DownTiles::len(isa, e.size, keys.len()),
            packed_len(isa, [keys.len(), e.size]),
            packed_len(isa, [e.size, TILE]),
        ];
        let length = lengths.iter().sum::<usize>() + State::len(&e);
        with_thread_scratch(length, |scratch| {
            let (k, scratch) = scratch.split_at_mut(lengths[0]);
            let (v, scratch) = scratch.split_at_mut(lengths[1]);
            let (q, scratch) = scratch.split_at_mut(lengths[2]);
            let k = DownTiles::pack(isa, e.part(qkv, pair, 1, &keys), k);
            let v = pack_across(isa, e.part(qkv, pair, 2, &keys), v);
            for tile in tiles {
                let rows = e.tile(tile);
                let q = pack_across(isa, e.part(qkv, pair, 0, &rows).t(), q);
                let mut state = State::new(&e, scratch);
                forward_tile(isa, &e, tile, q, k, v, &mut state);
                // SAFETY: this task alone writes these rows of this head's log_sum_exp.
                let log_sum_exp =
                    unsafe { log_sum_exp.piece(pair * e.seq + rows.start..pair * e.seq + rows.end) };
                for (i, (row, lse)) in rows.zip(log_sum_exp).enumerate() {
                    let at = e.head_at(pair, row);
                    // SAFETY: this task alone writes these rows of this head.
                    let out = unsafe { out.piece(at..at + e.size) };
                    let factor = 1.0 / state.total[i];
                    out.iter_mut().zip(&state.sums[i * e.size..]).for_each(|(o, s)| *o = s * factor);
                    *lse = state.largest[i] + state.total[i].ln();
                }
            }
        });
    });
}

/// What a tile of queries has seen so far.
struct State<'a> {
    /// Scores, then probabilities of the present tile of keys, `[key][query]`.
    scores: &'a mut [f32],
    /// Sum of probabilities times values, `[query][size]`.
    sums: &'a mut [f32],
    /// Largest score of each query.
    largest: &'a mut [f32],
    /// Sum of probabilities of each query.
    total: &'a mut [f32],
    /// What earlier sums are multiplied by, because the largest score grew.
    fade: &'a mut [f32],
}

impl<'a> State<'a> {
    fn len(e: &Extents) -> usize {
        TILE * (TILE + e.size + 3)
    }

    fn new(e: &Extents, scratch: &'a mut [f32]) -> State<'a> {
        let (scores, scratch) = scratch.split_at_mut(TILE * TILE);
        let (sums, scratch) = scratch.split_at_mut(TILE * e.size);
        let (largest, scratch) = scratch.split_at_mut(TILE);
        let (total, fade) = scratch.split_at_mut(TILE);
        sums.fill(0.0);
        largest.fill(f32::NEG_INFINITY);
        total.fill(0.0);
        State { scores, sums, largest, total, fade }
    }
}

/// One tile of queries over all the keys that it sees.
fn forward_tile(isa: Isa, e: &Extents, tile: usize, q: Across, k: DownTiles, v: Across, state: &mut State) {
    let queries = e.tile(tile).len();
    let Panels { rows: panel, columns: width, .. } = microkernel::panels(isa);
    for key_tile in 0..if e.causal { tile + 1 } else { e.tiles() } {
        let keys = e.tile(key_tile);
        let diagonal = e.causal && key_tile == tile;
        let k = k.get(key_tile);
        let v = Across { from: v.from.wrapping_add(keys.start * width), ..v };
        // SAFETY: the panels were packed for these tiles.
        unsafe {
            if diagonal {
                // Keys from `top` on are seen by queries from `top` on.
                for top in (0..keys.len()).step_by(panel) {
                    let left = top / width * width;
                    let size = [panel.min(keys.len() - top), queries - left, e.size];
                    let k = Down { from: k.from.add(top / panel * k.panel), ..k };
                    let q = Across { from: q.from.add(left / width * q.panel), ..q };
                    multiply(isa, size, k, q, &mut state.scores[top * TILE + left..], TILE, false);
                }
            } else {
                multiply(isa, [keys.len(), queries, e.size], k, q, state.scores, TILE, false);
            }
        }
        online_softmax(isa, state, keys.len(), queries, diagonal, e.scale());
        let p = Down { from: state.scores.as_ptr(), step: TILE, panel };
        // SAFETY: as above; p is `[key][query]`, a step to a key.
        unsafe {
            if diagonal {
                // Queries before `bottom` see keys before `bottom`.
                for top in (0..queries).step_by(panel) {
                    let bottom = queries.min(top + panel);
                    let size = [bottom - top, e.size, bottom.min(keys.len())];
                    let p = Down { from: p.from.add(top), ..p };
                    multiply(isa, size, p, v, &mut state.sums[top * e.size..], e.size, true);
                }
            } else {
                multiply(isa, [queries, e.size, keys.len()], p, v, state.sums, e.size, true);
            }
        }
    }
}

vectorized!(fn online_softmax(
    state: &mut State<'_>, keys: usize, queries: usize, diagonal: bool, scale: f32,
) = online_softmax_body);
/// Scores become `exp(scale * score - new largest)`, 16 queries at a time; what was summed before fades.
#[inline(always)]
fn online_softmax_body<L: Lanes>(
    state: &mut State<'_>,
    keys: usize,
    queries: usize,
    diagonal: bool,
    scale: f32,
) {
    let size = state.sums.len() / TILE;
    for first in (0..queries).step_by(16) {
        // Beyond this key no query of these 16 sees anything.
        let seen = if diagonal { keys.min(first + 16) } else { keys };
        // Queries of the vector that come before a key do not see it.
        let hidden = |key: usize| if diagonal { key.saturating_sub(first) } else { 0 };
        // SAFETY: compiled for L; all rows of the state are TILE long, and `first` is below that.
        unsafe {
            let none = L::splat(f32::NEG_INFINITY);
            let factor = L::splat(scale);
            let before = lanes::load::<L>(state.largest, first, 16);
            let mut largest = before;
            for key in 0..seen {
                let at = key * TILE + first;
                let score = L::mul(lanes::load::<L>(state.scores, at, 16), factor);
                let score = if hidden(key) == 0 { score } else { L::keep_first(none, score, hidden(key)) };
                lanes::store::<L>(state.scores, at, score, 16);
                largest = L::max(score, largest);
            }
            let fade = lanes::exp::<L>(L::sub(before, largest));
            let mut total = L::mul(lanes::load::<L>(state.total, first, 16), fade);
            for key in 0..seen {
                let at = key * TILE + first;
                let p = lanes::exp::<L>(L::sub(lanes::load::<L>(state.scores, at, 16), largest));
                lanes::store::<L>(state.scores, at, p, 16);
                total = L::add(total, p);
            }
            for key in seen..keys {
                lanes::store::<L>(state.scores, key * TILE + first, L::splat(0.0), 16);
            }
            lanes::store::<L>(state.largest, first, largest, 16);
            lanes::store::<L>(state.total, first, total, 16);
            lanes::store::<L>(state.fade, first, fade, 16);
        }
    }
    for (sums, fade) in state.sums.chunks_exact_mut(size).zip(&*state.fade).take(queries) {
        if *fade != 1.0 {
            sums.iter_mut().for_each(|s| *s *= fade);
        }
    }
}
