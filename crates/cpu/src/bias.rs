//! Sums over rows: the gradient of a bias, and the pieces that layer norm's parameters need.
//!
//! Rows are cut into blocks by shape alone; each block is summed in f32 from zero, row after row, into its
//! line of a table of partial sums, and the lines are added in order. So an element's sum has about `rows /
//! blocks + blocks` roundings instead of `rows`, and is the same for any number of threads.

use phalanx_simd::{Isa, Lanes, lanes, vectorized};
use phalanx_tensor::{View, ViewMut};

use crate::elementwise::{by_lanes, load, put};
use crate::float::{Float, by_float};
use crate::shards::Shards;
use crate::{Cpu, row_grain};

/// Columns that a task of the last step sums.
const STRIP: usize = 512;

/// Rows of a block: enough elements for a task, at most 64 blocks.
fn block_rows(rows: usize, columns: usize) -> usize {
    row_grain(columns).max(rows.div_ceil(64)).max(1)
}

/// `db (+)= sum over rows of dy`; dy `[rows, columns]` (or with padding), db `[columns]`.
pub(crate) fn bias_gradient(cpu: &Cpu, dy: View, db: ViewMut, accumulate: bool) {
    let [rows, stride] = dy.shape().rows_cols();
    let columns = db.elements();
    by_float!(dy.dtype(), T => {
        let dy = dy.as_slice::<T>();
        sum_blocks(cpu, rows, columns, [Some(db)], accumulate, |isa, rows, [sums]| {
            add_rows(isa, &dy[rows.start * stride..rows.end * stride], stride, sums);
        });
    });
}

vectorized!(fn add_rows<T: Float>(rows: &[T], stride: usize, sums: &mut [f32]) = add_rows_body);
#[inline(always)]
fn add_rows_body<L: Lanes, T: Float>(rows: &[T], stride: usize, sums: &mut [f32]) {
    let width = sums.len();
    assert!(width <= stride, "rows of {stride} elements for {width} sums");
    for row in rows.chunks_exact(stride) {
        // SAFETY: compiled for L; the sums are `width` numbers, and a row has as many or more.
        unsafe {
            by_lanes!(width, |at, count| {
                let sum = L::add(lanes::load::<L>(sums, at, count), load::<L, T>(row, at, count));
                lanes::store::<L>(sums, at, sum, count);
            });
        }
    }
}

/// Calls `block(rows, sums)` once per block of rows, with `K` zeroed lines to add to. Then sums the lines of all blocks
/// in order and writes the rounded sum to `out` (accumulates or overwrites), where it is wanted.
pub(crate) fn sum_blocks<const K: usize>(
    cpu: &Cpu,
    rows: usize,
    columns: usize,
    out: [Option<ViewMut>; K],
    accumulate: bool,
    block: impl Fn(Isa, std::ops::Range<usize>, [&mut [f32]; K]) + Sync,
) {
    let grain = block_rows(rows, columns);
    let blocks = rows.div_ceil(grain);
    cpu.scratch.with(|buffer| {
        let partial = buffer.slice::<f32>(blocks * K * columns);
        let shards = Shards::new(partial);
        cpu.over(rows, grain, |range| {
            let base = range.start / grain * K * columns;
            // SAFETY: only block i uses its K lines; the K pieces are disjoint.
            let sums = std::array::from_fn(|k| unsafe {
                shards.piece(base + k * columns..base + (k + 1) * columns)
            });
            let sums = sums.map(|line: &mut [f32]| {
                line.fill(0.0);
                line
            });
            block(cpu.isa, range, sums);
        });
        for (k, out) in out.into_iter().enumerate() {
            let Some(out) = out else { continue };
            let partial = &*partial;
            by_float!(out.dtype(), P => cpu.over_mut(out.into_slice::<P>(), STRIP, |range, out| {
                let mut sums = [0f32; STRIP];
                let sums = &mut sums[..out.len()];
                add_blocks(cpu.isa, partial, blocks, K * columns, k * columns + range.start, sums);
                put(cpu.isa, sums, out, accumulate);
            }));
        }
    });
}

vectorized!(fn add_blocks(
    partial: &[f32], blocks: usize, stride: usize, start: usize, sums: &mut [f32],
) = add_blocks_body);
/// `sums = ((block 0 + block 1) + block 2) + ..`.
#[inline(always)]
#[expect(
    clippy::extra_unused_type_parameters,
    reason = "the compiler makes the vectors; L only selects them"
)]
fn add_blocks_body<L: Lanes>(partial: &[f32], blocks: usize, stride: usize, start: usize, sums: &mut [f32]) {
    // 64 columns at once, so that the sums stay in registers.
    for (piece, out) in sums.chunks_mut(64).enumerate() {
        let mut sums = [0f32; 64];
        let sums = &mut sums[..out.len()];
        for b in 0..blocks {
            let at = b * stride + start + piece * 64;
            for (s, x) in sums.iter_mut().zip(&partial[at..at + out.len()]) {
                *s += *x;
            }
        }
        out.copy_from_slice(sums);
    }
}
