//! Matrix products on tile registers: of bf16, and of f32 and f16 in parts of bf16. The shapes of f32 are in `linear`.

use phalanx_simd::Isa;
use phalanx_simd::tiles::TileUnit;
use phalanx_tensor::{DType, Device, Epilogue, Gelu, Layout, Weight};

use crate::oracle::{
    Expected, KernelPath, check_as, gradient_types, numbers, output_as, poisoned, poisoned_as, read,
    read_f32, rounded, tensor, tensor_as, transposed,
};

/// (rows, in, out): whole panels; tails of every dimension, of less and more than a tile; one row, column and step; more
/// than a block of the inner dimension, with and without scratch for its sums; more than a task; a right operand that exceeds the L2 cache's
/// part, with one block of the inner dimension and with two.
const SHAPES: [[usize; 3]; 13] = [
    [64, 64, 96],
    [32, 33, 32],
    [47, 64, 32],
    [33, 32, 49],
    [1, 100, 130],
    [130, 100, 1],
    [5, 1, 7],
    [17, 31, 15],
    [40, 600, 70],
    [20, 2100, 36],
    [515, 65, 70],
    [400, 512, 330],
    [130, 2200, 80],
];

const LAYOUTS: [Layout; 2] = [Layout::InOut, Layout::OutIn];

/// The types that only tile registers multiply in 16 bits here.
const TYPES: [DType; 2] = [DType::BF16, DType::F16];

fn tiled() -> KernelPath {
    KernelPath { isa: Isa::detect(), tiles: Some(TileUnit::Model) }
}

#[test]
fn linear_in_16_bits() {
    for dtype in TYPES {
        for [rows, inner, out] in SHAPES {
            let [x, w, bias, residual] =
                [rows * inner, inner * out, out, rows * out].map(|n| rounded(dtype, &numbers(n as u64, n)));
            let size = [rows, inner, out];
            let more = |i: usize| f64::from(bias[i % out]) + f64::from(residual[i]);
            let alone = Expected::product(size, &x, &w);
            let expected = [alone.plus(more), alone];
            for layout in LAYOUTS {
                let (shape, laid) = match layout {
                    Layout::InOut => ([inner, out], w.clone()),
                    Layout::OutIn => ([out, inner], transposed([inner, out], &w)),
                };
                let kernel = |device: &Device| {
                    let of = |shape, x: &[f32]| tensor_as(device, dtype, shape, x);
                    let (x, w) = (of([rows, inner], &x), of(shape, &laid));
                    let (bias, residual) =
                        (tensor_as(device, dtype, [out], &bias), of([rows, out], &residual));
                    let w = || Weight { matrix: w.view(), layout };
                    let mut y = [(); 2].map(|()| poisoned_as(device, dtype, [rows, out]));
                    let epilogue = Epilogue { bias: Some(bias.view()), residual: Some(residual.view()) };
                    device.linear(x.view(), w(), epilogue, y[0].view_mut());
                    device.linear(x.view(), w(), Epilogue::default(), y[1].view_mut());
                    y.iter().map(|y| read_f32(device, y)).collect()
                };
                check_as(&format!("linear {size:?} {layout:?}"), kernel, &expected, &[dtype; 2]);
            }
        }
    }
}

