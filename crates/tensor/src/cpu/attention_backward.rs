//! Attention in tiles, backward: probabilities are computed again from `log_sum_exp`.
//!
//! With `p = exp(scale q·kᵀ - lse)`: `dv = pᵀ·dout`, `ds = p * (dout·vᵀ - delta) * scale`, `dk = dsᵀ·q`, `dq =
//! ds·k`, where delta is the sum of `dout * out` of a query. Under dropout p is dropped in dv, dout·vᵀ in ds.
//!
//! The work goes by blocks of keys and queries, all of whose p and ds, `[key][query]`, are kept for the sums over
//! queries. A row of dk and dv takes in the blocks of queries ascending, a row of dq the blocks of keys
//! descending. Many heads are a task each. Few are cut into blocks, in rounds: those of one round lie on one
//! diagonal, so none share a row of any sum, and every row gets its blocks in the same order as in one task.
//!
//! Scratch of a thread: a head's dq, and a few thousand rows of a head. Few heads share one of dq, dk and dv, for
//! 32 blocks or one head.

use std::ops::Range;

use super::Cpu;
use super::attention::{Extents, FEW, Results, cut, scores, total};
use super::attention_softmax::{Panel, Places, Rows, probabilities};
use super::attention_tiles::{Left, Sheet, product, strips, width};
use super::epilogue::{Place, Target};
use super::lanes::{self, Lanes};
use super::matrix::Matrix;
use super::microkernel::{self, Kind};
use super::number::{Number, by_float};
use super::random::Keep;
use super::scratch::with_thread_scratch;
use super::shards::Shards;
use super::simd::{Isa, vectorized};
use crate::buffer::{View, ViewMut};
use crate::kernels::Dropout;

/// Keys and queries of a block.
const BLOCK: usize = 128;

/// Blocks of keys that a task of a whole head takes at a time.
const SPAN: usize = 8;

/// Blocks of one round, as far as one head has no more.
const ROUND: usize = 32;

/// Which part of dqkv, and of qkv.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;

/// What forward knew and kept.
#[derive(Clone, Copy)]
pub(super) struct Saved<'a> {
    /// `[batch, seq, 3 * hidden]`.
    pub(super) qkv: View<'a>,
    /// `[batch, seq, hidden]`.
    pub(super) out: View<'a>,
    /// `[batch, heads, seq]`.
    pub(super) log_sum_exp: View<'a>,
    pub(super) dropout: Option<Dropout>,
}

/// Everything that the tasks know.
struct Backward<'a> {
    isa: Isa,
    kind: Kind,
    e: Extents,
    qkv: Matrix<'a>,
    out: Matrix<'a>,
    dout: Matrix<'a>,
    log_sum_exp: &'a [f32],
    keep: Option<Keep>,
    dqkv: Results,
}

/// Sums of dq, dk, dv of one head on their way, rows from `first` on.
#[derive(Clone, Copy)]
struct Sums {
    at: [*mut f32; 3],
    first: [usize; 3],
}

/// dqkv `[batch, seq, 3 * hidden]` is overwritten; dout `[batch, seq, hidden]`.
pub(super) fn attention_backward(cpu: &Cpu, e: Extents, saved: Saved, dout: View, dqkv: ViewMut) {
    let backward = Backward {
        isa: cpu.isa,
        kind: Kind::of(cpu.isa, saved.qkv.dtype()),
        e,
        qkv: Matrix::of(&saved.qkv),
        out: Matrix::of(&saved.out),
        dout: Matrix::of(&dout),
        log_sum_exp: saved.log_sum_exp.as_slice(),
        keep: saved.dropout.filter(|d| d.p > 0.0).map(Keep::new),
        dqkv: Results::new(&dqkv),
    };
    if e.pairs() < FEW && backward.blocks() > 1 {
        backward.in_rounds(cpu);
    } else {
        cpu.pool.run(e.pairs(), &|pair| backward.whole_head(pair));
    }
}

impl<'a> Backward<'a> {
    fn blocks(&self) -> usize {
        self.e.seq.div_ceil(BLOCK)
    }

    /// Rows of some blocks.
    fn rows(&self, blocks: &Range<usize>) -> Range<usize> {
        blocks.start * BLOCK..self.e.seq.min(blocks.end * BLOCK)
    }

    fn stride(&self) -> usize {
        self.e.stride(self.isa)
    }

