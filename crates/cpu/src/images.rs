//! ReLU, the patches of images for convolutions, and max pooling. A task has some rows: patches of images, or pixels. Where patches
//! overlap, each pixel adds up what its patches have, so that nothing is written twice.

use phalanx_simd::{Lanes, Number, vectorized};
use phalanx_tensor::operations::{Fold, MaxPool, MaxPoolBackward, ReluBackward, Unfold};
use phalanx_tensor::{Patches, ViewMut};

use crate::elementwise::{by_lanes, load, store};
use crate::float::{Float, by_float};
use crate::shards::Shards;
use crate::{Cpu, GRAIN, row_grain};

/// `x` becomes `max(x, 0)`; NaN stays NaN.
pub(crate) fn relu(cpu: &Cpu, x: ViewMut) {
    by_float!(x.dtype(), T => cpu.over_mut(x.into_slice::<T>(), GRAIN, |_, x| relu_piece(cpu.isa, x)));
}

vectorized!(fn relu_piece<T: Float>(x: &mut [T]) = relu_body);
#[inline(always)]
fn relu_body<L: Lanes, T: Float>(x: &mut [T]) {
    // SAFETY: compiled for L; all elements are those of x.
    unsafe {
        by_lanes!(x.len(), |at, count| {
            // The zero is the first operand, so that NaN stays NaN.
            let y = L::max(L::splat(0.0), load::<L, T>(x, at, count));
            store::<L, T>(x, at, y, count);
        });
    }
}

/// `dy` becomes dx, which is 0 where `y <= 0`.
pub(crate) fn relu_backward(cpu: &Cpu, call: ReluBackward) {
    let ReluBackward { y, dy } = call;
    by_float!(y.dtype(), T => {
        let y = y.as_slice::<T>();
        cpu.over_mut(dy.into_slice::<T>(), GRAIN, |range, dy| {
            for (dy, y) in dy.iter_mut().zip(&y[range]) {
                *dy = if y.to_f32() <= 0.0 { T::from_f32(0.0) } else { *dy };
            }
        });
    });
}

/// Runs `row(number, row)` for all rows of `columns` elements of `y`, on all threads; a row takes `work` elements' time.
fn each_row<T: Send>(
    cpu: &Cpu,
    y: &mut [T],
    columns: usize,
    work: usize,
    row: impl Fn(usize, &mut [T]) + Sync,
) {
    let (rows, y) = (y.len() / columns.max(1), Shards::new(y));
    cpu.over(rows, row_grain(work), |rows| {
        for number in rows {
            // SAFETY: rows do not overlap, and each is given to one thread by `over`.
            row(number, unsafe { y.piece(number * columns..(number + 1) * columns) });
        }
    });
}

/// The rows of all patches. x `[batch, pixels, channels]`, y `[batch, patches, channels * size]`.
pub(crate) fn unfold(cpu: &Cpu, call: Unfold) {
    let Unfold { x, patches, y } = call;
    let ([_, pixels, channels], [_, count, columns]) = (x.dims(), y.dims());
    by_float!(x.dtype(), T => {
        let (x, size) = (x.as_slice::<T>(), patches.size());
        each_row(cpu, y.into_slice::<T>(), columns, columns, |row, y| {
            let image = &x[row / count * pixels * channels..][..pixels * channels];
            y.fill(T::from_f32(0.0));
            patches.each_pixel(row % count, |element, pixel| {
                let from = &image[pixel * channels..][..channels];
                from.iter().enumerate().for_each(|(c, from)| y[c * size + element] = *from);
            });
        });
    });
}

/// The sum of each pixel over its patches. x `[batch, patches, channels * size]`, y `[batch, pixels, channels]`.
pub(crate) fn fold(cpu: &Cpu, call: Fold) {
    let Fold { x, patches, y } = call;
    let ([_, count, columns], [_, pixels, channels]) = (x.dims(), y.dims());
    by_float!(x.dtype(), T => {
        let (x, size) = (x.as_slice::<T>(), patches.size());
        each_row(cpu, y.into_slice::<T>(), channels, columns, |row, y| {
            let rows = &x[row / pixels * count * columns..][..count * columns];
            for (c, y) in y.iter_mut().enumerate() {
                let mut sum = 0f32;
                patches.each_patch(row % pixels, |patch, element| {
                    sum += rows[patch * columns + c * size + element].to_f32();
                });
                *y = T::from_f32(sum);
            }
        });
    });
}

/// The number of the largest pixel of a patch in one channel of an image: the first of equals, and a NaN before all.
fn largest<T: Float>(image: &[T], patches: &Patches, patch: usize, [channels, channel]: [usize; 2]) -> usize {
    let (mut at, mut max) = (usize::MAX, f32::NAN);
    patches.each_pixel(patch, |_, pixel| {
        let value = image[pixel * channels + channel].to_f32();
        if at == usize::MAX || value > max || value.is_nan() {
            (at, max) = (pixel, value);
        }
    });
    at
}

/// The largest pixel of each patch. x `[batch, pixels, channels]`, y `[batch, patches, channels]`.
pub(crate) fn max_pool(cpu: &Cpu, call: MaxPool) {
    let MaxPool { x, patches, y } = call;
    let ([_, pixels, channels], [_, count, _]) = (x.dims(), y.dims());
    by_float!(x.dtype(), T => {
        let x = x.as_slice::<T>();
        each_row(cpu, y.into_slice::<T>(), channels, channels * patches.size(), |row, y| {
            let image = &x[row / count * pixels * channels..][..pixels * channels];
            for (c, y) in y.iter_mut().enumerate() {
                *y = image[largest(image, &patches, row % count, [channels, c]) * channels + c];
            }
        });
    });
}

/// dy of each patch, at its largest pixel. x, dx `[batch, pixels, channels]`, dy `[batch, patches, channels]`.
pub(crate) fn max_pool_backward(cpu: &Cpu, call: MaxPoolBackward) {
    let MaxPoolBackward { x, patches, dy, dx } = call;
    let ([_, pixels, channels], [_, count, _]) = (x.dims(), dy.dims());
    by_float!(x.dtype(), T => {
        let (x, dy) = (x.as_slice::<T>(), dy.as_slice::<T>());
        each_row(cpu, dx.into_slice::<T>(), channels, channels * patches.size(), |row, dx| {
            let (sample, pixel) = (row / pixels, row % pixels);
            let image = &x[sample * pixels * channels..][..pixels * channels];
            for (c, dx) in dx.iter_mut().enumerate() {
                let mut sum = 0f32;
                patches.each_patch(pixel, |patch, _| {
                    if largest(image, &patches, patch, [channels, c]) == pixel {
                        sum += dy[(sample * count + patch) * channels + c].to_f32();
                    }
                });
                *dx = T::from_f32(sum);
            }
        });
    });
}
