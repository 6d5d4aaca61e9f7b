//! Matrix products of linear layers, in both layouts of the weight, with their epilogues.

use phalanx_cuda::Options;
use phalanx_tensor::arguments::{Epilogue, Gelu, Layout, Weight};
use phalanx_tensor::{DType, Device, Tensor, View};

use crate::bench::{Bench, FLOATS, Results, numbers, random, read, tensor, tolerance};

/// Rows, inputs, outputs: less than a tile, rows that are not whole chunks of 16 bytes, several tiles.
const SIZES: [[usize; 3]; 4] = [[5, 8, 16], [33, 37, 21], [70, 96, 72], [130, 40, 136]];

/// Products of `check_linear` that are the library's: 3 of each type and layout in the shapes whose rows are whole 16 bytes, all
/// but one.
const LIBRARY_LINEARS: usize = 3 * FLOATS.len() * 2 * (SIZES.len() - 1);

fn weight(device: &Device, dtype: DType, layout: Layout, [inner, out]: [usize; 2]) -> Tensor {
    let dims = match layout {
        Layout::InOut => [inner, out],
        Layout::OutIn => [out, inner],
    };
    random(device, dtype, &dims, 2)
}

/// A card that multiplies by cuBLASLt where it is found, or never.
fn bench(test: &str, library_products: bool) -> Option<Bench> {
    Bench::with(test, Options { library_products, ..Options::default() })
}

/// How many products the emulator's cuBLASLt has been given; none on a card.
fn library_products() -> Option<usize> {
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
fn linear_with_epilogues() {
    for by_library in [true, false] {
        let Some(bench) = bench("linear", by_library) else { return };
        let before = library_products();
        check_linear(&bench);
        let counted = library_products().zip(before).map(|(after, before)| after - before);
        let expected = if by_library { LIBRARY_LINEARS } else { 0 };
        assert!(counted.is_none_or(|counted| counted == expected), "{counted:?}, not {expected}");
    }
}

fn check_linear(bench: &Bench) {
    for dtype in FLOATS {
        for [rows, inner, out] in SIZES {
            for layout in [Layout::InOut, Layout::OutIn] {
                let name = format!("linear {dtype:?} {rows} x {inner} x {out} {layout:?}");
                bench.compare(&name, tolerance(dtype), |device| {
                    let x = random(device, dtype, &[rows, inner], 1);
                    let w = weight(device, dtype, layout, [inner, out]);
                    let w = Weight { matrix: w.view(), layout };
                    let bias = random(device, dtype, &[out], 3);
                    let residual = random(device, dtype, &[rows, out], 4);
                    let [mut y, mut plain, mut pre, mut act] =
                        [5, 6, 7, 8].map(|seed| random(device, dtype, &[rows, out], seed));
                    let epilogue = Epilogue { bias: Some(bias.view()), residual: Some(residual.view()) };
                    device.linear(x.view(), w, epilogue, y.view_mut());
                    device.linear(x.view(), w, Epilogue::default(), plain.view_mut());
                    device.linear_gelu(x.view(), w, bias.view(), Gelu::Tanh, pre.view_mut(), act.view_mut());
                    let all = [("y", &y), ("plain", &plain), ("pre", &pre), ("act", &act)];
                    all.map(|(name, x)| (name, read(device, x.view()))).into()
                });
            }
        }
    }
}

#[test]
fn gradients_of_linear() {
    for by_library in [true, false] {
        let Some(bench) = bench("gradients of linear", by_library) else { return };
        check_gradients(&bench);
    }
}

fn check_gradients(bench: &Bench) {
    for dtype in FLOATS {
        for [rows, inner, out] in SIZES {
            for layout in [Layout::InOut, Layout::OutIn] {
                for (gradient, accumulate) in [(dtype, false), (DType::F32, true)] {
                    let name =
                        format!("gradients {dtype:?} {rows} x {inner} x {out} {layout:?} {gradient:?}");
                    bench.compare(&name, tolerance(dtype), |device| {
                        let x = random(device, dtype, &[rows, inner], 1);
                        let w = weight(device, dtype, layout, [inner, out]);
                        let dy = random(device, dtype, &[rows, out], 3);
                        let mut dx = random(device, dtype, &[rows, inner], 4);
                        let mut dw = weight(device, gradient, layout, [inner, out]);
                        let mut db = random(device, gradient, &[out], 5);
                        let w = Weight { matrix: w.view(), layout };
                        device.linear_input_gradient(dy.view(), w, dx.view_mut(), accumulate);
                        device.linear_weight_gradient(x.view(), dy.view(), dw.view_mut(), layout, accumulate);
                        device.bias_gradient(dy.view(), db.view_mut(), accumulate);
                        let all = [("dx", &dx), ("dw", &dw), ("db", &db)];
                        all.map(|(name, x)| (name, read(device, x.view()))).into()
                    });
                }
            }
        }
    }
}

/// Two runs with tensors at addresses of 16 bytes and one element behind: the same bits, near the processor's.
#[test]
fn addresses_that_the_library_does_not_take() {
    for by_library in [true, false] {
        let Some(bench) = bench("addresses", by_library) else { return };
        FLOATS.into_iter().for_each(|dtype| check_addresses(&bench, dtype, by_library));
    }
}

fn check_addresses(bench: &Bench, dtype: DType, by_library: bool) {
    let [rows, inner, out] = [24, 32, 40];
    let case = |device: &Device, first: usize| -> Results {
        let shifted = |dims: [usize; 2], seed: u64| {
            let mut all = vec![0.0; first];
            all.extend(numbers(seed, dims[0] * dims[1]));
            tensor(device, dtype, &[all.len()], &all)
        };
        let [x, w] = [shifted([rows, inner], 1), shifted([inner, out], 2)];
        let [bias, residual] = [shifted([1, out], 3), shifted([rows, out], 4)];
        let [mut y, mut dw] = [shifted([rows, out], 5), shifted([inner, out], 6)];
        fn part(of: &Tensor, first: usize, dims: [usize; 2]) -> View<'_> {
            of.view().range(first..first + dims[0] * dims[1]).reshape(dims)
        }
        let (x, w) = (part(&x, first, [rows, inner]), part(&w, first, [inner, out]));
        let residual = part(&residual, first, [rows, out]);
        let epilogue =
            Epilogue { bias: Some(bias.view().range(first..first + out)), residual: Some(residual) };
        let w = Weight { matrix: w, layout: Layout::InOut };
        let y_part = y.view_mut().range(first..first + rows * out).reshape([rows, out]);
        device.linear(x, w, epilogue, y_part);
        let dw_part = dw.view_mut().range(first..first + inner * out).reshape([inner, out]);
        device.linear_weight_gradient(x, residual, dw_part, Layout::InOut, true);
        [("y", &y), ("dw", &dw)].map(|(name, all)| (name, read(device, all.view()).split_off(first))).into()
    };
    let name = format!("addresses {dtype:?}, by the library: {by_library}");
    [0, 1].into_iter().for_each(|first| bench.compare(&name, tolerance(dtype), |device| case(device, first)));
    assert_eq!(case(bench.card(), 0), case(bench.card(), 1), "{name}");
}
