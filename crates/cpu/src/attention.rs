//! Attention in tiles (Dao et al., arXiv 2205.14135 and 2307.08691): forward.
//!
//! A task computes some queries of one head of one sample, panel by panel. For each panel it goes through the keys that
//! these queries see, in tiles, with an online softmax. Scores are computed transposed, `[key][query]`: then the running maximum and
//! sum of all queries of a panel are vectors, and the probabilities are, as they lie, the left operand of
//! `p · v`. What a causal mask hides is not multiplied, but for the corners of register tiles.
//!
//! Scratch of a thread: 3 * 1024 rows of a head at most, and a tile of scores, whatever the length.
//! Heads of queries that read the same keys and values each pack them for themselves. Tiles start at multiples of their
//! length also under a window, so that a query's sums have one order, whatever other queries its panel has.

use std::ops::Range;

use phalanx_simd::{Isa, Lanes, lanes, vectorized};
use phalanx_tensor::arguments::Dropout;
use phalanx_tensor::operations::AttentionCached;
use phalanx_tensor::{View, ViewMut};

use crate::Cpu;
use crate::attention_extents::{Extents, K, Q, Results, V, cut, total};
use crate::attention_pack::{fetch, fetch_to_write};
use crate::attention_panel::Panel;
use crate::attention_registers::{Path, Registers};
use crate::attention_softmax::{RunningSoftmax, cap, online_softmax};
use crate::attention_tiles::{Left, Sheet, product, strips, sums, upper_half, width};
use crate::elementwise::{bytes, bytes_mut};
use crate::float::{Float, by_float};
use crate::matrix::Matrix;
use crate::microkernel::{self, Packing};
use crate::random::DropoutMask;
use crate::scratch::with_thread_scratch;
use crate::shards::Shards;

/// Keys of a tile of scores: the probabilities of a panel of queries and a panel of values stay in L1.
const TILE: usize = 128;

/// Queries per task: with few heads, and with many.
const TASK: [usize; 2] = [128, 1024];

/// Keys that a task packs at once.
const SPAN: usize = 1024;

/// With fewer (sample, head) pairs than this, each pair is cut into several tasks.
pub(crate) const FEW_PAIRS: usize = 16;

/// Computes the scores `[key][query]` of a panel of queries (right operand) with its keys (left operand), as far as the
/// mask lets the queries see them.
///
/// # Safety
/// The sheets hold these keys and queries; `to` has room for the scores.
pub(crate) unsafe fn scores(
    isa: Isa,
    packing: Packing,
    panel: &Panel,
    depth: usize,
    left: Sheet,
    right: Sheet,
    to: *mut f32,
) {
    let width = width(isa);
    let depth = packing.packed(depth);
    // From this key on, the mask hides all keys from the first of the two vectors of queries.
    let half = if width > 16 { panel.below(panel.last + 16) } else { panel.keys };
    // SAFETY: the caller's promise.
    unsafe {
        product(isa, packing, [half, width, depth], Left::Rows(left, 0), right, &sums(to, width, false));
        if half < panel.keys {
            let to = sums(to.wrapping_add(half * width), width, false);
            upper_half(isa, packing, [panel.keys - half, depth], left.at(half * width), right, &to);
        }
    }
}

/// Data shared by all tasks of a forward pass.
struct Forward<'a> {
    path: Path,
    e: Extents<'a>,
    /// Part [`Q`] has the queries.
    queries: Matrix<'a>,
    keys: Keys<'a>,
    /// Positions before the first query, and keys that there are.
    past: usize,
    count: usize,
    keep: Option<DropoutMask>,
    out: Results,
    /// None when no backward follows.
    log_sum_exp: Option<Shards<'a, f32>>,
}

/// Keys and values.
struct Keys<'a> {
    matrix: Matrix<'a>,
    /// Its extents: a sample may have more rows than there are queries.
    e: Extents<'a>,
}

/// out `[batch, seq, out_width]` and log_sum_exp `[batch, heads, seq]` (both overwritten).
pub(crate) fn attention(
    cpu: &Cpu,
    e: Extents,
    qkv: View,
    dropout: Option<Dropout>,
    out: ViewMut,
    log_sum_exp: ViewMut,
) {
    let forward = Forward {
        path: Path::forward(cpu, e.size, qkv.dtype()),
        e,
        queries: Matrix::of(&qkv),
        keys: Keys { matrix: Matrix::of(&qkv), e },
        past: 0,
        count: e.seq,
        keep: dropout.filter(|d| d.p > 0.0).map(DropoutMask::new),
        out: Results::new(&out),
        log_sum_exp: Some(Shards::new(log_sum_exp.into_slice())),
    };
    forward.run(cpu);
}

