//! Linear and cross entropy in one, in slices of rows (Liger Kernel's fused linear cross entropy), so that
//! the logits of all tokens never exist at once.
//!
//! A slice: logits = x · w, in f32 and never stored: while 128 columns of some rows are in the cache, their
//! largest and the sum of their exponentials become the statistics of a *block*, and (in training) the
//! exponentials, relative to the block's largest, are stored. From the blocks' statistics come each row's
//! log-sum-exp and loss, and what a block is multiplied by to be a probability: one pass makes the exponentials
//! derivatives. Then `dx = dlogits · wᵀ` and `dw (+)= xᵀ · dlogits`. Losses are summed in f64, row after row.
//!
//! Exponentials and derivatives are rounded to the compute type; logits themselves never are.

use std::ops::Range;

use super::lanes::{self, Lanes};
use super::matmul::{self, TOGETHER, product, product_into};
use super::matrix::Matrix;
use super::number::{Number, by_float};
use super::shards::Shards;
use super::simd::vectorized;
use super::{Cpu, row_grain};
use crate::buffer::{View, ViewMut};
use crate::kernels::{CrossEntropy, CrossEntropyGradients, Kernels, Layout, Weight};

/// Columns of a block of statistics.
const BLOCK: usize = TOGETHER;

/// See the module's head; shapes as in [`Kernels`](crate::kernels::Kernels).
pub(super) fn linear_cross_entropy(
    cpu: &Cpu,
    x: View,
    w: Weight,
    targets: &[u32],
    numbers: CrossEntropy,
    mut exponentials: ViewMut,
    loss: ViewMut,
    gradients: Option<CrossEntropyGradients>,
) {
    let [rows, hidden] = x.shape().rows_cols();
    let [slice, vocab] = exponentials.dims();
    assert!(slice > 0 || rows == 0, "logits have no rows");
    if let Some(target) = targets.iter().find(|&&t| t as usize >= vocab) {
        panic!("target {target} in a vocabulary of {vocab}");
    }
    let x = x.reshape([rows * hidden]);
    let matrix = matmul::weight(&w);
    let mut gradients = gradients.map(|g| (g.dx.reshape([rows * hidden]), g.dw, g.accumulate));
    let mut sum = 0f64;
    if let (0, Some((_, dw, false))) = (rows, &mut gradients) {
        cpu.fill(dw.reborrow(), 0.0);
    }
    for start in (0..rows).step_by(slice.max(1)) {
        let range = start..rows.min(start + slice);
        let flat = range.start * hidden..range.end * hidden;
        let x = x.range(flat.clone()).reshape([range.len(), hidden]);
        let x = Matrix::of(&x);
        let mut logits = exponentials.reborrow().range(0..range.len() * vocab).reshape([range.len(), vocab]);
        let slice =
            Slice { x, w: matrix, targets: &targets[range.clone()], numbers, train: gradients.is_some() };
        sum += by_float!(logits.dtype(), T => slice.losses(cpu, logits.reborrow().into_slice::<T>()));
        if let Some((dx, dw, accumulate)) = &mut gradients {
            let logits = logits.as_view();
            let logits = Matrix::of(&logits);
            product(cpu, logits, matrix.t(), dx.reborrow().range(flat), false);
            let accumulate = *accumulate || start > 0;
            match w.layout {
                Layout::InOut => product(cpu, x.t(), logits, dw.reborrow(), accumulate),
                Layout::OutIn => product(cpu, logits.t(), x, dw.reborrow(), accumulate),
            }
        }
    }
    loss.into_slice::<f32>()[0] = (sum * f64::from(numbers.scale)) as f32;
}

/// Some rows of the input and their targets.
struct Slice<'a> {
    /// `[rows, hidden]`
    x: Matrix<'a>,
    /// `[hidden, vocab]`
    w: Matrix<'a>,
    targets: &'a [u32],
    numbers: CrossEntropy,
    /// Whether the logits become derivatives.
    train: bool,
}

/// Of the logits of one row in one block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    largest: f32,
    /// Of exponentials relative to the largest.
    sum: f32,
    /// Of the logits, for label smoothing.
    logits: f32,
    /// Logit of the target, if the block has it.
    target: f32,
}

