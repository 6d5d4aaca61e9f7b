//! Magnitudes of the outputs of a linear layer (DoRA): norms of weights with what an adapter adds, and columns over them.
//!
//! The norm reads a weight once, and adds the adapter's product to it in registers: nothing as large as the weight is written. Loops over
//! rows of activations are bound by memory.
#![allow(clippy::too_many_arguments, reason = "kernels take slices and numbers")]

use phalanx_simd::{Lanes, lanes, vectorized};
use phalanx_tensor::Layout;
use phalanx_tensor::operations::{Rescale, RescaleGradient, WeightSquares};

use crate::bias::sum_blocks;
use crate::elementwise::{by_lanes, load, store};
use crate::float::{Float, by_float};
use crate::shards::Shards;
use crate::{Cpu, row_grain};

/// Vectors of a row that are computed together: a factor of the product serves all of them.
const VECTORS: usize = 4;

/// Rows of a weight `[in, out]` of which one vector of columns is computed together.
const ROWS: usize = 32;

/// Columns whose factors lie on the stack while rows pass.
const STRIP: usize = 256;

/// A weight `[.., ..]`, a `[rank, in]`, b `[out, rank]`, and the factor of their product.
#[derive(Clone, Copy)]
struct Adapted<'a, T> {
    w: &'a [T],
    a: &'a [T],
    b: &'a [T],
    /// Inputs, outputs, rank.
    extents: [usize; 3],
    scale: f32,
}

/// `squares` = sums over inputs of `(w + scale * b · a)²` (overwrites).
pub(crate) fn weight_squares(cpu: &Cpu, call: WeightSquares) {
    let (extents @ [inputs, ..], WeightSquares { w, a, b, scale, squares }) = (call.extents(), call);
    by_float!(a.dtype(), T => {
        let (layout, w) = (w.layout, w.matrix.as_slice::<T>());
        let adapted = Adapted { w, a: a.as_slice::<T>(), b: b.as_slice::<T>(), extents, scale };
        let grain = row_grain(inputs).next_multiple_of(16);
        cpu.over_mut(squares.into_slice::<f32>(), grain, |range, out| match layout {
            Layout::OutIn => row_squares(cpu.isa, adapted, range.start, out),
            Layout::InOut => column_squares(cpu.isa, adapted, range.start, out),
        });
    });
}

