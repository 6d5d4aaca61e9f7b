//! Cross entropy of the logits of a linear layer. The logits are never stored, and each part of the vocabulary may be on
//! another device (Megatron-LM's vocabulary-parallel cross entropy).
//!
//! First the statistics: logits = x · w, in f32; while 128 columns of some rows are in the cache, their largest
//! and the sum of their exponentials become the statistics of a *block*, and (in training) the exponentials,
//! relative to the block's largest, are stored. Blocks make the statistics of a row of this part. Then the loss:
//! from the rows of all parts come each row's log-sum-exp and loss, and what a block is multiplied by to be a
//! probability: one pass makes the exponentials derivatives. What follows are products like any other.
//!
//! Exponentials and derivatives are rounded to the compute type, statistics to f32; logits never are. Between
//! them all is f64, and losses are summed in it, row after row.

use std::ops::Range;
use std::slice::ChunksExact;

use phalanx_simd::{Lanes, Number, lanes, vectorized};
use phalanx_tensor::VocabularyStatistics;
use phalanx_tensor::arguments::{CrossEntropy, IGNORED};
use phalanx_tensor::{View, ViewMut};

use crate::elementwise::add_piece;
use crate::float::{Float, by_float};
use crate::matmul::{self, TOGETHER, product_into};
use crate::matrix::Matrix;
use crate::shards::Shards;
use crate::{Cpu, row_grain};

/// Columns of a block of statistics.
const BLOCK: usize = TOGETHER;

/// Statistics of the logits of one row, over a block of columns or over a part of the vocabulary.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct RowStatistics {
    largest: f32,
    /// Sum of the exponentials relative to the largest logit.
    sum: f32,
    /// Sum of the logits, for label smoothing.
    logits: f32,
    /// Logit of the target, or 0 if the target is elsewhere.
    target: f32,
}

/// Combined statistics of several disjoint pieces of a row.
struct Joined {
    largest: f32,
    sum: f64,
    logits: f64,
    target: f64,
}

impl Joined {
    /// Combines the pieces in their order. NaN sums stay NaN.
    fn new<'a>(pieces: impl Iterator<Item = &'a RowStatistics> + Clone) -> Joined {
        let larger = |a: f32, s: &RowStatistics| if s.largest > a { s.largest } else { a };
        let largest = pieces.clone().fold(f32::NEG_INFINITY, larger);
        let mut joined = Joined { largest, sum: 0.0, logits: 0.0, target: 0.0 };
        for piece in pieces {
            joined.sum += f64::from(piece.sum) * f64::from(piece.largest - largest).exp();
            joined.logits += f64::from(piece.logits);
            joined.target += f64::from(piece.target);
        }
        joined
    }

    fn rounded(&self) -> RowStatistics {
        let Joined { largest, sum, logits, target } = *self;
        RowStatistics { largest, sum: sum as f32, logits: logits as f32, target: target as f32 }
    }
}

/// The targets of some rows, for one part of the vocabulary.
#[derive(Clone, Copy)]
pub(crate) struct Targets<'a> {
    pub(crate) ids: &'a [u32],
    /// The part's first class.
    pub(crate) first: usize,
}

impl Targets<'_> {
    /// The index of a row's target within the part's `columns`, if it is one of them.
    fn among(&self, row: usize, columns: &Range<usize>) -> Option<usize> {
        let column = (self.ids[row] as usize).checked_sub(self.first + columns.start)?;
        (column < columns.len()).then_some(column)
    }
}

