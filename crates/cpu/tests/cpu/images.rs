//! ReLU, patches of images and max pooling, against their definitions and the differences of these.

use phalanx_tensor::operations::{Fold, MaxPool, MaxPoolBackward, Relu, ReluBackward, Unfold};
use phalanx_tensor::{Device, Patches};

use crate::differences::{gradient, weighted};
use crate::oracle::{
    Expected, FLOATS, check, check_as, check_exact, numbers, poisoned, poisoned_as, read, read_f32, rounded,
    tensor, tensor_as, wide,
};

/// Patches that overlap, with padding; that lie apart, and leave a rim; with extents of their own; that begin in the padding; and one of
/// the whole image.
const PATCHES: [Patches; 5] = [
    Patches { image: [5, 4], kernel: [3, 3], stride: [1, 1], padding: [1, 1] },
    Patches { image: [7, 5], kernel: [2, 2], stride: [2, 2], padding: [0, 0] },
    Patches { image: [6, 9], kernel: [4, 3], stride: [3, 2], padding: [2, 0] },
    Patches { image: [3, 2], kernel: [2, 1], stride: [1, 2], padding: [3, 2] },
    Patches { image: [4, 4], kernel: [4, 4], stride: [1, 1], padding: [0, 0] },
];
const BATCH: usize = 2;
const CHANNELS: usize = 3;

/// The element of a patch at (i, j) of channel `c`; None in the padding.
fn at(p: &Patches, x: &[f64], sample: usize, patch: usize, [i, j, c]: [usize; 3]) -> Option<f64> {
    let [_, wide] = p.output();
    let place = |d: usize, patch: usize, within: usize| {
        (patch * p.stride[d] + within).checked_sub(p.padding[d]).filter(|at| *at < p.image[d])
    };
    let (row, column) = (place(0, patch / wide, i)?, place(1, patch % wide, j)?);
    Some(x[((sample * p.image[0] + row) * p.image[1] + column) * CHANNELS + c])
}

/// Calls `see` with each channel of each patch, and the numbers of the elements of the patch.
fn each_patch(p: &Patches, mut see: impl FnMut([usize; 3], &mut dyn Iterator<Item = [usize; 2]>)) {
    for (sample, patch) in (0..BATCH).flat_map(|sample| (0..p.count()).map(move |patch| (sample, patch))) {
        for c in 0..CHANNELS {
            let [high, wide] = p.kernel;
            see([sample, patch, c], &mut (0..high * wide).map(|i| [i / wide, i % wide]));
        }
    }
}

fn unfolded(p: &Patches, x: &[f64]) -> Vec<f64> {
    let mut y = Vec::new();
    each_patch(p, |[sample, patch, c], elements| {
        y.extend(elements.map(|[i, j]| at(p, x, sample, patch, [i, j, c]).unwrap_or(0.0)));
    });
    y
}

fn pooled(p: &Patches, x: &[f64]) -> Vec<f64> {
    let mut y = Vec::new();
    each_patch(p, |[sample, patch, c], elements| {
        let inside = elements.filter_map(|[i, j]| at(p, x, sample, patch, [i, j, c]));
        y.push(inside.fold(f64::NEG_INFINITY, f64::max));
    });
    y
}

fn image(p: &Patches) -> [usize; 3] {
    [BATCH, p.pixels(), CHANNELS]
}

fn rows(p: &Patches) -> [usize; 3] {
    [BATCH, p.count(), CHANNELS * p.size()]
}

