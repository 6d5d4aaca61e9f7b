//! The global norm, the same for any sharding.
//!
//! Squares are summed in f64 per block of 4,096 elements, element i of a block in lane i mod 16 (the square
//! of an f32 is exact in f64), then the blocks along a balanced tree over their index.

use phalanx_simd::{Lanes, vectorized};
use phalanx_tensor::arguments::Clip;
use phalanx_tensor::device::NORM_BLOCK;
use phalanx_tensor::{View, ViewMut};

use crate::Cpu;
use crate::elementwise::widened;
use crate::float::{Float, by_float};

/// Partial sums per block.
const LANES: usize = 16;

/// Blocks per task.
const BLOCKS: usize = 16;

/// `squares[b]` = sum of squares of block b of x (overwrites).
pub(crate) fn block_squares(cpu: &Cpu, x: View, squares: ViewMut) {
    by_float!(x.dtype(), T => squares_of_blocks::<T>(cpu, x.as_slice(), squares.into_slice()));
}

fn squares_of_blocks<T: Float>(cpu: &Cpu, x: &[T], squares: &mut [f64]) {
    assert_eq!(squares.len(), x.len().div_ceil(NORM_BLOCK));
    cpu.over_mut(squares, BLOCKS, |blocks, squares| {
        let mut buffer = [0f32; NORM_BLOCK];
        for (b, square) in blocks.zip(squares) {
            let block = &x[b * NORM_BLOCK..x.len().min((b + 1) * NORM_BLOCK)];
            *square = sum_squares(cpu.isa, widened(cpu.isa, block, &mut buffer));
        }
    });
}

vectorized!(fn sum_squares(x: &[f32]) -> f64 = sum_squares_body);
#[inline(always)]
#[expect(
    clippy::extra_unused_type_parameters,
    reason = "the compiler makes the vectors; L only selects them"
)]
fn sum_squares_body<L: Lanes>(x: &[f32]) -> f64 {
    let mut lanes = [0f64; LANES];
    let (whole, tail) = x.as_chunks::<LANES>();
    let mut add = |x: &[f32]| {
        for (l, x) in lanes.iter_mut().zip(x) {
            *l += f64::from(*x) * f64::from(*x);
        }
    };
    whole.iter().for_each(|x| add(x));
    add(tail);
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The norm of the unscaled gradient, and the factor that unscales it and clips it to `max_norm` (no clipping when that
/// is 0). If a gradient is not finite, neither is the norm, and the caller must check that. With clipping, a NaN norm
/// gives a NaN factor; an infinite norm gives 0, so finite elements become 0 and the others NaN (as in PyTorch).
pub(crate) fn norm(squares: &[f64], clip: Clip) -> (f32, f32) {
    let norm = (tree_sum(squares).sqrt() / f64::from(clip.loss_scale)) as f32;
    let factor = if clip.max_norm == 0.0 { 1.0 } else { clip.max_norm / (norm + 1e-6) };
    (norm, if factor > 1.0 { 1.0 } else { factor } / clip.loss_scale)
}

/// A left subtree has a power of two leaves, so the tree over the first n blocks does not depend on later blocks.
pub(crate) fn tree_sum(x: &[f64]) -> f64 {
    match x {
        [] => 0.0,
        [x] => *x,
        _ => {
            let (left, right) = x.split_at(x.len().next_power_of_two() / 2);
            tree_sum(left) + tree_sum(right)
        }
    }
}