impl Slice<'_> {
    /// The sum of the rows' losses; when training, the logits become derivatives.
    fn losses<T: Number>(&self, cpu: &Cpu, logits: &mut [T]) -> f64 {
        let rows = self.targets.len();
        let [_, vocab] = self.w.shape();
        let blocks = vocab.div_ceil(BLOCK);
        cpu.scratch.with(|buffer| {
            let all = buffer.slice::<f64>(rows * (1 + blocks * size_of::<Block>() / 8));
            let (losses, statistics) = all.split_at_mut(rows);
            let statistics: &mut [Block] = bytemuck::cast_slice_mut(statistics);
            self.exponentials(cpu, logits, &Shards::new(statistics));
            let (logits, losses_of) = (Shards::new(logits), Shards::new(&mut *losses));
            cpu.over(rows, row_grain(vocab), |range| {
                for row in range {
                    let statistics = &statistics[row * blocks..(row + 1) * blocks];
                    // SAFETY: ranges of rows are disjoint.
                    let (logits, loss) = unsafe {
                        (logits.piece(row * vocab..(row + 1) * vocab), losses_of.piece(row..row + 1))
                    };
                    loss[0] = self.finish_row(cpu, row, statistics, logits);
                }
            });
            losses.iter().sum()
        })
    }

    /// Logits of all rows as exponentials (in training), and the statistics of their blocks, `[rows, blocks]`.
    fn exponentials<T: Number>(&self, cpu: &Cpu, logits: &mut [T], statistics: &Shards<Block>) {
        let [_, vocab] = self.w.shape();
        let blocks = vocab.div_ceil(BLOCK);
        let logits = Shards::new(logits);
        let consume = |rows: Range<usize>, columns: Range<usize>, numbers: &[f32]| {
            for (row, numbers) in rows.zip(numbers.chunks_exact(columns.len())) {
                for start in columns.clone().step_by(BLOCK) {
                    let end = columns.end.min(start + BLOCK);
                    let index = row * blocks + start / BLOCK;
                    // SAFETY: this part of the product is fed to nobody else; it consists of whole blocks.
                    let (logits, place) = unsafe {
                        (
                            logits.piece(row * vocab + start..row * vocab + end),
                            statistics.piece(index..index + 1),
                        )
                    };
                    let target = (self.targets[row] as usize).checked_sub(start);
                    let target = target.filter(|t| *t < end - start);
                    let numbers = &numbers[start - columns.start..end - columns.start];
                    place[0] = block(cpu.isa, numbers, self.train.then_some(logits), target);
                }
            }
        };
        product_into(cpu, self.x, self.w, &consume);
    }

    /// Loss of one row; when training, its exponentials become derivatives.
    fn finish_row<T: Number>(&self, cpu: &Cpu, row: usize, blocks: &[Block], logits: &mut [T]) -> f64 {
        let CrossEntropy { gradient_scale, label_smoothing, z_loss, .. } = self.numbers;
        let (smoothing, z_loss) = (f64::from(label_smoothing), f64::from(z_loss));
        let target = self.targets[row] as usize;
        let largest = blocks.iter().fold(f32::NEG_INFINITY, |a, b| if b.largest > a { b.largest } else { a });
        let part = |b: &Block| f64::from(b.sum) * f64::from(b.largest - largest).exp();
        let sum: f64 = blocks.iter().map(part).sum();
        let log_sum_exp = sum.ln() + f64::from(largest);
        let mean = blocks.iter().map(|b| f64::from(b.logits)).sum::<f64>() / logits.len() as f64;
        let at_target = f64::from(blocks[target / BLOCK].target);
        let loss = (1.0 - smoothing) * (log_sum_exp - at_target)
            + smoothing * (log_sum_exp - mean)
            + z_loss * log_sum_exp * log_sum_exp;
        if self.train {
            let scale = f64::from(gradient_scale);
            let weight = scale * (1.0 + 2.0 * z_loss * log_sum_exp) / sum;
            let spread = (scale * smoothing / logits.len() as f64) as f32;
            for (index, (b, logits)) in blocks.iter().zip(logits.chunks_mut(BLOCK)).enumerate() {
                let factor = (weight * f64::from(b.largest - largest).exp()) as f32;
                let target = target.checked_sub(index * BLOCK).filter(|t| *t < logits.len());
                let at_target = (scale * (1.0 - smoothing)) as f32;
                derivatives(cpu.isa, logits, factor, spread, target.map(|t| (t, at_target)));
            }
        }
        loss
    }
}

vectorized!(fn block<T: Number>(
    logits: &[f32], exponentials: Option<&mut [T]>, target: Option<usize>,
) -> Block = block_body);
/// Statistics of one row of a block, and its exponentials.
#[inline(always)]
fn block_body<L: Lanes, T: Number>(
    logits: &[f32],
    exponentials: Option<&mut [T]>,
    target: Option<usize>,
) -> Block {
    let to = exponentials.map_or(std::ptr::null_mut(), |e| {
        assert_eq!(e.len(), logits.len());
        e.as_mut_ptr()
    });
    // SAFETY: compiled for L; all vectors lie in the row, which is as long as the exponentials.
    unsafe {
        let largest = lanes::max_row::<L>(logits);
        let total = lanes::sum_row!(L, logits.len(), |at, count| lanes::load::<L>(logits, at, count));
        let sum = lanes::sum_row!(L, logits.len(), |at, count| {
            let e = lanes::exp::<L>(L::sub(lanes::load::<L>(logits, at, count), L::splat(largest)));
            if !to.is_null() {
                if count == 16 {
                    T::store::<L>(to.add(at), e)
                } else {
                    T::store_first::<L>(to.add(at), e, count)
                }
            }
            e
        });
        Block { largest, sum, logits: total, target: target.map_or(0.0, |t| logits[t]) }
    }
}

vectorized!(fn derivatives<T: Number>(
    logits: &mut [T], factor: f32, spread: f32, target: Option<(usize, f32)>,
) = derivatives_body);
/// `e * factor - spread`, less the target's share at the target.
#[inline(always)]
fn derivatives_body<L: Lanes, T: Number>(
    logits: &mut [T],
    factor: f32,
    spread: f32,
    target: Option<(usize, f32)>,
) {
    let at_target = target.map(|(t, share)| (t, L::fused(logits[t].to_f32(), factor, -spread) - share));
    for at in (0..logits.len()).step_by(16) {
        let count = (logits.len() - at).min(16);
        // SAFETY: compiled for L; `count` numbers lie in the row.
        unsafe {
            let place = logits.as_mut_ptr().add(at);
            let (factor, spread) = (L::splat(factor), L::splat(-spread));
            if count == 16 {
                T::store::<L>(place, L::mul_add(T::load::<L>(place), factor, spread));
            } else {
                T::store_first::<L>(
                    place,
                    L::mul_add(T::load_first::<L>(place, count), factor, spread),
                    count,
                );
            }
        }
    }
    if let Some((t, derivative)) = at_target {
        logits[t] = T::from_f32(derivative);
    }
}