#[test]
fn rows_of_patches_and_their_sums() {
    for (patches, dtype) in PATCHES.into_iter().flat_map(|patches| FLOATS.map(|dtype| (patches, dtype))) {
        let x = rounded(dtype, &numbers(1, image(&patches).iter().product()));
        let dy = rounded(dtype, &numbers(2, rows(&patches).iter().product()));
        let kernel = |device: &Device| {
            let (x, dy) = (
                tensor_as(device, dtype, image(&patches), &x),
                tensor_as(device, dtype, rows(&patches), &dy),
            );
            let mut y = poisoned_as(device, dtype, rows(&patches));
            device.run(Unfold { x: x.view(), patches, y: y.view_mut() });
            let mut dx = poisoned_as(device, dtype, image(&patches));
            device.run(Fold { x: dy.view(), patches, y: dx.view_mut() });
            vec![read_f32(device, &y), read_f32(device, &dx)]
        };
        let y = Expected::relative(unfolded(&patches, &wide(&x)), 0.0);
        let dx = gradient(&wide(&x), |x| weighted(&unfolded(&patches, x), &dy));
        // At most as many terms of at most 1 as a patch has pixels.
        let magnitude = vec![patches.size() as f64; dx.len()];
        let dx = Expected { value: dx, magnitude, roundings: patches.size() as f64 };
        check_as(&format!("{patches:?}"), kernel, &[y, dx], &[dtype; 2]);
    }
}

#[test]
fn max_pooling_and_its_gradient() {
    for patches in PATCHES.into_iter().filter(|p| (0..2).all(|d| 2 * p.padding[d] <= p.kernel[d])) {
        let shape = [BATCH, patches.count(), CHANNELS];
        let x = numbers(3, image(&patches).iter().product());
        let dy = numbers(4, shape.iter().product());
        let kernel = |device: &Device| {
            let (x, dy) = (tensor(device, image(&patches), &x), tensor(device, shape, &dy));
            let mut y = poisoned(device, shape);
            device.run(MaxPool { x: x.view(), patches, y: y.view_mut() });
            let mut dx = poisoned(device, image(&patches));
            device.run(MaxPoolBackward { x: x.view(), patches, dy: dy.view(), dx: dx.view_mut() });
            vec![read(device, &y), read(device, &dx)]
        };
        let y = Expected::relative(pooled(&patches, &wide(&x)), 0.0);
        let dx = gradient(&wide(&x), |x| weighted(&pooled(&patches, x), &dy));
        let magnitude = vec![patches.size() as f64; dx.len()];
        let dx = Expected { value: dx, magnitude, roundings: patches.size() as f64 };
        check(&format!("{patches:?}"), kernel, &[y, dx]);
    }
}

/// The first of equal pixels is the largest, and a NaN is larger than all.
#[test]
fn equal_pixels_and_numbers_that_are_none() {
    let patches = Patches::square([2, 4], 2, 2, 0);
    let x = [1.0, 1.0, 0.5, f32::NAN, 1.0, 0.0, 2.0, 3.0];
    let kernel = |device: &Device| {
        let (x, dy) = (tensor(device, [1, 8, 1], &x), tensor(device, [1, 2, 1], &[5.0, 7.0]));
        let (mut y, mut dx) = (poisoned(device, [1, 2, 1]), poisoned(device, [1, 8, 1]));
        device.run(MaxPool { x: x.view(), patches, y: y.view_mut() });
        device.run(MaxPoolBackward { x: x.view(), patches, dy: dy.view(), dx: dx.view_mut() });
        [read(device, &y), read(device, &dx)].concat()
    };
    check_exact("max pooling", kernel, &[1.0, f32::NAN, 5.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0, 0.0]);
}

#[test]
fn relu_and_its_gradient() {
    let mut x = numbers(5, 40_003);
    (x[0], x[17], x[40_002]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let dy = numbers(6, x.len());
    let kernel = |device: &Device| {
        let (mut y, mut dx) = (tensor(device, [x.len()], &x), tensor(device, [x.len()], &dy));
        device.run(Relu { x: y.view_mut() });
        device.run(ReluBackward { y: y.view(), dy: dx.view_mut() });
        [read(device, &y), read(device, &dx)].concat()
    };
    let y = x.iter().map(|x| if *x < 0.0 { 0.0 } else { *x });
    let dx = x.iter().zip(&dy).map(|(x, dy)| if *x <= 0.0 { 0.0 } else { *dy });
    check_exact("ReLU", kernel, &y.chain(dx).collect::<Vec<f32>>());
}

#[test]
#[should_panic(
    expected = "patches of 5 x 5 with the strides [1, 1] in an image of 3 x 4 with 0 and 0 pixels of padding"
)]
fn patches_that_do_not_fit_are_refused() {
    Patches::square([3, 4], 5, 1, 0);
}