    /// A head of a sample in one task.
    fn whole_head(&self, pair: usize) {
        let (blocks, stride) = (self.blocks(), self.stride());
        let span = blocks.min(SPAN);
        let own = [self.e.seq * stride, span * BLOCK * stride, span * BLOCK * stride];
        with_thread_scratch(total(&own) + self.scratch_len(span), |mut scratch| {
            let [dq, dk, dv] = cut(&mut scratch, own);
            let at = [dq, dk, dv].map(|x| x.as_mut_ptr());
            for first in (0..blocks).step_by(span).rev() {
                let keys = first..blocks.min(first + span);
                let sums = Sums { at, first: [0, first * BLOCK, first * BLOCK] };
                self.walk(pair, keys, 0..blocks, sums, &mut *scratch);
            }
        });
    }

    /// All heads, block by block.
    fn in_rounds(&self, cpu: &Cpu) {
        let blocks = self.blocks();
        let rows = self.e.seq * self.stride();
        let pairs = (ROUND / blocks).clamp(1, self.e.pairs());
        cpu.scratch.with(|buffer| {
            let sums = Shards::new(buffer.slice::<f32>(pairs * 3 * rows));
            for first in (0..self.e.pairs()).step_by(pairs) {
                let pairs = pairs.min(self.e.pairs() - first);
                // How many blocks the queries of a round come after its keys.
                let nearest = if self.e.causal { 0 } else { 1 - blocks as isize };
                for distance in nearest..blocks as isize {
                    let apart = distance.unsigned_abs();
                    cpu.pool.run(pairs * (blocks - apart), &|task| {
                        let (pair, block) = (task % pairs, task / pairs);
                        let [keys, queries] =
                            if distance < 0 { [block + apart, block] } else { [block, block + apart] };
                        let at = [0, 1, 2].map(|which| sums.base().wrapping_add((pair * 3 + which) * rows));
                        let sums = Sums { at, first: [0; 3] };
                        with_thread_scratch(self.scratch_len(1), |scratch| {
                            self.walk(first + pair, keys..keys + 1, queries..queries + 1, sums, scratch);
                        });
                    });
                }
            }
        });
    }

    fn lengths(&self, span: usize) -> [[usize; 7]; 2] {
        let (isa, kind, size) = (self.isa, self.kind, self.e.size);
        let rows = self.e.seq.min(span * BLOCK);
        let block = self.e.seq.min(BLOCK);
        let width = width(isa);
        let along = Sheet::len(isa, rows, kind.packed(size));
        let across = Sheet::len(isa, kind.packed(block), size);
        let turned = Sheet::len(isa, kind.packed(size), block);
        let square = Sheet::len(isa, BLOCK, kind.packed(BLOCK));
        let [k_across, panel] = match kind {
            Kind::Single => [0, 0],
            Kind::Pairs => [Sheet::len(isa, kind.packed(rows), size), BLOCK * width],
        };
        let rows = block.next_multiple_of(width);
        [
            [along, along, k_across, turned, turned, across, across],
            [rows, rows, square, square, panel, panel, panel / 2],
        ]
    }

    fn scratch_len(&self, span: usize) -> usize {
        let [operands, block] = self.lengths(span);
        total(&operands) + total(&block)
    }

    /// Some blocks of keys with some blocks of queries.
    fn walk(
        &self,
        pair: usize,
        keys: Range<usize>,
        queries: Range<usize>,
        sums: Sums,
        mut scratch: &mut [f32],
    ) {
        let (isa, kind, e) = (self.isa, self.kind, &self.e);
        let [operands, block] = self.lengths(keys.len());
        let [k, v, k_across, q, d, q_across, d_across] = cut(&mut scratch, operands);
        let [log_sum_exp2, delta, p, ds, scores, dp, ds_steps] = cut(&mut scratch, block);
        let rows = self.rows(&keys);
        let [key, value] = [K, V].map(|which| e.part(self.qkv, pair, which, &rows));
        let along = [Sheet::along(isa, kind, key, k), Sheet::along(isa, kind, value, v)];
        let across = match kind {
            Kind::Single => along[0],
            Kind::Pairs => Sheet::across(isa, kind, key, k_across),
        };
        let mut block = Block {
            pair,
            sums,
            first: rows.start,
            along,
            across,
            turned: [along[0]; 2],
            queries_across: [along[0]; 2],
            p,
            ds,
            panels: [scores, dp, ds_steps],
            log_sum_exp2,
            delta,
        };
        for query_block in queries {
            if e.causal && query_block < keys.start {
                continue;
            }
            let rows = self.rows(&(query_block..query_block + 1));
            let query = e.part(self.qkv, pair, Q, &rows);
            let dout = e.part(self.dout, pair, 0, &rows);
            block.turned = [Sheet::across(isa, kind, query.t(), q), Sheet::across(isa, kind, dout.t(), d)];
            block.queries_across =
                [Sheet::across(isa, kind, query, q_across), Sheet::across(isa, kind, dout, d_across)];
            self.statistics(&mut block, &rows, dout);
            for key_block in keys.clone().rev() {
                if !e.causal || key_block <= query_block {
                    self.block(&mut block, key_block, query_block);
                }
            }
        }
    }