/// Stores k and v of `qkv` `[batch, new, qkv_width]` in rows `past ..` of `cache` `[batch, capacity, cache_width]`;
/// out `[batch, new, out_width]` (overwritten) is the attention of these rows over all rows of the cache so far; `[1, 1,
/// out_width]` is that of the last one.
pub(crate) fn attention_cached(cpu: &Cpu, operation: AttentionCached) {
    let (queries, before) = operation.queries();
    let AttentionCached { qkv, heads, past, mut cache, out } = operation;
    let e = Extents::new(qkv.dims(), heads, None, None);
    let [_, capacity, _] = cache.dims();
    let [width, kept] = [heads.qkv_width(), heads.cache_width()].map(|len| len * qkv.dtype().bytes());
    let to = bytes_mut(cache.reborrow());
    for (row, from) in bytes(&qkv).chunks_exact(width).enumerate() {
        let row = row / e.seq * capacity + past + row % e.seq;
        to[row * kept..][..kept].copy_from_slice(&from[width - kept..]);
    }
    let forward = Forward {
        path: Path::forward(cpu, e.size, qkv.dtype()),
        e: Extents::new(queries.dims(), heads, None, None),
        queries: Matrix::of(&queries),
        keys: Keys { matrix: Matrix::of(&cache.as_view()), e: e.of_cache(capacity) },
        past: before,
        count: past + e.seq,
        keep: None,
        out: Results::new(&out),
        log_sum_exp: None,
    };
    forward.run(cpu);
}

/// The buffers and state of one task.
struct Work<'a> {
    registers: &'a mut Option<Registers>,
    /// k (left operand) and v (right operand) of a span of keys.
    k: Sheet,
    v: Sheet,
    /// The keys of the span, and how many are packed.
    keys: Range<usize>,
    packed: usize,
    /// The panel of queries.
    q: Sheet,
    scores: &'a mut [f32],
    /// Sums of `p · v` of one panel of queries.
    sums: &'a mut [f32],
    seen: RunningSoftmax<'a>,
}

