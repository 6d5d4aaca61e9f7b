//! Attention in tiles, backward: probabilities are computed again from `log_sum_exp`.
//!
//! With `p = exp(scale q·kᵀ - lse)`: `dv = pᵀ·dout`, `ds = p * (dout·vᵀ - delta) * scale`, `dk = dsᵀ·q`, `dq =
//! ds·k`, where delta is the sum of `dout * out` of a query. Under dropout p is dropped in dv, dout·vᵀ in ds.
//!
//! The work goes by blocks of keys and queries, all of whose p and ds, `[key][query]`, are kept for the sums over
//! queries. A row of dk and dv takes in the heads of its group one after another, of each the blocks of queries
//! ascending; a row of dq the blocks of keys descending. Many groups are a task each. Few are cut into blocks, in
//! rounds: those of one round lie on one diagonal of one head of a group, so none share a row of any sum, and every
//! row gets its blocks in the same order as in one task. Blocks that no query sees are skipped.
//!
//! Scratch of a thread: a head's dq (in groups also dk and dv), and a few thousand rows of a head. Few groups share
//! one of dq, dk and dv, for 32 blocks or one head.

mod walk;

use std::ops::Range;

use phalanx_tensor::arguments::Dropout;
use phalanx_tensor::{View, ViewMut};

use crate::Cpu;
use crate::attention::{FEW_PAIRS, scores};
use crate::attention_dots::dots;
use crate::attention_extents::{Extents, K, Q, Results, V, cut, total};
use crate::attention_panel::Panel;
use crate::attention_registers::{Path, WIDTH};
use crate::attention_softmax::{PanelBuffers, QueryRows, cap, probabilities};
use crate::attention_tiles::{Left, Sheet, product, strips, sums, width};
use crate::epilogue::{MatrixPointer, Target};
use crate::float::by_float;
use crate::matrix::Matrix;
use crate::microkernel::{self, Packing};
use crate::random::DropoutMask;
use crate::scratch::with_thread_scratch;
use crate::shards::Shards;
use walk::{GradientSums, Walk};

/// Keys and queries of a block.
const BLOCK: usize = 128;

/// Blocks of keys that a task walks over at once when it computes a whole head.
const SPAN: usize = 8;

/// Number of blocks in a round; more if a single head has more.
const ROUND: usize = 32;

/// Tensors saved by the forward pass.
#[derive(Clone, Copy)]
pub(crate) struct SavedAttention<'a> {
    /// `[batch, seq, qkv_width]`.
    pub(crate) qkv: View<'a>,
    /// `[batch, seq, out_width]`.
    pub(crate) out: View<'a>,
    /// `[batch, heads, seq]`.
    pub(crate) log_sum_exp: View<'a>,
    pub(crate) dropout: Option<Dropout>,
}

/// Data shared by all tasks of a backward pass.
struct Backward<'a> {
    path: Path,
    threads: usize,
    e: Extents<'a>,
    qkv: Matrix<'a>,
    out: Matrix<'a>,
    dout: Matrix<'a>,
    log_sum_exp: &'a [f32],
    keep: Option<DropoutMask>,
    dqkv: Results,
}

