//! Linear and cross entropy in one, in slices of rows (Liger Kernel's fused linear cross entropy), so that
//! the logits of all tokens never exist at once.
//!
//! A slice: logits = x · w; softmax in place and the loss of each row; logits become their own derivative
//! `(p - onehot) * scale`; dx = dlogits · wᵀ; dw (+)= xᵀ · dlogits. Losses are summed in f64, row after row.

use super::lanes::{self, Lanes};
use super::matmul::{self, Matrix, product};
use super::shards::Shards;
use super::simd::vectorized;
use super::{Cpu, row_grain};
use crate::buffer::{View, ViewMut};
use crate::kernels::{CrossEntropyGradients, Layout, Weight};

/// See the module's head; shapes as in [`Kernels`](crate::kernels::Kernels).
pub(super) fn linear_cross_entropy(
    cpu: &Cpu,
    x: View,
    w: Weight,
    targets: &[u32],
    scale: f32,
    logits: ViewMut,
    loss: ViewMut,
    gradients: Option<CrossEntropyGradients>,
) {
    let [rows, hidden] = x.shape().rows_cols();
    let [slice, vocab] = logits.dims();
    assert!(slice > 0 || rows == 0, "logits have no rows");
    if let Some(target) = targets.iter().find(|&&t| t as usize >= vocab) {
        panic!("target {target} in a vocabulary of {vocab}");
    }
    let x = x.as_slice::<f32>();
    let logits = logits.into_slice::<f32>();
    let matrix = matmul::weight(&w);
    let mut gradients = gradients.map(|g| (g.dx.into_slice::<f32>(), g.dw.into_slice::<f32>(), g.accumulate));
    let mut sum = 0f64;
    if let (0, Some((_, dw, false))) = (rows, &mut gradients) {
        dw.fill(0.0);
    }
    for start in (0..rows).step_by(slice.max(1)) {
        let range = start..rows.min(start + slice);
        let flat = range.start * hidden..range.end * hidden;
        let x = Matrix::new(&x[flat.clone()], [range.len(), hidden], hidden);
        let logits = &mut logits[..range.len() * vocab];
        product(cpu, x, matrix, logits, false);
        sum += softmax_rows(cpu, logits, &targets[range.clone()], gradients.is_some().then_some(scale));
        if let Some((dx, dw, accumulate)) = &mut gradients {
            let logits = Matrix::new(logits, [range.len(), vocab], vocab);
            product(cpu, logits, matrix.t(), &mut dx[flat], false);
            let accumulate = *accumulate || start > 0;
            match w.layout {
                Layout::InOut => product(cpu, x.t(), logits, dw, accumulate),
                Layout::OutIn => product(cpu, logits.t(), x, dw, accumulate),
            }
        }
    }
    loss.into_slice::<f32>()[0] = (sum * f64::from(scale)) as f32;
}

/// The sum of the rows' losses; with `gradient` (the scale), the logits become derivatives.
fn softmax_rows(cpu: &Cpu, logits: &mut [f32], targets: &[u32], gradient: Option<f32>) -> f64 {
    let vocab = logits.len() / targets.len();
    cpu.scratch.with(|buffer| {
        let losses = buffer.slice::<f64>(targets.len());
        let (logits, shards) = (Shards::new(logits), Shards::new(losses));
        cpu.over(targets.len(), row_grain(vocab), |rows| {
            // SAFETY: ranges of rows are disjoint.
            let (logits, losses) =
                unsafe { (logits.piece(rows.start * vocab..rows.end * vocab), shards.piece(rows.clone())) };
            for ((row, target), loss) in logits.chunks_exact_mut(vocab).zip(&targets[rows]).zip(losses) {
                *loss = softmax_row(cpu.isa, row, *target as usize, gradient);
            }
        });
        losses.iter().sum()
    })
}

vectorized!(fn softmax_row(row: &mut [f32], target: usize, gradient: Option<f32>) -> f64 = softmax_row_body);
/// Loss of one row; with `gradient`, `row = (softmax(row) - onehot) * gradient`.
#[inline(always)]
fn softmax_row_body<L: Lanes>(row: &mut [f32], target: usize, gradient: Option<f32>) -> f64 {
    // SAFETY: compiled for L; all vectors lie in the row.
    unsafe {
        let largest = lanes::max_row::<L>(row);
        let logit = row[target];
        // Summed in f32 within 1,024 numbers, in f64 over those.
        let mut sum = 0f64;
        for piece in row.chunks_mut(1024) {
            sum += f64::from(lanes::sum_row!(L, piece.len(), |at, count| {
                let e = lanes::exp::<L>(L::sub(lanes::load::<L>(piece, at, count), L::splat(largest)));
                if gradient.is_some() {
                    lanes::store::<L>(piece, at, e, count);
                }
                e
            }));
        }
        if let Some(scale) = gradient {
            let factor = (f64::from(scale) / sum) as f32;
            row.iter_mut().for_each(|x| *x *= factor);
            row[target] -= scale;
        }
        sum.ln() + f64::from(largest) - f64::from(logit)
    }
}
