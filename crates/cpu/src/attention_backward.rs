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

mod prefetch;

use std::ops::Range;

use phalanx_tensor::arguments::Dropout;
use phalanx_tensor::{View, ViewMut};

use crate::Cpu;
use crate::attention::{Extents, FEW_PAIRS, Results, cut, scores, total};
use crate::attention_dots::dots;
use crate::attention_registers::{Path, Registers, WIDTH};
use crate::attention_softmax::{Panel, PanelBuffers, QueryRows, probabilities};
use crate::attention_tiles::{Left, Sheet, product, strips, sums, width};
use crate::epilogue::{MatrixPointer, Target};
use crate::float::by_float;
use crate::matrix::Matrix;
use crate::microkernel::{self, Packing};
use crate::random::DropoutMask;
use crate::scratch::with_thread_scratch;
use crate::shards::Shards;

/// Keys and queries of a block.
const BLOCK: usize = 128;

/// Blocks of keys that a task walks over at once when it computes a whole head.
const SPAN: usize = 8;

/// Number of blocks in a round; more if a single head has more.
const ROUND: usize = 32;

/// Index of the part in dqkv and in qkv.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;

/// What the forward pass saved.
#[derive(Clone, Copy)]
pub(crate) struct SavedAttention<'a> {
    /// `[batch, seq, 3 * hidden]`.
    pub(crate) qkv: View<'a>,
    /// `[batch, seq, hidden]`.
    pub(crate) out: View<'a>,
    /// `[batch, heads, seq]`.
    pub(crate) log_sum_exp: View<'a>,
    pub(crate) dropout: Option<Dropout>,
}

/// What all tasks of a backward pass share.
struct Backward<'a> {
    path: Path,
    threads: usize,
    e: Extents,
    qkv: Matrix<'a>,
    out: Matrix<'a>,
    dout: Matrix<'a>,
    log_sum_exp: &'a [f32],
    keep: Option<DropoutMask>,
    dqkv: Results,
}

/// Partial sums of dq, dk and dv of one head, starting at row `first`.
#[derive(Clone, Copy)]
struct Sums {
    at: [*mut f32; 3],
    first: [usize; 3],
}

/// dqkv `[batch, seq, 3 * hidden]` is overwritten; dout `[batch, seq, hidden]`.
pub(crate) fn attention_backward(cpu: &Cpu, e: Extents, saved: SavedAttention, dout: View, dqkv: ViewMut) {
    let backward = Backward {
        path: Path::backward(cpu, [e.seq, e.size], saved.qkv.dtype()),
        threads: cpu.pool.threads(),
        e,
        qkv: Matrix::of(&saved.qkv),
        out: Matrix::of(&saved.out),
        dout: Matrix::of(&dout),
        log_sum_exp: saved.log_sum_exp.as_slice(),
        keep: saved.dropout.filter(|d| d.p > 0.0).map(DropoutMask::new),
        dqkv: Results::new(&dqkv),
    };
    if e.pairs() < FEW_PAIRS && backward.blocks() > 1 {
        backward.in_rounds(cpu);
    } else {
        cpu.pool.run(e.pairs(), &|pair| backward.whole_head(pair));
    }
}

impl<'a> Backward<'a> {
    fn blocks(&self) -> usize {
        self.e.seq.div_ceil(BLOCK)
    }

    /// The rows of some blocks.
    fn rows(&self, blocks: &Range<usize>) -> Range<usize> {
        blocks.start * BLOCK..self.e.seq.min(blocks.end * BLOCK)
    }

    fn stride(&self) -> usize {
        self.e.stride(self.path.isa)
    }

