//! The global norm, the same for any sharding.
//!
//! Squares are summed in f64 per block of 4,096 elements, element i of a block in lane i mod 16 (the square
//! of an f32 is exact in f64), then the blocks along a balanced tree over their index.

use super::Cpu;
use super::lanes::Lanes;
use super::simd::vectorized;
use crate::device::NORM_BLOCK;

/// Lanes that a block's squares are spread over.
const LANES: usize = 16;

/// Blocks of a task.
const BLOCKS: usize = 16;

/// `squares[b]` = sum of squares of block b of x (overwrites).
pub(super) fn block_squares(cpu: &Cpu, x: &[f32], squares: &mut [f64]) {
    assert_eq!(squares.len(), x.len().div_ceil(NORM_BLOCK));
    cpu.over_mut(squares, BLOCKS, |blocks, squares| {
        for (b, square) in blocks.zip(squares) {
            *square = sum_squares(cpu.isa, &x[b * NORM_BLOCK..x.len().min((b + 1) * NORM_BLOCK)]);
        }
    });
}

vectorized!(fn sum_squares(x: &[f32]) -> f64 = sum_squares_body);
#[inline(always)]
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

/// The norm, and the factor that clips it to `max_norm` (1 when that is 0). NaN stays NaN in both.
pub(super) fn norm(squares: &[f64], max_norm: f32) -> (f32, f32) {
    let norm = tree_sum(squares).sqrt() as f32;
    let factor = if max_norm == 0.0 { 1.0 } else { max_norm / (norm + 1e-6) };
    (norm, if factor > 1.0 { 1.0 } else { factor })
}

/// Left subtrees hold a power of two of leaves: the tree over the first n blocks does not depend on
/// what follows.
fn tree_sum(x: &[f64]) -> f64 {
    match x {
        [] => 0.0,
        [x] => *x,
        _ => {
            let (left, right) = x.split_at(x.len().next_power_of_two() / 2);
            tree_sum(left) + tree_sum(right)
        }
    }
}