/// Computes the logits x · w (+ bias), and from them the statistics of blocks and rows and, where given,
/// `exponentials`.
pub(crate) fn statistics(cpu: &Cpu, call: VocabularyStatistics) {
    let VocabularyStatistics { x, w, bias, exponentials, blocks, statistics, .. } = call;
    let targets = Targets { ids: call.targets.as_slice(), first: call.first };
    let [_, columns] = w.in_out();
    let count = columns.div_ceil(BLOCK);
    let blocks: &mut [RowStatistics] = bytemuck::cast_slice_mut(blocks.into_slice::<f32>());
    by_float!(x.dtype(), T => {
        let logits = Logits {
            columns,
            stride: exponentials.as_ref().map_or(columns, |e| e.dims::<2>()[1]),
            targets,
            bias: bias.map(|b| b.as_slice::<T>()),
            exponentials: exponentials.map(|e| Shards::new(e.into_slice::<T>())),
            blocks: Shards::new(&mut *blocks),
        };
        let consume = |rows: Range<usize>, columns: Range<usize>, numbers: &[f32], stride: usize| {
            logits.consume(cpu, rows, columns, numbers.chunks_exact(stride));
        };
        product_into(cpu, Matrix::of(&x), matmul::weight(&w), &consume);
    });
    let blocks = &*blocks;
    let statistics: &mut [RowStatistics] = bytemuck::cast_slice_mut(statistics.into_slice::<f32>());
    cpu.over_mut(statistics, row_grain(4 * count), |rows, statistics| {
        for (row, to) in rows.zip(statistics) {
            *to = Joined::new(blocks[row * count..(row + 1) * count].iter()).rounded();
        }
    });
}

/// The same for stored logits, which are replaced by their exponentials.
pub(crate) fn statistics_of_stored(
    cpu: &Cpu,
    logits: ViewMut,
    targets: Targets,
    blocks: ViewMut,
    statistics: ViewMut,
) {
    let [_, columns] = logits.dims();
    let count = columns.div_ceil(BLOCK);
    let blocks = Shards::new(bytemuck::cast_slice_mut::<f32, RowStatistics>(blocks.into_slice()));
    let statistics: &mut [RowStatistics] = bytemuck::cast_slice_mut(statistics.into_slice::<f32>());
    by_float!(logits.dtype(), T => {
        let logits = Shards::new(logits.into_slice::<T>());
        cpu.over_mut(statistics, row_grain(columns), |rows, statistics| {
            let mut buffer = [0f32; BLOCK];
            for (row, to) in rows.zip(statistics) {
                // SAFETY: ranges of rows are disjoint.
                let (numbers, blocks) = unsafe {
                    (
                        logits.piece(row * columns..(row + 1) * columns),
                        blocks.piece(row * count..(row + 1) * count),
                    )
                };
                for (index, (numbers, place)) in numbers.chunks_mut(BLOCK).zip(blocks.iter_mut()).enumerate() {
                    let wide = &mut buffer[..numbers.len()];
                    wide.iter_mut().zip(numbers.iter()).for_each(|(wide, number)| *wide = number.to_f32());
                    let start = index * BLOCK;
                    let target = targets.among(row, &(start..start + numbers.len()));
                    *place = block(cpu.isa, wide, Some(numbers), target);
                }
                *to = Joined::new(blocks.iter()).rounded();
            }
        });
    });
}

/// Receives blocks of logits and stores their statistics and exponentials.
struct Logits<'a, T> {
    columns: usize,
    /// Elements of a row of exponentials: more than its columns where rows are padded.
    stride: usize,
    targets: Targets<'a>,
    /// `[columns]`
    bias: Option<&'a [T]>,
    /// `[rows, stride]`
    exponentials: Option<Shards<'a, T>>,
    /// `[rows, blocks]`
    blocks: Shards<'a, RowStatistics>,
}

/// Rows between the prefetch of the lines that exponentials are written to and their use. Rows are hundreds of KB apart,
/// so the processor does not fetch the next one by itself.
const ROWS_AHEAD: usize = 4;

