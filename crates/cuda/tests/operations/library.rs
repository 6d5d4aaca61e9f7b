//! Products by cuBLASLt: which are its, and that they do not depend on addresses.

use phalanx_cuda::checks::GROUPS;
use phalanx_cuda::{ALGORITHMS, Options};
use phalanx_system::random::SplitMix64;
use phalanx_tensor::arguments::{Epilogue, Layout, Weight};
use phalanx_tensor::operations::{InputGradient, WeightGradient};
use phalanx_tensor::{Category, DType, Device, Tensor, View, logits_stride};

use crate::bench::Bench;
use crate::check_group;

/// Products of the group of linear layers that are the library's: 3 of each of 3 types and 2 layouts, in 3 of 4 shapes, whose rows are
/// whole 16 bytes.
const LIBRARY_LINEARS: usize = 3 * 3 * 2 * 3;

/// Number of products that the emulator's cuBLASLt has computed; None on a card.
fn computed() -> Option<usize> {
    // SAFETY: the emulator, which the tests have loaded as the driver; the function writes one number.
    unsafe {
        let library = libloading::Library::new("libcublasLt.so").ok()?;
        let count =
            library.get::<unsafe extern "C" fn(*mut usize) -> u32>(b"phalanxEmulatorProducts").ok()?;
        let mut products = 0;
        (count(&mut products) == 0).then_some(products)
    }
}

#[test]
fn products_whose_rows_are_whole_16_bytes_are_the_librarys() {
    for (by_library, expected) in [(true, LIBRARY_LINEARS), (false, 0)] {
        let Some(bench) = Bench::with("products by the library", by_library) else { return };
        let before = computed();
        let group = GROUPS.iter().find(|group| group.name == "linear with epilogues").unwrap();
        check_group(group, &bench);
        let counted = computed().zip(before).map(|(after, before)| after - before);
        assert!(counted.is_none_or(|counted| counted == expected), "{counted:?}, not {expected}");
    }
}

/// f32 numbers in [-1, 1), behind `first` zeros.
fn shifted(device: &Device, first: usize, dims: [usize; 2], seed: u64) -> Tensor {
    let mut random = SplitMix64::new(seed);
    let mut all = vec![0f32; first];
    all.extend((0..dims[0] * dims[1]).map(|_| random.next_fraction() as f32 * 2.0 - 1.0));
    let mut tensor = device.alloc(DType::F32, [all.len()], Category::Workspace, "test");
    device.upload(&all, tensor.view_mut());
    tensor
}

fn part(of: &Tensor, first: usize, dims: [usize; 2]) -> View<'_> {
    of.view().range(first..first + dims[0] * dims[1]).reshape(dims)
}

/// The results of a linear layer and of its weight's gradient, with all tensors `first` elements behind an aligned address.
fn results(device: &Device, first: usize) -> [Vec<f32>; 2] {
    let [rows, inner, out] = [24, 32, 40];
    let [x, w] = [shifted(device, first, [rows, inner], 1), shifted(device, first, [inner, out], 2)];
    let [bias, residual] = [shifted(device, first, [1, out], 3), shifted(device, first, [rows, out], 4)];
    let [mut y, mut dw] = [shifted(device, first, [rows, out], 5), shifted(device, first, [inner, out], 6)];
    let (x, residual) = (part(&x, first, [rows, inner]), part(&residual, first, [rows, out]));
    let w = Weight { matrix: part(&w, first, [inner, out]), layout: Layout::InOut };
    let epilogue = Epilogue { bias: Some(bias.view().range(first..first + out)), residual: Some(residual) };
    let y_part = y.view_mut().range(first..first + rows * out).reshape([rows, out]);
    device.linear(x, w, epilogue, y_part);
    let dw_part = dw.view_mut().range(first..first + inner * out).reshape([inner, out]);
    device.linear_weight_gradient(x, residual, dw_part, Layout::InOut, true);
    [y, dw].map(|tensor| {
        let mut all = vec![0f32; tensor.view().elements()];
        device.download(tensor.view(), &mut all).unwrap();
        all.split_off(first)
    })
}

