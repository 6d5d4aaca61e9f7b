//! delta of attention's backward: the product of each query's `dout` and `out`.

use phalanx_simd::{Lanes, vectorized};

use crate::float::Float;

vectorized!(pub(crate) fn dots<T: Float>(
    rows: [&[T]; 2], stride: usize, size: usize, scale: f32, to: &mut [f32],
) = dots_body);
/// The dot product of each pair of rows of two matrices, times `scale`. Rows have `size` elements and are `stride`
/// apart.
#[inline(always)]
fn dots_body<L: Lanes, T: Float>([a, b]: [&[T]; 2], stride: usize, size: usize, scale: f32, to: &mut [f32]) {
    for (group, to) in to.chunks_mut(16).enumerate() {
        // SAFETY: compiled for L; the vectors lie in the rows (the slices are asserted to hold them).
        unsafe {
            let mut sums = [L::splat(0.0); 16];
            for (i, sum) in sums.iter_mut().enumerate().take(to.len()) {
                let row = (group * 16 + i) * stride;
                let (a, b) = (a[row..row + size].as_ptr(), b[row..row + size].as_ptr());
                for at in (0..size - size % 16).step_by(16) {
                    *sum = L::mul_add(T::load::<L>(a.add(at)), T::load::<L>(b.add(at)), *sum);
                }
                if !size.is_multiple_of(16) {
                    let at = size - size % 16;
                    let a = T::load_first::<L>(a.add(at), size % 16);
                    *sum = L::mul_add(a, T::load_first::<L>(b.add(at), size % 16), *sum);
                }
            }
            // Now lane i of every vector belongs to row i.
            let mut lanes = L::transpose(sums);
            for width in [8, 4, 2, 1] {
                for i in 0..width {
                    lanes[i] = L::add(lanes[i], lanes[i + width]);
                }
            }
            L::store_first(to.as_mut_ptr(), L::mul(lanes[0], L::splat(scale)), to.len());
        }
    }
}