    /// log_sum_exp and delta of the queries `rows`.
    fn statistics(&self, block: &mut Block, rows: &Range<usize>, dout: Matrix) {
        let e = &self.e;
        let lse = &self.log_sum_exp[block.pair * e.seq..][rows.clone()];
        let (known, rest) = block.log_sum_exp2.split_at_mut(rows.len());
        known.iter_mut().zip(lse).for_each(|(to, lse)| *to = lse * std::f32::consts::LOG2_E);
        rest.fill(f32::INFINITY);
        let out = e.part(self.out, block.pair, 0, rows);
        let [out, dout] = [out, dout].map(|x| x.piece(0..rows.len(), 0..e.size));
        by_float!(out.dtype, T => for (row, delta) in block.delta.iter_mut().enumerate().take(rows.len()) {
            // SAFETY: `Matrix::piece` has checked the rows, of `size` numbers each.
            let [out, dout] = [out, dout].map(|x| unsafe {
                std::slice::from_raw_parts(x.from.cast::<T>().add(row * x.step_stride), e.size)
            });
            *delta = dot::<T>(self.isa, out, dout) * e.scale();
        });
        block.delta[rows.len()..].fill(0.0);
    }

    /// One block of keys with one of queries.
    fn block(&self, block: &mut Block, key_block: usize, query_block: usize) {
        let e = &self.e;
        let [keys, queries] = [key_block, query_block].map(|b| self.rows(&(b..b + 1)));
        let [last_key, first_query] =
            if e.causal { [query_block, key_block] } else { [self.blocks() - 1, 0] };
        let diagonal = e.causal && key_block == query_block;
        for query in queries.clone().step_by(width(self.isa)) {
            let rows = query..queries.end.min(query + width(self.isa));
            let ds = self.panel(block, &keys, &queries, &rows);
            let ends = [key_block == last_key, key_block == 0];
            self.add_queries(block, &keys, &rows, diagonal, ds, ends);
        }
        let ends = [query_block == first_query, query_block + 1 == self.blocks()];
        self.add_keys(block, &keys, queries.len(), diagonal, ends);
    }

    /// p and ds of the queries `rows`, a panel; returns ds as left operand, a step a key.
    fn panel(
        &self,
        block: &mut Block,
        keys: &Range<usize>,
        queries: &Range<usize>,
        rows: &Range<usize>,
    ) -> Sheet {
        let (isa, kind, e) = (self.isa, self.kind, &self.e);
        let width = width(isa);
        let index = (rows.start - queries.start) / width;
        let visible = if e.causal { keys.end.min(rows.start + width) } else { keys.end };
        let panel = Panel {
            keys: visible - keys.start,
            diagonal: (e.causal && visible > rows.start).then(|| rows.start - keys.start),
            factor: e.factor(),
            element: e.element(block.pair, keys.start, rows.start),
            next_key: e.seq as u64,
        };
        let lanes = index * width..(index + 1) * width;
        let rows = Rows {
            log_sum_exp2: &block.log_sum_exp2[lanes.clone()],
            delta: &block.delta[lanes],
            scale: e.scale(),
        };
        let column = kind.packed(index * width);
        let at = column / width * BLOCK * width + column % width;
        let [p, ds] = [&mut block.p[at..], &mut block.ds[at..]].map(|x| x.as_mut_ptr());
        let places = match kind {
            Kind::Single => Places { scores: p, dp: ds, p, ds, ds_steps: std::ptr::null_mut() },
            Kind::Pairs => {
                let [scores, dp, ds_steps] = block.panels.each_mut().map(|x| x.as_mut_ptr());
                Places { scores, dp, p, ds, ds_steps }
            }
        };
        let row = (keys.start - block.first) * width;
        // SAFETY: the sheets were packed for these keys and queries, the places are as large as a block.
        unsafe {
            for (which, to) in [(0, places.scores), (1, places.dp)] {
                let right = block.turned[which];
                let right = right.at(index * right.panel);
                scores(isa, kind, [panel.keys, e.size], block.along[which].at(row), right, to.cast_mut());
            }
            probabilities(isa, kind, self.keep.as_ref(), panel, rows, places);
        }
        Sheet { from: if places.ds_steps.is_null() { places.ds } else { places.ds_steps }, panel: 0 }
    }