    /// Computes one head of one sample in one task.
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
                self.walk(
                    [Some(pair), Some(pair + self.threads).filter(|p| *p < self.e.pairs())],
                    keys,
                    0..blocks,
                    sums,
                    &mut *scratch,
                );
            }
        });
    }

    /// Computes all heads, with tasks of one block each.
    fn in_rounds(&self, cpu: &Cpu) {
        let blocks = self.blocks();
        let rows = self.e.seq * self.stride();
        let pairs = (ROUND / blocks).clamp(1, self.e.pairs());
        cpu.scratch.with(|buffer| {
            let sums = Shards::new(buffer.slice::<f32>(pairs * 3 * rows));
            for first in (0..self.e.pairs()).step_by(pairs) {
                let pairs = pairs.min(self.e.pairs() - first);
                // Distance in blocks between the keys and the queries of a round.
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
                            self.walk(
                                [Some(first + pair), None],
                                keys..keys + 1,
                                queries..queries + 1,
                                sums,
                                scratch,
                            );
                        });
                    });
                }
            }
        });
    }

    fn lengths(&self, span: usize) -> [[usize; 7]; 2] {
        let (isa, packing, size) = (self.path.isa, self.path.packing, self.e.size);
        let rows = self.e.seq.min(span * BLOCK);
        let block = self.e.seq.min(BLOCK);
        let width = width(isa);
        let along = Sheet::len(isa, rows, packing.packed(size));
        let across = Sheet::len(isa, packing.packed(block), size);
        let turned = Sheet::len(isa, packing.packed(size), block);
        let square = Sheet::len(isa, BLOCK, packing.packed(BLOCK));
        let [k_across, panel] = match packing {
            Packing::Single => [0, 0],
            Packing::Pairs => [Sheet::len(isa, packing.packed(rows), size), BLOCK * width],
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

    /// Computes some blocks of keys with some blocks of queries.
    fn walk(
        &self,
        [pair, after]: [Option<usize>; 2],
        keys: Range<usize>,
        queries: Range<usize>,
        sums: Sums,
        mut scratch: &mut [f32],
    ) {
        let pair = pair.unwrap();
        let (Path { isa, packing, .. }, e) = (self.path, &self.e);
        let [operands, block] = self.lengths(keys.len());
        let [k, v, k_across, q, d, q_across, d_across] = cut(&mut scratch, operands);
        let [log_sum_exp2, delta, p, ds, scores, dp, ds_steps] = cut(&mut scratch, block);
        let rows = self.rows(&keys);
        let block = e.seq.min(BLOCK);
        let along = [k, v].map(|x| Sheet::new(isa, x, rows.len()));
        let across = match packing {
            Packing::Single => along[0],
            Packing::Pairs => Sheet::new(isa, k_across, packing.packed(rows.len())),
        };
        let mut walk = Walk {
            registers: self.path.registers(),
            pair,
            after,
            sums,
            keys: keys.clone(),
            packed: [false; SPAN],
            along,
            across,
            turned: [q, d].map(|x| Sheet::new(isa, x, packing.packed(e.size))),
            queries: [q_across, d_across].map(|x| Sheet::new(isa, x, packing.packed(block))),
            p,
            ds,
            panels: [scores, dp, ds_steps],
            log_sum_exp2,
            delta,
        };
        for query_block in queries.clone() {
            if e.causal && query_block < keys.start {
                continue;
            }
            self.pack_queries(&mut walk, query_block);
            for key_block in keys.clone().rev() {
                if !e.causal || key_block <= query_block {
                    self.pack_keys(&mut walk, key_block);
                    self.block(&mut walk, key_block, query_block, query_block + 1 < queries.end);
                }
            }
        }
    }

    /// Packs a block of queries: q, dout, log_sum_exp, delta.
    fn pack_queries(&self, walk: &mut Walk, block: usize) {
        let (Path { isa, packing, .. }, e) = (self.path, &self.e);
        let rows = self.rows(&(block..block + 1));
        let parts = [e.part(self.qkv, walk.pair, Q, &rows), e.part(self.dout, walk.pair, 0, &rows)];
        for (i, part) in parts.into_iter().enumerate() {
            // SAFETY: the sheets are as long as a block, and this task's.
            unsafe {
                walk.queries[i].pack_across(isa, packing, part, 0);
                walk.turned[i].pack_turned(isa, packing, part);
            }
        }
        let lse = &self.log_sum_exp[walk.pair * e.seq..][rows.clone()];
        let (known, rest) = walk.log_sum_exp2.split_at_mut(rows.len());
        known.iter_mut().zip(lse).for_each(|(to, lse)| *to = lse * std::f32::consts::LOG2_E);
        rest.fill(f32::INFINITY);
        let (delta, rest) = walk.delta.split_at_mut(rows.len());
        rest.fill(0.0);
        let pieces =
            [e.part(self.out, walk.pair, 0, &rows), parts[1]].map(|x| x.block(0..rows.len(), 0..e.size));
        by_float!(pieces[0].dtype, T => {
            let [out, dout] = pieces.map(|x| {
                let len = (rows.len() - 1) * x.step_stride + e.size;
                // SAFETY: `Matrix::piece` has checked the rows, which nobody writes.
                unsafe { std::slice::from_raw_parts(x.from.cast::<T>(), len) }
            });
            dots::<T>(isa, [out, dout], pieces[0].step_stride, e.size, e.scale(), delta);
        });
    }

    /// Packs a block of keys, unless it is packed already.
    fn pack_keys(&self, walk: &mut Walk, block: usize) {
        let index = block - walk.keys.start;
        if walk.packed[index] {
            return;
        }
        walk.packed[index] = true;
        let Path { isa, packing, .. } = self.path;
        let rows = self.rows(&(block..block + 1));
        let [key, value] = [K, V].map(|which| self.e.part(self.qkv, walk.pair, which, &rows));
        let row = index * BLOCK;
        // SAFETY: the sheets are as long as all keys of the walk, and this task's.
        unsafe {
            walk.along[0].pack_along(isa, packing, key, row);
            walk.along[1].pack_along(isa, packing, value, row);
            if packing == Packing::Pairs {
                walk.across.pack_across(isa, packing, key, packing.packed(row));
            }
        }
    }

    /// Computes one block of keys with one block of queries; `more` if the next block of queries comes in the same walk.
    fn block(&self, walk: &mut Walk, key_block: usize, query_block: usize, more: bool) {
        let e = &self.e;
        let [keys, queries] = [key_block, query_block].map(|b| self.rows(&(b..b + 1)));
        let [last_key, first_query] =
            if e.causal { [query_block, key_block] } else { [self.blocks() - 1, 0] };
        let diagonal = e.causal && key_block == query_block;
        for query in queries.clone().step_by(width(self.path.isa)) {
            let rows = query..queries.end.min(query + width(self.path.isa));
            self.prefetch_next(walk, [key_block, query_block], &rows, more);
            let ds = self.panel(walk, &keys, &queries, &rows);
            let ends = [key_block == last_key, key_block == 0];
            self.add_queries(walk, &keys, &rows, diagonal, ds, ends);
        }
        let ends = [query_block == first_query, query_block + 1 == self.blocks()];
        self.add_keys(walk, &keys, queries.len(), diagonal, ends);
    }

    /// Computes p and ds for the panel of queries `rows`; returns ds as a left operand whose steps are keys.
    fn panel(
        &self,
        walk: &mut Walk,
        keys: &Range<usize>,
        queries: &Range<usize>,
        rows: &Range<usize>,
    ) -> Sheet {
        let (Path { isa, packing, .. }, e) = (self.path, &self.e);
        let width = width(isa);
        let index = (rows.start - queries.start) / width;
        let visible = if e.causal { keys.end.min(rows.start + width) } else { keys.end };
        let panel = Panel {
            keys: visible - keys.start,
            diagonal: (e.causal && visible > rows.start).then(|| rows.start - keys.start),
            factor: e.factor(),
            element: e.element(walk.pair, keys.start, rows.start),
            next_key: e.seq as u64,
        };
        let lanes = index * width..(index + 1) * width;
        let rows = QueryRows {
            log_sum_exp2: &walk.log_sum_exp2[lanes.clone()],
            delta: &walk.delta[lanes],
            scale: e.scale(),
        };
        let column = packing.packed(index * width);
        let at = column / width * BLOCK * width + column % width;
        let [p, ds] = [&mut walk.p[at..], &mut walk.ds[at..]].map(|x| x.as_mut_ptr());
        let places = match packing {
            Packing::Single => PanelBuffers { scores: p, dp: ds, p, ds, ds_steps: std::ptr::null_mut() },
            Packing::Pairs => {
                let [scores, dp, ds_steps] = walk.panels.each_mut().map(|x| x.as_mut_ptr());
                PanelBuffers { scores, dp, p, ds, ds_steps }
            }
        };
        let row = (keys.start - walk.keys.start * BLOCK) * width;
        // SAFETY: the sheets were packed for these keys and queries, the buffers are as large as a walk needs.
        unsafe {
            for (which, to) in [(0, places.scores), (1, places.dp)] {
                let right = walk.turned[which];
                let right = right.at(index * right.panel);
                let (left, to) = (walk.along[which].at(row), to.cast_mut());
                if let Some(registers) = &mut walk.registers {
                    let size = [panel.keys, width, packing.packed(e.size)];
                    registers.product(isa, size, Left::Rows(left, 0), right, &sums(to, width, false));
                } else {
                    scores(isa, packing, &panel, e.size, left, right, to);
                }
            }
            probabilities(isa, packing, self.keep.as_ref(), panel, rows, places);
        }
        Sheet { from: if places.ds_steps.is_null() { places.ds } else { places.ds_steps }, panel: 0 }
    }

    /// `to = a · b`, finished as `target` says, on tile registers if the walk has some.
    ///
    /// # Safety
    /// As for [`product`](crate::attention_tiles::product).
    unsafe fn product(&self, walk: &mut Walk, size: [usize; 3], a: Left, b: Sheet, target: &Target) {
        // SAFETY: the caller's promise.
        unsafe {
            match &mut walk.registers {
                Some(registers) => registers.product(self.path.isa, size, a, b, target),
                None => product(self.path.isa, self.path.packing, size, a, b, target),
            }
        }
    }

    /// dq += ds·k for a panel of queries.
    fn add_queries(
        &self,
        walk: &mut Walk,
        keys: &Range<usize>,
        rows: &Range<usize>,
        diagonal: bool,
        ds: Sheet,
        ends: [bool; 2],
    ) {
        let Path { isa, packing, .. } = self.path;
        let right = walk.across.at(packing.packed(keys.start - walk.keys.start * BLOCK) * width(isa));
        let rows_max = if walk.registers.is_some() { WIDTH } else { microkernel::panels(isa).rows };
        for strip in strips(rows.len(), rows_max) {
            let seen = if diagonal { rows.start + strip.end } else { keys.end } - keys.start;
            let (target, columns) = self.target(walk, Q, rows.start + strip.start, ends);
            let size = [strip.len(), columns, packing.packed(seen)];
            let left = Left::Columns(ds.at(strip.start));
            // SAFETY: the sheets hold these keys and queries; the target is this task's alone.
            unsafe { self.product(walk, size, left, right, &target) };
        }
    }

    /// dv += pᵀ·dout, dk += dsᵀ·q.
    fn add_keys(
        &self,
        walk: &mut Walk,
        keys: &Range<usize>,
        queries: usize,
        diagonal: bool,
        ends: [bool; 2],
    ) {
        let Path { isa, packing, .. } = self.path;
        let width = width(isa);
        let depth = packing.packed(queries);
        let rows_max = if walk.registers.is_some() { WIDTH } else { microkernel::panels(isa).rows };
        for (which, left, right) in [(V, 0, walk.queries[1]), (K, 1, walk.queries[0])] {
            let left = Sheet { from: [&walk.p, &walk.ds][left].as_ptr(), panel: BLOCK * width };
            let mut multiply = |top: usize, rows: usize, start: usize| {
                let (target, columns) = self.target(walk, which, keys.start + top, ends);
                let left = left.at(start / width * left.panel + top * width);
                let size = [rows, columns, depth - start];
                // SAFETY: the sheets hold these keys and queries; the target is this task's alone.
                unsafe {
                    let left = Left::Rows(left, start % width);
                    self.product(walk, size, left, right.at(start * width), &target);
                }
            };
            if !diagonal {
                multiply(0, keys.len(), 0);
                continue;
            }
            // With a causal mask, keys from `top` on are visible only to queries from `top` on.
            for group in (0..keys.len()).step_by(width) {
                for strip in strips(width.min(keys.len() - group), rows_max) {
                    let top = group + strip.start;
                    multiply(top, strip.len(), if packing == Packing::Pairs { top / 2 } else { top });
                }
            }
        }
    }

    /// Where the rows of dq, dk or dv starting at `row` are summed: directly in the output or in scratch. `first` and
    /// `last` tell whether this is the first and the last block that adds to them.
    fn target(&self, walk: &Walk, which: usize, row: usize, [first, last]: [bool; 2]) -> (Target, usize) {
        let stride = self.stride();
        let at = walk.sums.at[which].wrapping_add((row - walk.sums.first[which]) * stride);
        let sums = MatrixPointer::of(at, stride);
        let add = if first { MatrixPointer::none() } else { sums };
        if last {
            let to = self.dqkv.part(&self.e, walk.pair, which, row);
            (Target { add, ..Target::new(to) }, self.e.size)
        } else {
            (Target { add, ..Target::new(sums) }, stride)
        }
    }
}

/// The buffers and state with which a task computes its blocks.
struct Walk<'a> {
    registers: Option<Registers>,
    pair: usize,
    /// The head whose first block this thread is likely to take next.
    after: Option<usize>,
    sums: Sums,
    /// Blocks of keys, and how many of them are packed.
    keys: Range<usize>,
    packed: [bool; SPAN],
    /// k and v as left operands.
    along: [Sheet; 2],
    /// k as right operand, steps of keys.
    across: Sheet,
    /// Queries and dout as right operands, steps of the head's size.
    turned: [Sheet; 2],
    /// Queries and dout as right operands, steps of queries.
    queries: [Sheet; 2],
    /// Probabilities and score gradients of a block, as left operands whose steps are queries.
    p: &'a mut [f32],
    ds: &'a mut [f32],
    /// For one panel of (key, query) pairs: scores, dout·vᵀ, and ds as a left operand whose steps are keys.
    panels: [&'a mut [f32]; 3],
    /// One value per query.
    log_sum_exp2: &'a mut [f32],
    delta: &'a mut [f32],
}
