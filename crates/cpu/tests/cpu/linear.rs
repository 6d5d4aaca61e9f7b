//! Matrix products and column sums.

use phalanx_simd::Isa;
use phalanx_tensor::{DType, Device, Epilogue, Layout, Weight};

use crate::oracle::{
    Expected, KernelPath, check, cpu, numbers, output, poisoned, poisoned_as, read, read_f32, tensor,
    tensor_as, transposed,
};

/// (rows, in, out).
const SHAPES: [[usize; 3]; 14] = [
    [1, 1, 1],
    [3, 1, 17],
    [1, 17, 3],
    [17, 3, 1],
    [3, 17, 67],
    [67, 67, 67],
    [12, 32, 64],
    [13, 31, 33],
    [257, 67, 17],
    [17, 257, 67],
    [67, 17, 257],
    [257, 1025, 65],
    [1030, 128, 131],
    [64, 600, 2100],
];

fn layouts() -> [Layout; 2] {
    [Layout::InOut, Layout::OutIn]
}

fn weight_shape(layout: Layout, inner: usize, out: usize) -> [usize; 2] {
    match layout {
        Layout::InOut => [inner, out],
        Layout::OutIn => [out, inner],
    }
}

/// The weight as `[in, out]`.
fn in_by_out(layout: Layout, [inner, out]: [usize; 2], w: &[f32]) -> Vec<f32> {
    if layout == Layout::InOut { w.to_vec() } else { transposed([out, inner], w) }
}

#[test]
fn linear_with_and_without_bias_and_residual() {
    for [rows, inner, out] in SHAPES {
        for layout in layouts() {
            let (x, w) = (numbers(1, rows * inner), numbers(2, inner * out));
            let (bias, residual) = (numbers(3, out), numbers(4, rows * out));
            let alone = Expected::product([rows, inner, out], &x, &in_by_out(layout, [inner, out], &w));
            for (with_bias, with_residual) in [(false, false), (true, false), (false, true), (true, true)] {
                let kernel = |device: &Device| {
                    let x = tensor(device, [rows, inner], &x);
                    let w = tensor(device, weight_shape(layout, inner, out), &w);
                    let bias = with_bias.then(|| tensor(device, [out], &bias));
                    let residual = with_residual.then(|| tensor(device, [rows, out], &residual));
                    let mut y = poisoned(device, [rows, out]);
                    let w = Weight { matrix: w.view(), layout };
                    let epilogue = Epilogue {
                        bias: bias.as_ref().map(|b| b.view()),
                        residual: residual.as_ref().map(|r| r.view()),
                    };
                    device.linear(x.view(), w, epilogue, y.view_mut());
                    vec![read(device, &y)]
                };
                let expected = alone.plus(|i| {
                    let b = if with_bias { f64::from(bias[i % out]) } else { 0.0 };
                    b + if with_residual { f64::from(residual[i]) } else { 0.0 }
                });
                check(&format!("linear {rows} x {inner} x {out} {layout:?}"), kernel, &[expected]);
            }
        }
    }
}

#[test]
fn input_gradient() {
    for [rows, inner, out] in SHAPES {
        for layout in layouts() {
            let (dy, w, before) = (numbers(1, rows * out), numbers(2, inner * out), numbers(3, rows * inner));
            let turned = transposed([inner, out], &in_by_out(layout, [inner, out], &w));
            let dx = Expected::product([rows, out, inner], &dy, &turned);
            for accumulate in [false, true] {
                let kernel = |device: &Device| {
                    let dy = tensor(device, [rows, out], &dy);
                    let w = tensor(device, weight_shape(layout, inner, out), &w);
                    let mut dx = output(device, [rows, inner], &before, accumulate);
                    device.linear_input_gradient(
                        dy.view(),
                        Weight { matrix: w.view(), layout },
                        dx.view_mut(),
                        accumulate,
                    );
                    vec![read(device, &dx)]
                };
                let expected = dx.plus(|i| if accumulate { f64::from(before[i]) } else { 0.0 });
                check(&format!("dx {rows} x {inner} x {out} {layout:?} {accumulate}"), kernel, &[expected]);
            }
        }
    }
}