/// dqkv `[batch, seq, qkv_width]` is overwritten; dout `[batch, seq, out_width]`.
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
    if backward.groups() < FEW_PAIRS && backward.blocks() > 1 {
        backward.in_rounds(cpu);
    } else {
        cpu.pool.run(backward.groups(), &|group| backward.whole_group(group));
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

    /// The first head of each sample: documents are those of samples.
    fn samples(&self) -> impl Iterator<Item = usize> {
        (0..self.e.pairs()).step_by(self.e.heads.heads)
    }

    /// Groups of heads that read the same keys and values.
    fn groups(&self) -> usize {
        self.e.batch * self.e.heads.kv_heads
    }

    /// The blocks of keys that a block of queries sees.
    fn keys_of(&self, pair: usize, block: usize) -> Range<usize> {
        let keys = self.e.keys_of(pair, &self.rows(&(block..block + 1)), self.e.seq);
        keys.start / BLOCK..keys.end.div_ceil(BLOCK)
    }

    /// The blocks of queries that see a block of keys.
    fn queries_of(&self, pair: usize, block: usize) -> Range<usize> {
        let queries = self.e.queries_of(pair, &self.rows(&(block..block + 1)));
        queries.start / BLOCK..queries.end.div_ceil(BLOCK)
    }

    fn stride(&self) -> usize {
        self.e.stride(self.path.isa)
    }

    /// Computes one group of heads of one sample in one task.
    fn whole_group(&self, group: usize) {
        let (blocks, stride, heads) = (self.blocks(), self.stride(), self.e.heads.group());
        let span = blocks.min(SPAN);
        // Several heads add to all of dk and dv.
        let kept = if heads == 1 { span } else { blocks };
        let own = [self.e.seq * stride, kept * BLOCK * stride, kept * BLOCK * stride];
        with_thread_scratch(total(&own) + self.scratch_len(span), |mut scratch| {
            let [dq, dk, dv] = cut(&mut scratch, own);
            let at = [dq, dk, dv].map(|x| x.as_mut_ptr());
            for pair in group * heads..(group + 1) * heads {
                let in_group = (pair + 1) % heads != 0;
                let after = if in_group { pair + 1 } else { (group + self.threads) * heads };
                for first in (0..blocks).step_by(span).rev() {
                    let keys = first..blocks.min(first + span);
                    let kept = if heads == 1 { first * BLOCK } else { 0 };
                    let sums = GradientSums { at, first: [0, kept, kept] };
                    let after = Some(after).filter(|pair| *pair < self.e.pairs());
                    self.walk([Some(pair), after], keys, 0..blocks, sums, &mut *scratch);
                }
            }
        });
    }

    /// Computes all heads, with tasks of one block each.
    fn in_rounds(&self, cpu: &Cpu) {
        let (blocks, heads) = (self.blocks(), self.e.heads.group());
        let rows = self.e.seq * self.stride();
        let groups = (ROUND / blocks).clamp(1, self.groups());
        // Largest distances in blocks between the keys and the queries of a round.
        let behind = |block| self.samples().map(move |pair| block - self.keys_of(pair, block).start);
        let behind = (0..blocks).flat_map(behind).max().unwrap_or_default() as isize;
        let ahead = self.e.heads.reach()[1].div_ceil(BLOCK).min(blocks - 1) as isize;
        cpu.scratch.with(|buffer| {
            let sums = Shards::new(buffer.slice::<f32>(groups * 3 * rows));
            for first in (0..self.groups()).step_by(groups) {
                let groups = groups.min(self.groups() - first);
                for (head, distance) in (0..heads).flat_map(|head| (-ahead..=behind).map(move |d| (head, d)))
                {
                    let apart = distance.unsigned_abs();
                    cpu.pool.run(groups * (blocks - apart), &|task| {
                        let (group, block) = (task % groups, task / groups);
                        let [keys, queries] =
                            if distance < 0 { [block + apart, block] } else { [block, block + apart] };
                        let at = [0, 1, 2].map(|which| sums.base().wrapping_add((group * 3 + which) * rows));
                        let sums = GradientSums { at, first: [0; 3] };
                        let pair = (first + group) * heads + head;
                        with_thread_scratch(self.scratch_len(1), |scratch| {
                            let (keys, queries) = (keys..keys + 1, queries..queries + 1);
                            self.walk([Some(pair), None], keys, queries, sums, scratch);
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
        sums: GradientSums,
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
            let seen = self.keys_of(pair, query_block);
            let keys = keys.start.max(seen.start)..keys.end.min(seen.end);
            if keys.is_empty() {
                continue;
            }
            self.pack_queries(&mut walk, query_block);
            for key_block in keys.rev() {
                self.pack_keys(&mut walk, key_block);
                self.block(&mut walk, key_block, query_block, query_block + 1 < queries.end);
            }
        }
    }

    /// Packs a block of queries: q, dout, log_sum_exp, delta.
    fn pack_queries(&self, walk: &mut Walk, block: usize) {
        let (Path { isa, packing, .. }, e) = (self.path, &self.e);
        let rows = self.rows(&(block..block + 1));
        let parts = [e.part(self.qkv, walk.pair, Q, &rows), e.part(self.dout, walk.pair, Q, &rows)];
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
            [e.part(self.out, walk.pair, Q, &rows), parts[1]].map(|x| x.block(0..rows.len(), 0..e.size));
        by_float!(pieces[0].dtype, T => {
            let [out, dout] = pieces.map(|x| {
                let len = (rows.len() - 1) * x.step_stride + e.size;
                // SAFETY: `Matrix::piece` has checked the rows, which nobody writes.
                unsafe { std::slice::from_raw_parts(x.from.cast::<T>(), len) }
            });
            dots::<T>(isa, [out, dout], pieces[0].step_stride, e.size, e.heads.scale, delta);
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
        let (seen, seeing) = (self.keys_of(walk.pair, query_block), self.queries_of(walk.pair, key_block));
        let diagonal = e.heads.causal && key_block == query_block;
        for query in queries.clone().step_by(width(self.path.isa)) {
            let rows = query..queries.end.min(query + width(self.path.isa));
            self.prefetch_next(walk, [key_block, query_block], &rows, more);
            let ds = self.panel(walk, &keys, &queries, &rows);
            let ends = [key_block + 1 == seen.end, key_block == seen.start];
            self.add_queries(walk, &keys, &rows, diagonal, ds, ends);
        }
        let [before, after] = [walk.pair, walk.pair + 1].map(|pair| pair % e.heads.group() == 0);
        let ends = [before && query_block == seeing.start, after && query_block + 1 == seeing.end];
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
        let visible = if e.heads.causal { keys.end.min(rows.start + width) } else { keys.end };
        let [first, last] = e.sight(rows.start, keys.start);
        let documents = e.document_keys(walk.pair, rows, keys.start);
        let panel = Panel {
            keys: visible - keys.start,
            first,
            last,
            documents: documents.as_ref(),
            factor: e.heads.exponent_factor(),
            element: e.element(walk.pair, keys.start, rows.start),
            next_key: e.seq as u64,
        };
        let lanes = index * width..(index + 1) * width;
        let rows = QueryRows {
            log_sum_exp2: &walk.log_sum_exp2[lanes.clone()],
            delta: &walk.delta[lanes],
            scale: e.heads.scale,
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
            let factor = e.heads.tanh_factor();
            if let Some(factor) = factor {
                let scores = std::slice::from_raw_parts_mut(places.scores.cast_mut(), panel.keys * width);
                cap(isa, scores, factor);
            }
            probabilities(isa, packing, self.keep.as_ref(), factor.is_some(), panel, rows, places);
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

    /// Returns the target of the sums of rows of dq, dk or dv from `row` on, and its columns. Sums are kept in scratch; the
    /// last block writes the output. `first` and `last` are true for the first and the last block that adds to these rows.
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