impl<T: Float> Logits<'_, T> {
    /// Processes a part of the product, which consists of whole blocks. Each chunk of `numbers` begins with a row.
    fn consume(&self, cpu: &Cpu, rows: Range<usize>, columns: Range<usize>, numbers: ChunksExact<f32>) {
        let count = self.columns.div_ceil(BLOCK);
        let mut buffer = [0f32; BLOCK];
        for (row, numbers) in rows.clone().zip(numbers) {
            if let Some(exponentials) = self.exponentials.as_ref().filter(|_| row + ROWS_AHEAD < rows.end) {
                let at = (row + ROWS_AHEAD) * self.stride;
                prefetch_for_writing(
                    cpu.isa,
                    exponentials.base().wrapping_add(at + columns.start),
                    columns.len(),
                );
            }
            for (start, mut numbers) in
                columns.clone().step_by(BLOCK).zip(numbers[..columns.len()].chunks(BLOCK))
            {
                let block_columns = start..start + numbers.len();
                if let Some(bias) = self.bias {
                    let sums = &mut buffer[..numbers.len()];
                    sums.copy_from_slice(numbers);
                    add_piece(cpu.isa, &bias[block_columns.clone()], sums);
                    numbers = sums;
                }
                let index = row * count + start / BLOCK;
                let at = row * self.stride;
                // The last block has the padding.
                let end = if block_columns.end == self.columns { self.stride } else { block_columns.end };
                // SAFETY: no other call receives this part of the product.
                let (exponentials, place) = unsafe {
                    let exponentials = self.exponentials.as_ref();
                    (
                        exponentials.map(|e| {
                            let (numbers, padding) =
                                e.piece(at + block_columns.start..at + end).split_at_mut(block_columns.len());
                            padding.fill(T::default());
                            numbers
                        }),
                        self.blocks.piece(index..index + 1),
                    )
                };
                let target = self.targets.among(row, &block_columns);
                place[0] = block(cpu.isa, numbers, exponentials, target);
            }
        }
    }
}

/// The inputs of the losses of some rows.
#[derive(Clone, Copy)]
pub(crate) struct LossRows<'a> {
    /// `[parts, rows, 4]`
    pub(crate) statistics: &'a [f32],
    pub(crate) targets: Targets<'a>,
    /// Classes of the whole vocabulary.
    pub(crate) classes: usize,
    pub(crate) numbers: CrossEntropy,
    /// Factors of the rows' derivatives, `[rows]`.
    pub(crate) weights: Option<&'a [f32]>,
}

/// Returns `before` plus the losses of the rows, added in order, and writes each to `of_rows`, if given. The exponentials `[rows, columns]`,
/// where given, become derivatives; they may have padding.
pub(crate) fn loss(
    cpu: &Cpu,
    rows: LossRows,
    blocks: View,
    (columns, exponentials): (usize, Option<ViewMut>),
    of_rows: Option<&mut [f32]>,
    before: f64,
) -> f64 {
    let LossRows { targets, classes, .. } = rows;
    if let Some(target) = targets.ids.iter().find(|&&t| t != IGNORED && t as usize >= classes) {
        panic!("target {target} is outside the vocabulary of {classes}");
    }
    let blocks: &[RowStatistics] = bytemuck::cast_slice(blocks.as_slice::<f32>());
    cpu.scratch.with(|buffer| {
        let losses = buffer.slice::<f64>(targets.ids.len());
        match exponentials {
            None => {
                let grain = row_grain(4 * rows.parts());
                cpu.over_mut(losses, grain, |range, losses| {
                    range.zip(losses).for_each(|(row, loss)| *loss = rows.row(row).map_or(0.0, |r| r.loss));
                });
            }
            Some(exponentials) => {
                let [_, stride] = exponentials.dims();
                by_float!(exponentials.dtype(), T => {
                    differentiate::<T>(cpu, rows, [columns, stride], blocks, exponentials.into_slice(), losses);
                });
            }
        }
        of_rows.into_iter().flatten().zip(&*losses).for_each(|(to, loss)| *to = *loss as f32);
        losses.iter().fold(before, |sum, loss| sum + loss)
    })
}