vectorized!(fn row_squares<T: Float>(adapted: Adapted<'_, T>, first: usize, out: &mut [f32]) = row_squares_body);
#[inline(always)]
fn row_squares_body<L: Lanes, T: Float>(adapted: Adapted<'_, T>, first: usize, out: &mut [f32]) {
    let Adapted { w, a, b, extents: [inputs, _, width], scale } = adapted;
    for (row, square) in (first..).zip(out) {
        let (w, b) = (&w[row * inputs..][..inputs], &b[row * width..][..width]);
        // SAFETY: compiled for L; w and the rows of a have `inputs` elements.
        unsafe {
            let mut sums = [L::splat(0.0); VECTORS];
            for start in (0..inputs).step_by(16 * VECTORS) {
                let mut values = [L::splat(0.0); VECTORS];
                for (v, value) in values.iter_mut().enumerate() {
                    let (at, count) = (start + 16 * v, inputs.saturating_sub(start + 16 * v).min(16));
                    if count > 0 {
                        *value = load::<L, T>(w, at, count);
                    }
                }
                for (k, factor) in b.iter().enumerate() {
                    let (factor, a) = (L::splat(scale * factor.to_f32()), &a[k * inputs..][..inputs]);
                    for (v, value) in values.iter_mut().enumerate() {
                        let (at, count) = (start + 16 * v, inputs.saturating_sub(start + 16 * v).min(16));
                        if count > 0 {
                            *value = L::mul_add(factor, load::<L, T>(a, at, count), *value);
                        }
                    }
                }
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = L::mul_add(value, value, *sum);
                }
            }
            let [s, t, u, v] = sums;
            *square = lanes::sum::<L>(L::add(L::add(s, t), L::add(u, v)));
        }
    }
}

vectorized!(fn column_squares<T: Float>(adapted: Adapted<'_, T>, first: usize, out: &mut [f32]) = column_squares_body);
#[inline(always)]
fn column_squares_body<L: Lanes, T: Float>(adapted: Adapted<'_, T>, first: usize, out: &mut [f32]) {
    let Adapted { w, a, b, extents: [inputs, outputs, width], scale } = adapted;
    for (number, squares) in out.chunks_mut(16).enumerate() {
        let (column, count) = (first + 16 * number, squares.len());
        // SAFETY: compiled for L; rows of w have `outputs` elements, of which there are `count` from `column` on.
        unsafe {
            let mut sum = L::splat(0.0);
            for start in (0..inputs).step_by(ROWS) {
                let rows = ROWS.min(inputs - start);
                let mut values = [L::splat(0.0); ROWS];
                for (i, value) in values[..rows].iter_mut().enumerate() {
                    *value = load::<L, T>(w, (start + i) * outputs + column, count);
                }
                for k in 0..width {
                    let mut factors = [0f32; 16];
                    for (j, factor) in factors[..count].iter_mut().enumerate() {
                        *factor = scale * b[(column + j) * width + k].to_f32();
                    }
                    let (factors, a) = (L::load(factors.as_ptr()), &a[k * inputs + start..][..rows]);
                    for (value, a) in values.iter_mut().zip(a) {
                        *value = L::mul_add(factors, L::splat(a.to_f32()), *value);
                    }
                }
                for value in values {
                    sum = L::mul_add(value, value, sum);
                }
            }
            lanes::store::<L>(squares, 0, sum, count);
        }
    }
}

/// Numbers for each of some columns.
#[derive(Clone, Copy)]
struct Columns<'a, T> {
    /// Elements of a row of activations, and the first of the columns.
    stride: usize,
    first: usize,
    squares: &'a [f32],
    bias: Option<&'a [T]>,
}

impl<T: Float> Columns<'_, T> {
    /// Fills factors and biases of the columns from `start` on; a factor is `of(column) / sqrt(square)`.
    #[inline(always)]
    fn fill(&self, start: usize, factors: &mut [f32], biases: &mut [f32], of: impl Fn(usize) -> f32) {
        for (j, (factor, to)) in (start..).zip(factors.iter_mut().zip(biases)) {
            let square = self.squares[j];
            *factor = if square > 0.0 { of(j) / square.sqrt() } else { 0.0 };
            *to = self.bias.map_or(0.0, |bias| bias[j].to_f32());
        }
    }
}

/// `y = (x - bias) * magnitude / sqrt(square) + bias` in the columns.
pub(crate) fn rescale(cpu: &Cpu, call: Rescale) {
    let Rescale { x, first, magnitudes, squares, bias, y } = call;
    let [rows, stride] = x.shape().rows_cols();
    by_float!(x.dtype(), T => {
        let bias = bias.map(|bias| bias.as_slice::<T>());
        let columns = Columns { stride, first, squares: squares.as_slice(), bias };
        let (x, magnitudes, y) = (x.as_slice::<T>(), magnitudes.as_slice::<T>(), Shards::new(y.into_slice::<T>()));
        cpu.over(rows, row_grain(magnitudes.len()), |rows| {
            let flat = rows.start * stride..rows.end * stride;
            // SAFETY: row ranges are disjoint.
            rescale_rows(cpu.isa, columns, magnitudes, &x[flat.clone()], unsafe { y.piece(flat) });
        });
    });
}

vectorized!(fn rescale_rows<T: Float>(
    columns: Columns<'_, T>, magnitudes: &[T], x: &[T], y: &mut [T],
) = rescale_rows_body);
#[inline(always)]
fn rescale_rows_body<L: Lanes, T: Float>(columns: Columns<'_, T>, magnitudes: &[T], x: &[T], y: &mut [T]) {
    for start in (0..magnitudes.len()).step_by(STRIP) {
        let width = STRIP.min(magnitudes.len() - start);
        let (mut factors, mut biases) = ([0f32; STRIP], [0f32; STRIP]);
        columns.fill(start, &mut factors[..width], &mut biases[..width], |j| magnitudes[j].to_f32());
        let place = columns.first + start;
        for (x, y) in x.chunks_exact(columns.stride).zip(y.chunks_exact_mut(columns.stride)) {
            // SAFETY: compiled for L; the columns lie in each row.
            unsafe {
                by_lanes!(width, |at, count| {
                    let bias = lanes::load::<L>(&biases, at, count);
                    let apart = L::sub(load::<L, T>(x, place + at, count), bias);
                    // Not fused, so that every instruction set gives the same bits.
                    let value = L::add(L::mul(apart, lanes::load::<L>(&factors, at, count)), bias);
                    store::<L, T>(y, place + at, value, count);
                });
            }
        }
    }
}

/// `dm (+)= the sum over rows of dy * (x - bias) / sqrt(square)`.
pub(crate) fn rescale_gradient(cpu: &Cpu, call: RescaleGradient) {
    let RescaleGradient { x, first, squares, bias, dy, dm, accumulate } = call;
    let ([rows, stride], n) = (x.shape().rows_cols(), dm.elements());
    by_float!(x.dtype(), T => {
        let bias = bias.map(|bias| bias.as_slice::<T>());
        let columns = Columns { stride, first, squares: squares.as_slice(), bias };
        let (x, dy) = (x.as_slice::<T>(), dy.as_slice::<T>());
        sum_blocks(cpu, rows, n, [Some(dm)], accumulate, |isa, rows, [sums]| {
            let flat = rows.start * stride..rows.end * stride;
            add_products(isa, columns, &x[flat.clone()], &dy[flat], sums);
        });
    });
}

vectorized!(fn add_products<T: Float>(
    columns: Columns<'_, T>, x: &[T], dy: &[T], sums: &mut [f32],
) = add_products_body);
#[inline(always)]
fn add_products_body<L: Lanes, T: Float>(columns: Columns<'_, T>, x: &[T], dy: &[T], sums: &mut [f32]) {
    for (number, sums) in sums.chunks_mut(STRIP).enumerate() {
        let (start, width) = (number * STRIP, sums.len());
        let (mut factors, mut biases) = ([0f32; STRIP], [0f32; STRIP]);
        columns.fill(start, &mut factors[..width], &mut biases[..width], |_| 1.0);
        let place = columns.first + start;
        for (x, dy) in x.chunks_exact(columns.stride).zip(dy.chunks_exact(columns.stride)) {
            // SAFETY: compiled for L; the columns lie in each row.
            unsafe {
                by_lanes!(width, |at, count| {
                    let bias = lanes::load::<L>(&biases, at, count);
                    let apart = L::sub(load::<L, T>(x, place + at, count), bias);
                    let product = L::mul(load::<L, T>(dy, place + at, count), apart);
                    let scaled = L::mul(product, lanes::load::<L>(&factors, at, count));
                    lanes::store::<L>(sums, at, L::add(lanes::load::<L>(sums, at, count), scaled), count);
                });
            }
        }
    }
}