#[test]
fn gradients_in_16_bits() {
    for dtype in TYPES {
        for [rows, inner, out] in SHAPES {
            let [x, w, dy] =
                [rows * inner, inner * out, rows * out].map(|n| rounded(dtype, &numbers(n as u64, n)));
            let turned = [transposed([inner, out], &w), transposed([rows, inner], &x)];
            let dx = Expected::product([rows, out, inner], &dy, &turned[0]);
            let dw = Expected::product([inner, rows, out], &turned[1], &dy);
            for stored in gradient_types(dtype) {
                let before =
                    [rounded(dtype, &numbers(4, rows * inner)), rounded(stored, &numbers(5, inner * out))];
                for accumulate in [false, true] {
                    let kernel = |device: &Device| {
                        let of = |shape, x: &[f32]| tensor_as(device, dtype, shape, x);
                        let (x, dy) = (of([rows, inner], &x), of([rows, out], &dy));
                        let w = of([inner, out], &w);
                        let mut dx = output_as(device, dtype, [rows, inner], &before[0], accumulate);
                        let mut dw = output_as(device, stored, [inner, out], &before[1], accumulate);
                        let weight = Weight { matrix: w.view(), layout: Layout::InOut };
                        device.linear_input_gradient(dy.view(), weight, dx.view_mut(), accumulate);
                        let (x, dy) = (x.view(), dy.view());
                        device.linear_weight_gradient(x, dy, dw.view_mut(), Layout::InOut, accumulate);
                        vec![read_f32(device, &dx), read_f32(device, &dw)]
                    };
                    let start =
                        |before: &[f32], i: usize| if accumulate { f64::from(before[i]) } else { 0.0 };
                    let expected = [dx.plus(|i| start(&before[0], i)), dw.plus(|i| start(&before[1], i))];
                    let what = format!("gradients {:?} {accumulate}", [rows, inner, out]);
                    check_as(&what, kernel, &expected, &[dtype, stored]);
                }
            }
        }
    }
}

/// The argument of GELU that the epilogue stores equals the linear layer's result.
#[test]
fn gelu_follows_the_same_sums() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let device = tiled().cpu(2);
        let [rows, inner, out] = [50, 700, 75];
        let x = tensor_as(&device, dtype, [rows, inner], &numbers(1, rows * inner));
        let w = tensor_as(&device, dtype, [inner, out], &numbers(2, inner * out));
        let bias = tensor_as(&device, dtype, [out], &numbers(3, out));
        let [mut pre, mut y, mut linear, mut gelu] =
            [(); 4].map(|()| poisoned_as(&device, dtype, [rows, out]));
        let w = || Weight { matrix: w.view(), layout: Layout::InOut };
        device.linear_gelu(x.view(), w(), Some(bias.view()), Gelu::Tanh, pre.view_mut(), y.view_mut());
        let epilogue = Epilogue { bias: Some(bias.view()), residual: None };
        device.linear(x.view(), w(), epilogue, linear.view_mut());
        device.gelu(pre.view(), Gelu::Tanh, gelu.view_mut());
        assert_eq!(read_f32(&device, &pre), read_f32(&device, &linear), "{}", dtype.name());
        assert_eq!(read_f32(&device, &y), read_f32(&device, &gelu), "{}", dtype.name());
    }
}

/// `x · w` of a device, both `[size, size]` but the inner dimension.
fn multiply(device: &Device, dtype: DType, [m, k, n]: [usize; 3], x: &[f32], w: &[f32]) -> Vec<f32> {
    let (x, w) = (tensor_as(device, dtype, [m, k], x), tensor_as(device, dtype, [k, n], w));
    let mut y = poisoned_as(device, dtype, [m, n]);
    let w = Weight { matrix: w.view(), layout: Layout::InOut };
    device.linear(x.view(), w, Epilogue::default(), y.view_mut());
    read_f32(device, &y)
}

/// The root of the mean square of `|error| / (|a| · |b|)` at 512 steps. In theory, an error of half a unit in the last
/// place per rounding of a growing sum: 512 roundings in a chain of multiply-adds, which gives 2.8e-8; in parts 96 (6
/// products in each of 16 packed steps), of two blocks with half of the squared sums, so 0.31 times that: 8.5e-9.
#[test]
fn f32_in_parts_is_more_accurate_than_a_chain_of_multiply_adds() {
    let (size @ [m, k, n], [a, b]) = ([32, 512, 32], normal_operands());
    let exact = Expected::product(size, &a, &b);
    let rms = |y: &[f32]| relative_rms(y, &exact);
    let chain: Vec<f32> = (0..m * n)
        .map(|at| (0..k).fold(0f32, |sum, l| a[at / n * k + l].mul_add(b[l * n + at % n], sum)))
        .collect();
    let [chain, parts] = [rms(&chain), rms(&multiply(&tiled().cpu(1), DType::F32, size, &a, &b))];
    println!("chain {chain:.2e}, parts {parts:.2e}");
    assert!((2e-8..4e-8).contains(&chain), "{chain:e}");
    assert!((7e-9..1e-8).contains(&parts), "{parts:e}");
}