/// Turns exponentials into derivatives and computes the loss of each row.
fn differentiate<T: Float>(
    cpu: &Cpu,
    rows: LossRows,
    [columns, stride]: [usize; 2],
    blocks: &[RowStatistics],
    exponentials: &mut [T],
    losses: &mut [f64],
) {
    let count = columns.div_ceil(BLOCK);
    let exponentials = Shards::new(exponentials);
    cpu.over_mut(losses, row_grain(columns), |range, losses| {
        for (row, loss) in range.zip(losses) {
            // SAFETY: ranges of rows are disjoint.
            let exponentials = unsafe { exponentials.piece(row * stride..row * stride + columns) };
            let Some(of) = rows.row(row) else {
                exponentials.fill(T::default());
                *loss = 0.0;
                continue;
            };
            *loss = of.loss;
            let target = rows.targets.among(row, &(0..columns));
            let blocks = &blocks[row * count..(row + 1) * count];
            for (index, (b, e)) in blocks.iter().zip(exponentials.chunks_mut(BLOCK)).enumerate() {
                let factor = (of.weight * f64::from(b.largest - of.largest).exp()) as f32;
                let target = target.and_then(|t| t.checked_sub(index * BLOCK)).filter(|t| *t < e.len());
                derivatives(cpu.isa, e, factor, of.spread, target.map(|t| (t, of.at_target)));
            }
        }
    });
}

/// The statistics of one row over all parts of the vocabulary.
struct LossRow {
    loss: f64,
    /// Largest logit.
    largest: f32,
    /// Factor for exponentials relative to the largest logit.
    weight: f64,
    /// Number subtracted from every derivative.
    spread: f32,
    at_target: f32,
}

impl LossRows<'_> {
    fn parts(&self) -> usize {
        self.statistics.len() / (4 * self.targets.ids.len()).max(1)
    }

    /// None for a row whose target is ignored.
    fn row(&self, row: usize) -> Option<LossRow> {
        let rows = self.targets.ids.len();
        if self.targets.ids[row] == IGNORED {
            return None;
        }
        let statistics: &[RowStatistics] = bytemuck::cast_slice(self.statistics);
        let Joined { largest, sum, logits, target } = Joined::new(statistics[row..].iter().step_by(rows));
        let CrossEntropy { gradient_scale, label_smoothing, z_loss, .. } = self.numbers;
        let (smoothing, z_loss) = (f64::from(label_smoothing), f64::from(z_loss));
        let log_sum_exp = sum.ln() + f64::from(largest);
        let mean = logits / self.classes as f64;
        let loss = (1.0 - smoothing) * (log_sum_exp - target)
            + smoothing * (log_sum_exp - mean)
            + z_loss * log_sum_exp * log_sum_exp;
        let scale = f64::from(gradient_scale) * self.weights.map_or(1.0, |weights| f64::from(weights[row]));
        Some(LossRow {
            loss,
            largest,
            weight: scale * (1.0 + 2.0 * z_loss * log_sum_exp) / sum,
            spread: (scale * smoothing / self.classes as f64) as f32,
            at_target: (scale * (1.0 - smoothing)) as f32,
        })
    }
}

vectorized!(fn prefetch_for_writing<T: Float>(from: *mut T, count: usize) = prefetch_for_writing_body);
/// Asks for the lines of `count` elements, which are going to be written.
#[inline(always)]
fn prefetch_for_writing_body<L: Lanes, T: Float>(from: *mut T, count: usize) {
    const LINE: usize = 64;
    for byte in (0..count * size_of::<T>() + LINE - 1).step_by(LINE) {
        // SAFETY: compiled for L; a hint, for any address.
        unsafe { L::prefetch_write(from.cast::<u8>().wrapping_add(byte).cast()) };
    }
}

vectorized!(fn block<T: Float>(
    logits: &[f32], exponentials: Option<&mut [T]>, target: Option<usize>,
) -> RowStatistics = block_body);
/// Computes the statistics of one row of a block, and its exponentials.
#[inline(always)]
fn block_body<L: Lanes, T: Float>(
    logits: &[f32],
    exponentials: Option<&mut [T]>,
    target: Option<usize>,
) -> RowStatistics {
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
        RowStatistics { largest, sum, logits: total, target: target.map_or(0.0, |t| logits[t]) }
    }
}

vectorized!(fn derivatives<T: Float>(
    logits: &mut [T], factor: f32, spread: f32, target: Option<(usize, f32)>,
) = derivatives_body);
/// `e * factor - spread`, minus the target's share at the target.
#[inline(always)]
fn derivatives_body<L: Lanes, T: Float>(
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