    /// dq += ds·k of a panel of queries.
    fn add_queries(
        &self,
        block: &Block,
        keys: &Range<usize>,
        rows: &Range<usize>,
        diagonal: bool,
        ds: Sheet,
        ends: [bool; 2],
    ) {
        let (isa, kind) = (self.isa, self.kind);
        let right = block.across.at(kind.packed(keys.start - block.first) * width(isa));
        for strip in strips(rows.len(), microkernel::panels(isa).rows) {
            let seen = if diagonal { rows.start + strip.end } else { keys.end } - keys.start;
            let (target, columns) = self.target(block, Q, rows.start + strip.start, ends);
            let size = [strip.len(), columns, kind.packed(seen)];
            // SAFETY: the sheets hold these keys and queries; the target is this task's alone.
            unsafe { product(isa, kind, size, Left::Columns(ds.at(strip.start)), right, &target) };
        }
    }

    /// dv += pᵀ·dout, dk += dsᵀ·q.
    fn add_keys(&self, block: &Block, keys: &Range<usize>, queries: usize, diagonal: bool, ends: [bool; 2]) {
        let (isa, kind) = (self.isa, self.kind);
        let width = width(isa);
        let depth = kind.packed(queries);
        for (which, left, right) in
            [(V, &block.p, block.queries_across[1]), (K, &block.ds, block.queries_across[0])]
        {
            let left = Sheet::new(isa, left, BLOCK);
            let multiply = |top: usize, rows: usize, start: usize| {
                let (target, columns) = self.target(block, which, keys.start + top, ends);
                let left = left.at(start / width * left.panel + top * width);
                let size = [rows, columns, depth - start];
                // SAFETY: the sheets hold these keys and queries; the target is this task's alone.
                unsafe {
                    let left = Left::Rows(left, start % width);
                    product(isa, kind, size, left, right.at(start * width), &target);
                }
            };
            if !diagonal {
                multiply(0, keys.len(), 0);
                continue;
            }
            // Keys from `top` on are seen by queries from `top` on.
            for group in (0..keys.len()).step_by(width) {
                for strip in strips(width.min(keys.len() - group), microkernel::panels(isa).rows) {
                    let top = group + strip.start;
                    multiply(top, strip.len(), if kind == Kind::Pairs { top / 2 } else { top });
                }
            }
        }
    }

    /// Where rows of dq, dk or dv from `row` on go, with the first and the last of their blocks, and how many
    /// columns.
    fn target(&self, block: &Block, which: usize, row: usize, [first, last]: [bool; 2]) -> (Target, usize) {
        let stride = self.stride();
        let at = block.sums.at[which].wrapping_add((row - block.sums.first[which]) * stride);
        let sums = Place::of(at, stride);
        let add = if first { Place::none() } else { sums };
        if last {
            let to = self.dqkv.part(&self.e, block.pair, which, row);
            (Target { add, ..Target::new(to) }, self.e.size)
        } else {
            (Target { add, ..Target::new(sums) }, stride)
        }
    }
}

/// What the blocks of a walk are computed with.
struct Block<'a> {
    pair: usize,
    sums: Sums,
    /// First key of the walk.
    first: usize,
    /// k and v as left operands.
    along: [Sheet; 2],
    /// k as right operand, steps of keys.
    across: Sheet,
    /// Queries and dout as right operands, steps of the head's size.
    turned: [Sheet; 2],
    /// Queries and dout as right operands, steps of queries.
    queries_across: [Sheet; 2],
    /// Probabilities, and derivatives of the scores, of a block, as left operands along the queries.
    p: &'a mut [f32],
    ds: &'a mut [f32],
    /// Of a panel of pairs: scores, dout·vᵀ, ds as left operand, steps of keys.
    panels: [&'a mut [f32]; 3],
    /// By query.
    log_sum_exp2: &'a mut [f32],
    delta: &'a mut [f32],
}

vectorized!(fn dot<T: Number>(a: &[T], b: &[T]) -> f32 = dot_body);
#[inline(always)]
fn dot_body<L: Lanes, T: Number>(a: &[T], b: &[T]) -> f32 {
    assert_eq!(a.len(), b.len());
    // SAFETY: compiled for L; the vectors lie in both rows.
    unsafe {
        lanes::sum_row!(L, a.len(), |at, count| if count == 16 {
            L::mul(T::load::<L>(a.as_ptr().add(at)), T::load::<L>(b.as_ptr().add(at)))
        } else {
            L::mul(
                T::load_first::<L>(a.as_ptr().add(at), count),
                T::load_first::<L>(b.as_ptr().add(at), count),
            )
        })
    }
}