impl Forward<'_> {
    /// Computes all tasks.
    fn run(&self, cpu: &Cpu) {
        let e = &self.e;
        let queries = if e.pairs() < FEW_PAIRS { TASK[0] } else { TASK[1] };
        let parts = e.seq.div_ceil(queries);
        cpu.pool.run(e.pairs() * parts, &|task| {
            // With a causal mask, the last queries see the most keys, so their tasks run first.
            let (part, pair) = (parts - 1 - task / e.pairs(), task % e.pairs());
            let rows = part * queries..e.seq.min((part + 1) * queries);
            with_thread_scratch(total(&self.lengths(pair, &rows)), |scratch| {
                self.run_task(pair, rows, scratch)
            });
        });
    }

    /// The keys that one or another of these queries sees, from the start of a tile on.
    fn visible(&self, pair: usize, queries: &Range<usize>) -> Range<usize> {
        let keys = self.e.keys_of(pair, &(self.past + queries.start..self.past + queries.end), self.count);
        keys.start / TILE * TILE..keys.end
    }

    /// Number of panels whose state is kept: all of them if several spans of keys are needed, else one.
    fn kept(&self, pair: usize, queries: &Range<usize>) -> usize {
        if self.visible(pair, queries).len() <= SPAN {
            1
        } else {
            queries.len().div_ceil(width(self.path.isa))
        }
    }

    fn lengths(&self, pair: usize, queries: &Range<usize>) -> [usize; 8] {
        let (Path { isa, packing, .. }, size) = (self.path, self.e.size);
        let keys = self.path.padded(self.visible(pair, queries).len().min(SPAN));
        let width = width(isa);
        let kept = self.kept(pair, queries) * width;
        [
            Sheet::len(isa, keys, packing.packed(size)),
            Sheet::len(isa, packing.packed(keys), size),
            Sheet::len(isa, packing.packed(size), width),
            TILE * width,
            kept * self.e.stride(isa),
            kept,
            kept,
            width,
        ]
    }

    /// Computes some queries of one head of one sample.
    fn run_task(&self, pair: usize, queries: Range<usize>, mut scratch: &mut [f32]) {
        let (Path { isa, packing, .. }, e) = (self.path, &self.e);
        let width = width(isa);
        let kept = self.kept(pair, &queries);
        let state = width * e.stride(isa);
        let [k, v, q, scores, sums, largest, total, fade] = cut(&mut scratch, self.lengths(pair, &queries));
        let all = self.visible(pair, &queries);
        let mut registers = self.path.registers();
        for first in all.clone().step_by(SPAN) {
            let span = first..all.end.min(first + SPAN);
            let mut packed = first;
            for (index, query) in queries.clone().step_by(width).enumerate() {
                let rows = query..queries.end.min(query + width);
                let seen = self.visible(pair, &rows);
                let keys = span.start.max(seen.start)..span.end.min(seen.end);
                if keys.is_empty() {
                    continue;
                }
                let slot = index % kept;
                let lanes = slot * width..(slot + 1) * width;
                let sums = &mut sums[slot * state..(slot + 1) * state];
                let (largest, total) = (&mut largest[lanes.clone()], &mut total[lanes]);
                if keys.start == seen.start {
                    // A number, so that a query that sees no key of its first tile has a difference of 0.
                    largest.fill(f32::MIN);
                    total.fill(0.0);
                }
                let mut work = Work {
                    registers: &mut registers,
                    k: Sheet::new(isa, k, self.path.padded(span.len())),
                    v: Sheet::new(isa, v, packing.packed(self.path.padded(span.len()))),
                    keys: span.clone(),
                    packed,
                    q: Sheet::new(isa, q, packing.packed(e.size)),
                    scores: &mut *scores,
                    sums,
                    seen: RunningSoftmax { largest, total, fade: &mut *fade },
                };
                // SAFETY: the sheet is as long as a panel, and this task's.
                unsafe { work.q.pack_turned(isa, packing, e.part(self.queries, pair, Q, &rows)) };
                let next = rows.end..queries.end.min(rows.end + width);
                if !next.is_empty() {
                    fetch(e.part(self.queries, pair, Q, &next));
                }
                fetch_to_write(isa, self.out.part(e, pair, Q, rows.start), rows.len(), e.size);
                let last = keys.end == seen.end;
                self.walk(pair, &rows, keys, seen.start, &mut work);
                if last {
                    self.store(pair, &rows, &work);
                }
                packed = work.packed;
            }
        }
    }

    /// Computes one panel of queries over some keys; the first that it sees is at `begin`.
    fn walk(&self, pair: usize, queries: &Range<usize>, keys: Range<usize>, begin: usize, work: &mut Work) {
        let (Path { isa, packing, .. }, e) = (self.path, &self.e);
        let position = self.past + queries.start;
        for first in keys.clone().step_by(TILE) {
            let keys = first..keys.end.min(first + TILE);
            self.pack_keys(pair, keys.end, work);
            let [nearest, last] = e.sight(position, first);
            let documents = e.document_keys(pair, queries, first);
            let panel = Panel {
                keys: keys.len(),
                first: nearest,
                last,
                documents: documents.as_ref(),
                factor: e.heads.exponent_factor(),
                element: e.element(pair, first, queries.start),
                next_key: e.seq as u64,
            };
            let k = work.k.at((first - work.keys.start) * width(isa));
            let to = work.scores.as_mut_ptr();
            // SAFETY: the sheets were packed for these keys and queries.
            unsafe {
                match work.registers {
                    Some(registers) => {
                        let size = [self.path.padded(keys.len()), width(isa), packing.packed(e.size)];
                        registers.product(isa, size, Left::Rows(k, 0), work.q, &sums(to, width(isa), false));
                    }
                    None => scores(isa, packing, &panel, e.size, k, work.q, to),
                }
                if let Some(factor) = e.heads.tanh_factor() {
                    cap(isa, &mut work.scores[..keys.len() * width(isa)], factor);
                }
                online_softmax(isa, packing, self.keep.as_ref(), false, panel, work.scores, &mut work.seen);
            }
            if first > begin {
                fade_rows(isa, work.sums, e.stride(isa), &work.seen.fade[..queries.len()]);
            }
            self.add_values(pair, queries, &keys, first > begin, work);
        }
    }

    /// Packs the keys and values before `end` that are not packed yet, and prefetches the next ones. Under a window that looks ahead,
    /// `end` may be odd: the key behind it is packed, too, since two values may share an element.
    fn pack_keys(&self, pair: usize, end: usize, work: &mut Work) {
        let end = end.next_multiple_of(2).min(work.keys.end);
        if end <= work.packed {
            return;
        }
        let Path { isa, packing, .. } = self.path;
        let Keys { matrix, e } = &self.keys;
        let part = |which: usize, rows: &Range<usize>| e.part(*matrix, pair, which, rows);
        let new = work.packed..end;
        let row = new.start - work.keys.start;
        // SAFETY: the sheets hold the span, and are this task's.
        unsafe {
            work.k.pack_along(isa, packing, part(K, &new), row);
            work.v.pack_across(isa, packing, part(V, &new), packing.packed(row));
            let padded = self.path.padded(row + new.len());
            work.v.clear(isa, packing.packed(row + new.len())..packing.packed(padded), e.size);
        }
        let next = end..work.keys.end.min(end + new.len());
        if !next.is_empty() {
            [K, V].into_iter().for_each(|which| fetch(part(which, &next)));
        }
        work.packed = end;
    }

    /// sums = p · v, or += where `add`.
    fn add_values(
        &self,
        pair: usize,
        queries: &Range<usize>,
        keys: &Range<usize>,
        add: bool,
        work: &mut Work,
    ) {
        let (Path { isa, packing, .. }, e) = (self.path, &self.e);
        let (width, stride) = (width(isa), e.stride(isa));
        let v = work.v.at(packing.packed(keys.start - work.keys.start) * width);
        let p = Sheet::new(isa, work.scores, TILE);
        if let Some(registers) = work.registers {
            let padded = packing.packed(self.path.padded(keys.len()));
            work.scores[packing.packed(keys.len()) * width..padded * width].fill(0.0);
            let target = sums(work.sums.as_mut_ptr(), stride, add);
            // SAFETY: the sheets hold these keys, and zeros behind them; the sums are as long as a panel.
            return unsafe { registers.product(isa, [width, stride, padded], Left::Columns(p), v, &target) };
        }
        for strip in strips(queries.len(), microkernel::panels(isa).rows) {
            let strip_queries = queries.start + strip.start..queries.start + strip.end;
            let seen = keys.end.min(self.visible(pair, &strip_queries).end).saturating_sub(keys.start);
            let size = [strip.len(), stride, packing.packed(seen)];
            let to = &mut work.sums[strip.start * stride..strip.end * stride];
            let target = sums(to.as_mut_ptr(), stride, add);
            // SAFETY: the sheets hold these keys; the sums are as long as the product.
            unsafe { product(isa, packing, size, Left::Columns(p.at(strip.start)), v, &target) };
        }
    }

    /// Writes a panel's output rows and their log-sum-exp.
    fn store(&self, pair: usize, queries: &Range<usize>, work: &Work) {
        let e = &self.e;
        if let Some(log_sum_exp) = &self.log_sum_exp {
            let at = pair * e.seq + queries.start;
            // SAFETY: this task alone writes these rows of this head.
            let rows = unsafe { log_sum_exp.piece(at..at + queries.len()) };
            for ((lse, largest), total) in rows.iter_mut().zip(&*work.seen.largest).zip(&*work.seen.total) {
                *lse = largest * std::f32::consts::LN_2 + total.ln();
            }
        }
        let to = self.out.part(e, pair, Q, queries.start);
        let sums = work.sums.chunks_exact(e.stride(self.path.isa));
        by_float!(to.dtype, T => for (row, (sums, total)) in sums.zip(&*work.seen.total).take(queries.len()).enumerate() {
            // SAFETY: as above; the row exists.
            let to = unsafe { std::slice::from_raw_parts_mut(to.at.cast::<T>().add(row * to.stride), e.size) };
            store_row::<T>(self.path.isa, &sums[..e.size], 1.0 / total, to);
        });
    }
}