#[test]
fn addresses_change_no_bit() {
    for by_library in [true, false] {
        let Some(bench) = Bench::with("addresses", by_library) else { return };
        let aligned = results(bench.card(), 0);
        for first in 1..4 {
            assert!(
                results(bench.card(), first) == aligned,
                "{first} elements, by the library: {by_library}"
            );
        }
    }
}

/// A card may time other algorithms than the library's first. Its double has two, whose sums are both exact to f64.
#[test]
fn another_algorithm_computes_the_same_products() {
    let mut found = Vec::new();
    for algorithm in [0, 1, ALGORITHMS - 1] {
        let Some(bench) = Bench::of("algorithms", Options { algorithm, ..Options::default() }) else {
            return;
        };
        found.push(results(bench.card(), 0).concat());
    }
    let [first, second, last] = &found[..] else { unreachable!("three") };
    // Sums of products below 1 in another order.
    for (a, b) in first.iter().zip(second).chain(first.iter().zip(last)) {
        assert!((a - b).abs() <= 1e-5, "{a} and {b}");
    }
}

/// dx and dw of 37 classes, whose derivatives lie in padded rows, from x of 24 rows.
fn gradients_of_odd_classes(device: &Device) -> [Vec<f32>; 2] {
    let [rows, hidden, classes] = [24, 32, 37];
    let stride = logits_stride(classes);
    let [x, w] = [shifted(device, 0, [rows, hidden], 1), shifted(device, 0, [classes, hidden], 2)];
    let [mut dx, mut dw] = [shifted(device, 0, [rows, hidden], 5), shifted(device, 0, [classes, hidden], 6)];
    let mut random = SplitMix64::new(3);
    let mut dy = vec![0f32; rows * stride];
    for row in dy.chunks_mut(stride) {
        row[..classes].fill_with(|| random.next_fraction() as f32 - 0.5);
    }
    let mut padded = device.alloc(DType::F32, [rows, stride], Category::Workspace, "test");
    device.upload(&dy, padded.view_mut());
    let dy = padded.view();
    let weight = Weight { matrix: part(&w, 0, [classes, hidden]), layout: Layout::OutIn };
    let dx_part = dx.view_mut().reshape([rows, hidden]);
    device.run(InputGradient { dy, padded: true, w: weight, dx: dx_part, accumulate: false });
    let (x, dw_part) = (part(&x, 0, [rows, hidden]), dw.view_mut().reshape([classes, hidden]));
    device.run(WeightGradient { x, dy, padded: true, dw: dw_part, layout: Layout::OutIn, accumulate: true });
    [dx, dw].map(|tensor| {
        let mut all = vec![0f32; tensor.view().elements()];
        device.download(tensor.view(), &mut all).unwrap();
        all
    })
}

/// The library's fast kernels may want extents of whole 16 bytes; with `PHALANX_EMULATOR_EXTENTS=on` its double takes no others.
#[test]
fn classes_beyond_a_multiple_are_computed_apart() {
    let takes_all = std::env::var_os("PHALANX_EMULATOR_EXTENTS").is_none();
    let mut found = Vec::new();
    for splits_odd in [true, false] {
        let options = Options { splits_odd, ..Options::default() };
        let Some(bench) = Bench::of("odd classes", options) else { return };
        let before = computed();
        found.push(gradients_of_odd_classes(bench.card()));
        let counted = computed().zip(before).map(|(after, before)| after - before);
        let expected = if splits_odd || takes_all { 2 } else { 0 };
        assert!(counted.is_none_or(|counted| counted == expected), "{splits_odd}: {counted:?}");
    }
    for (apart, whole) in found[0].iter().zip(&found[1]) {
        // Sums of 37 or 24 products below 0.5 in another order.
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 37.0 * f32::EPSILON;
        assert!(apart.iter().zip(whole).all(near), "{apart:?} and {whole:?}");
    }
}