/// Operands `[32, 512]` and `[512, 32]` of normally distributed numbers.
fn normal_operands() -> [Vec<f32>; 2] {
    [normal(1, 32 * 512), normal(2, 512 * 32)]
}

/// The root of the mean square of `|error| / (|a| · |b|)`.
fn relative_rms(y: &[f32], exact: &Expected) -> f64 {
    let terms = y.iter().zip(&exact.value).zip(&exact.magnitude);
    let squares = terms.map(|((y, value), size)| ((f64::from(*y) - value) / size).powi(2));
    (squares.sum::<f64>() / y.len() as f64).sqrt()
}

/// Normally distributed numbers (sums of 12 uniform ones).
fn normal(seed: u64, count: usize) -> Vec<f32> {
    numbers(seed, 12 * count).chunks(12).map(|x| x.iter().sum::<f32>() / 2.0).collect()
}

/// An f16 is two bf16 exactly, and so are the products; sums of few terms have no rounding.
#[test]
fn f16_in_parts_is_exact() {
    let size @ [m, k, n] = [20, 4, 20];
    let bits = |seed| numbers(seed, m * k).iter().map(|x| (x * 2047.0).round()).collect::<Vec<f32>>();
    let [a, b] = [bits(1), bits(2).iter().map(|x| x / 4096.0).collect()];
    let device = tiled().cpu(1);
    let [x, w] = [(&a, [m, k]), (&b, [k, n])].map(|(x, shape)| tensor_as(&device, DType::F16, shape, x));
    // The weight gradient is stored in f32: of xᵀ and w, both with 4 rows.
    let x = tensor_as(&device, DType::F16, [k, m], &transposed([m, k], &read_f32(&device, &x)));
    let mut y = poisoned(&device, [m, n]);
    device.linear_weight_gradient(x.view(), w.view(), y.view_mut(), Layout::InOut, false);
    let exact = Expected::product(size, &a, &b);
    let y: Vec<f64> = read(&device, &y).into_iter().map(f64::from).collect();
    assert_eq!(y, exact.value);
}

/// Parts below the smallest normal number are zero, so f32 below about 2^-110 lose bits; larger ones lose none.
#[test]
fn small_f32_lose_bits_only_where_said() {
    let device = tiled().cpu(1);
    let times_one = |x: f32| multiply(&device, DType::F32, [1; 3], &[x], &[1.0])[0];
    let long = 1.0 + 2f32.powi(-23) + 2f32.powi(-9);
    for power in [-100, -60, 0, 60, 127] {
        assert_eq!(times_one(long * 2f32.powi(power)), long * 2f32.powi(power), "2^{power}");
    }
    let small = long * 2f32.powi(-112);
    let error = (times_one(small) / small - 1.0).abs();
    assert!(error > 0.0 && error < 2f32.powi(-15), "{error:e}");
    assert_eq!(times_one(2f32.powi(-127)), 0.0);
}

/// A number that is not finite makes its own row of the result so, and does not reach other rows through the padding.
#[test]
fn what_is_not_finite_stays_in_its_row_and_is_reported() {
    for path in KernelPath::all() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                let device = path.cpu(1);
                let size @ [m, k, n] = [37, 35, 39];
                let (mut x, w) = (numbers(1, m * k), numbers(2, k * n));
                x[36 * k + 34] = bad;
                let y = multiply(&device, dtype, size, &x, &w);
                let what = format!("{} {bad} {}", dtype.name(), path.name());
                assert!(y[36 * n..].iter().all(|y| !y.is_finite()), "{what}");
                assert!(y[..36 * n].iter().all(|y| y.is_finite()), "{what}");
                let (y, mut count) = (tensor(&device, [m, n], &y), poisoned(&device, [1]));
                device.count_non_finite(y.view(), count.view_mut());
                assert_eq!(read(&device, &count), [n as f32], "{what}");
            }
        }
    }
}
