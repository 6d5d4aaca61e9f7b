//! Sums over rows: the gradient of a bias, and the pieces that layer norm's parameters need.
//!
//! Rows are cut into blocks by shape alone; each block is summed from zero, row after row, into its line
//! of a table of partial sums, and the lines are added in order. So an element's sum has about
//! `rows / blocks + blocks` roundings instead of `rows`, and is the same for any number of threads.

use super::lanes::Lanes;
use super::shards::Shards;
use super::simd::{Isa, vectorized};
use super::{Cpu, row_grain};

/// Rows of a block: enough elements for a task, at most 64 blocks.
pub(super) fn block_rows(rows: usize, columns: usize) -> usize {
    row_grain(columns).max(rows.div_ceil(64)).max(1)
}

/// `db (+)= sum over rows of dy`; dy `[rows, columns]`, db `[columns]`.
pub(super) fn bias_gradient(cpu: &Cpu, dy: &[f32], db: &mut [f32], accumulate: bool) {
    let columns = db.len();
    let rows = dy.len() / columns.max(1);
    sum_blocks(cpu, rows, columns, [db], accumulate, |isa, rows, [sums]| {
        add_rows(isa, &dy[rows.start * columns..rows.end * columns], sums);
    });
}

vectorized!(fn add_rows(rows: &[f32], sums: &mut [f32]) = add_rows_body);
#[inline(always)]
fn add_rows_body<L: Lanes>(rows: &[f32], sums: &mut [f32]) {
    for row in rows.chunks_exact(sums.len()) {
        for (s, x) in sums.iter_mut().zip(row) {
            *s += *x;
        }
    }
}

/// Calls `block(rows, sums)` once for each block of rows, with `K` lines of zeros to add to, and then adds
/// the blocks' lines in order into `out` (accumulates, or overwrites).
pub(super) fn sum_blocks<const K: usize>(
    cpu: &Cpu,
    rows: usize,
    columns: usize,
    out: [&mut [f32]; K],
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
            // SAFETY: block i alone touches its K lines; the K pieces are disjoint.
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
            if !accumulate {
                out.fill(0.0);
            }
            let out = Shards::new(out);
            let partial = &*partial;
            cpu.over(columns, 512, |range| {
                // SAFETY: ranges are disjoint.
                let out = unsafe { out.piece(range.clone()) };
                add_blocks(cpu.isa, partial, blocks, K * columns, k * columns + range.start, out);
            });
        }
    });
}

vectorized!(fn add_blocks(
    partial: &[f32], blocks: usize, stride: usize, start: usize, out: &mut [f32],
) = add_blocks_body);
/// `out (+)= (((block 0 + block 1) + block 2) + ..)`.
#[inline(always)]
fn add_blocks_body<L: Lanes>(partial: &[f32], blocks: usize, stride: usize, start: usize, out: &mut [f32]) {
    // 64 columns at a time, so that the sums stay in registers.
    for (piece, out) in out.chunks_mut(64).enumerate() {
        let mut sums = [0f32; 64];
        let sums = &mut sums[..out.len()];
        for b in 0..blocks {
            let at = b * stride + start + piece * 64;
            for (s, x) in sums.iter_mut().zip(&partial[at..at + out.len()]) {
                *s += *x;
            }
        }
        for (o, s) in out.iter_mut().zip(sums) {
            *o += *s;
        }
    }
}