#[test]
fn weight_gradient() {
    for [rows, inner, out] in SHAPES {
        for layout in layouts() {
            let (x, dy, before) = (numbers(1, rows * inner), numbers(2, rows * out), numbers(3, inner * out));
            let [down, across] = weight_shape(layout, inner, out);
            let (a, b) = if layout == Layout::InOut { (&x, &dy) } else { (&dy, &x) };
            let dw = Expected::product([down, rows, across], &transposed([rows, down], a), b);
            for accumulate in [false, true] {
                let kernel = |device: &Device| {
                    let (x, dy) = (tensor(device, [rows, inner], &x), tensor(device, [rows, out], &dy));
                    let mut dw = output(device, [down, across], &before, accumulate);
                    device.linear_weight_gradient(x.view(), dy.view(), dw.view_mut(), layout, accumulate);
                    vec![read(device, &dw)]
                };
                let expected = dw.plus(|i| if accumulate { f64::from(before[i]) } else { 0.0 });
                check(&format!("dw {rows} x {inner} x {out} {layout:?} {accumulate}"), kernel, &[expected]);
            }
        }
    }
}

#[test]
fn bias_gradient() {
    for [rows, out] in
        [[1, 1], [3, 17], [257, 67], [67, 257], [5000, 3], [1030, 131], [1, 20_000], [70, 20_000]]
    {
        for accumulate in [false, true] {
            let (dy, before) = (numbers(1, rows * out), numbers(2, out));
            let kernel = |device: &Device| {
                let dy = tensor(device, [rows, out], &dy);
                let mut db = output(device, [out], &before, accumulate);
                device.bias_gradient(dy.view(), db.view_mut(), accumulate);
                vec![read(device, &db)]
            };
            let expected = Expected::product([1, rows, out], &vec![1.0; rows], &dy)
                .plus(|i| if accumulate { f64::from(before[i]) } else { 0.0 });
            check(&format!("db {rows} x {out}"), kernel, &[expected]);
        }
    }
}

/// A row of the result has the same bits with any other rows above or below it: tiles and tasks are cut differently,
/// and few rows read the weight where it lies, but sums are the same.
#[test]
fn a_row_depends_on_itself_alone() {
    let (inner, out) = (1101, 531);
    let [x, w, bias] =
        [(1, 257 * inner), (2, inner * out), (3, out)].map(|(seed, count)| numbers(seed, count));
    let types = [DType::F32, DType::BF16, DType::F16];
    for (path, layout, dtype) in types.iter().flat_map(|dtype| {
        let of_path = |path: KernelPath| layouts().map(|layout| (path, layout, *dtype));
        KernelPath::all().flat_map(of_path)
    }) {
        let device = path.cpu(2);
        let product = |rows: std::ops::Range<usize>| {
            let x = tensor_as(&device, dtype, [rows.len(), inner], &x[rows.start * inner..rows.end * inner]);
            let w = tensor_as(&device, dtype, weight_shape(layout, inner, out), &w);
            let bias = tensor_as(&device, dtype, [out], &bias);
            let mut y = poisoned_as(&device, dtype, [rows.len(), out]);
            let epilogue = Epilogue { bias: Some(bias.view()), residual: None };
            device.linear(x.view(), Weight { matrix: w.view(), layout }, epilogue, y.view_mut());
            read_f32(&device, &y)
        };
        let whole = product(0..257);
        for rows in [0..1, 1..3, 5..8, 252..256, 5..18, 100..257, 256..257] {
            let part = product(rows.clone());
            let same = whole[rows.start * out..rows.end * out]
                .iter()
                .zip(&part)
                .all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "rows {rows:?} in {dtype:?}, {layout:?}, on {}", path.name());
        }
    }
}

/// Without rows, gradients are zero, or unchanged if accumulated.
#[test]
fn no_rows() {
    let device = cpu(2, Isa::detect());
    let (x, dy) = (tensor(&device, [0, 3], &[]), tensor(&device, [0, 4], &[]));
    for (accumulate, expected) in [(false, 0.0), (true, 7.0)] {
        let mut dw = output(&device, [3, 4], &[7.0; 12], accumulate);
        device.linear_weight_gradient(x.view(), dy.view(), dw.view_mut(), Layout::InOut, accumulate);
        assert_eq!(read(&device, &dw), [expected; 12]);
        let mut db = output(&device, [4], &[7.0; 4], accumulate);
        device.bias_gradient(dy.view(), db.view_mut(), accumulate);
        assert_eq!(read(&device, &db), [expected; 4]);
    }
}