vectorized!(fn store_row<T: Float>(from: &[f32], factor: f32, to: &mut [T]) = store_row_body);
/// to = from * factor, rounded.
#[inline(always)]
fn store_row_body<L: Lanes, T: Float>(from: &[f32], factor: f32, to: &mut [T]) {
    assert_eq!(from.len(), to.len());
    for (from, to) in from.chunks(16).zip(to.chunks_mut(16)) {
        // SAFETY: compiled for L; the chunks are as long as said.
        unsafe {
            let x = L::mul(lanes::load::<L>(from, 0, from.len()), L::splat(factor));
            if to.len() == 16 {
                T::store::<L>(to.as_mut_ptr(), x);
            } else {
                T::store_first::<L>(to.as_mut_ptr(), x, to.len());
            }
        }
    }
}

vectorized!(fn fade_rows(sums: &mut [f32], stride: usize, fade: &[f32]) = fade_rows_body);
/// Multiplies row i of the sums by `fade[i]`.
#[inline(always)]
fn fade_rows_body<L: Lanes>(sums: &mut [f32], stride: usize, fade: &[f32]) {
    for (sums, fade) in sums.chunks_exact_mut(stride).zip(fade) {
        if *fade == 1.0 {
            continue;
        }
        for x in sums.chunks_exact_mut(16) {
            // SAFETY: compiled for L; 16 numbers.
            unsafe { L::store(x.as_mut_ptr(), L::mul(L::load(x.as_ptr()), L::splat(*fade))) };
        }
    }
}
