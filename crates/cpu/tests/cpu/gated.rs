//! Gated activations, and their gradients against differences.

use phalanx_simd::Isa;
use phalanx_tensor::{DType, Device, Gate, Gelu};

use crate::differences::{gradient, weighted};
use crate::oracle::{
    Expected, FLOATS, check, check_as, cpu, numbers, poisoned, poisoned_as, read, read_f32, rounded, tensor,
    tensor_as, wide,
};
use crate::pointwise::{ROUNDINGS, gelu};

const GATES: [Gate; 3] = [Gate::Silu, Gate::Gelu(Gelu::Tanh), Gate::Gelu(Gelu::Erf)];

fn activation(gate: Gate, x: f64) -> f64 {
    match gate {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::Gelu(form) => gelu(form, x),
    }
}

/// Rows of `2 columns`.
fn reference(gate: Gate, columns: usize, x: &[f64]) -> Vec<f64> {
    let of_row = |row: &[f64]| -> Vec<f64> {
        let (gates, ups) = row.split_at(columns);
        gates.iter().zip(ups).map(|(g, u)| activation(gate, *g) * u).collect()
    };
    x.chunks(2 * columns).flat_map(of_row).collect()
}

/// Numbers of which the gates go from -12 to 12.
fn inputs(dtype: DType, [rows, columns]: [usize; 2]) -> Vec<f32> {
    let spread = |(i, x): (usize, f32)| if i % (2 * columns) < columns { 12.0 * x } else { x };
    let x: Vec<f32> = numbers(1, 2 * rows * columns).into_iter().enumerate().map(spread).collect();
    rounded(dtype, &x)
}

const SHAPES: [[usize; 2]; 7] = [[1, 1], [3, 5], [2, 16], [7, 17], [301, 33], [5, 1030], [1, 20_001]];

#[test]
fn forward() {
    for (gate, dtype) in GATES.into_iter().flat_map(|gate| FLOATS.map(|dtype| (gate, dtype))) {
        for [rows, columns] in SHAPES {
            let x = inputs(dtype, [rows, columns]);
            let kernel = |device: &Device| {
                let x = tensor_as(device, dtype, [rows, 2 * columns], &x);
                let mut y = poisoned_as(device, dtype, [rows, columns]);
                device.gated(x.view(), gate, y.view_mut());
                vec![read_f32(device, &y)]
            };
            let value = reference(gate, columns, &wide(&x));
            // Near zero output GELU's own 1 + tanh cancels, in the reference: 1e-16 * |x| absolute.
            let magnitude = value.iter().map(|y| y.abs() + 1e-9 * 12.0).collect();
            let expected = Expected { value, magnitude, roundings: ROUNDINGS };
            check_as(&format!("gated {gate:?} {rows} x {columns}"), kernel, &[expected], &[dtype]);
        }
    }
}

/// dx, whose terms are at most about 1.2 times dy and up; both are at most 1, and values at most 12.
#[test]
fn backward_against_differences() {
    for (gate, dtype) in GATES.into_iter().flat_map(|gate| FLOATS.map(|dtype| (gate, dtype))) {
        for [rows, columns] in [[1, 1], [3, 5], [2, 16], [7, 17], [40, 33], [2, 101]] {
            let (x, dy) = (inputs(dtype, [rows, columns]), rounded(dtype, &numbers(2, rows * columns)));
            let kernel = |device: &Device| {
                let mut x = tensor_as(device, dtype, [rows, 2 * columns], &x);
                let dy = tensor_as(device, dtype, [rows, columns], &dy);
                device.gated_backward(x.view_mut(), gate, dy.view());
                vec![read_f32(device, &x)]
            };
            // A row at a time: the sum of few terms loses little in its differences.
            let of_row = |(x, dy): (&[f32], &[f32])| {
                gradient(&wide(x), |x| weighted(&reference(gate, columns, x), dy))
            };
            let dx: Vec<f64> = x.chunks(2 * columns).zip(dy.chunks(columns)).flat_map(of_row).collect();
            let magnitude = dx.iter().map(|dx| dx.abs() + 0.2).collect();
            let expected = Expected { value: dx, magnitude, roundings: 64.0 };
            check_as(&format!("gated backward {gate:?} {rows} x {columns}"), kernel, &[expected], &[dtype]);
        }
    }
}

/// Many rows are too slow for differences, so they are compared with the derivative in f64.
#[test]
fn backward_of_many_rows() {
    let slope = |x: f64| {
        let s = 1.0 / (1.0 + (-x).exp());
        s * (1.0 + x * (1.0 - s))
    };
    for (dtype, [rows, columns]) in FLOATS.into_iter().flat_map(|dtype| SHAPES.map(|shape| (dtype, shape))) {
        let (x, dy) = (inputs(dtype, [rows, columns]), rounded(dtype, &numbers(2, rows * columns)));
        let kernel = |device: &Device| {
            let mut x = tensor_as(device, dtype, [rows, 2 * columns], &x);
            let dy = tensor_as(device, dtype, [rows, columns], &dy);
            device.gated_backward(x.view_mut(), Gate::Silu, dy.view());
            vec![read_f32(device, &x)]
        };
        let mut dx = Vec::new();
        for (x, dy) in wide(&x).chunks(2 * columns).zip(wide(&dy).chunks(columns)) {
            let (gates, ups) = x.split_at(columns);
            dx.extend((0..columns).map(|i| dy[i] * ups[i] * slope(gates[i])));
            dx.extend((0..columns).map(|i| dy[i] * activation(Gate::Silu, gates[i])));
        }
        let magnitude = dx.iter().map(|dx| dx.abs() + 0.2).collect();
        let expected = Expected { value: dx, magnitude, roundings: 64.0 };
        check_as(&format!("gated backward {rows} x {columns}"), kernel, &[expected], &[dtype]);
    }
}

/// SiLU is off by a few roundings of its own, however small it is, down to where the exponential is not a number any more.
#[test]
fn silu_is_relative() {
    let gates: Vec<f32> = (0..20_001).map(|i| i as f32 / 125.0 - 80.0).collect();
    let (value, x) = (wide(&gates).iter().map(|x| activation(Gate::Silu, *x)).collect(), {
        let ones = vec![1.0; gates.len()];
        [gates, ones].concat()
    });
    let kernel = |device: &Device| {
        let x = tensor(device, [1, x.len()], &x);
        let mut y = poisoned(device, [1, x.shape().elements() / 2]);
        device.gated(x.view(), Gate::Silu, y.view_mut());
        vec![read(device, &y)]
    };
    check("silu", kernel, &[Expected::relative(value, 6.0)]);
}

#[test]
fn silu_of_large_numbers_and_of_what_is_none() {
    for dtype in FLOATS {
        let device = cpu(1, Isa::detect());
        let x = [f32::NAN, f32::INFINITY, 1e4, -1e4, 60_000.0, -60_000.0];
        let x = rounded(dtype, &[&x[..], &[1.0; 6]].concat());
        let mut x = tensor_as(&device, dtype, [1, 12], &x);
        let mut y = poisoned_as(&device, dtype, [1, 6]);
        device.gated(x.view(), Gate::Silu, y.view_mut());
        let (y, kept) = (read_f32(&device, &y), read_f32(&device, &x));
        assert!(y[0].is_nan() && y[1] == f32::INFINITY, "{y:?}");
        assert_eq!(y[2..], [kept[2], 0.0, kept[4], 0.0]);
        let dy = tensor_as(&device, dtype, [1, 6], &[1.0; 6]);
        device.gated_backward(x.view_mut(), Gate::Silu, dy.view());
        let dx = read_f32(&device, &x);
        assert!(dx[0].is_nan() && dx[1] == 1.0, "{dx:?}");
        assert!(dx[2] == 1.0 && dx[3].abs() < 1e-30 && dx[4] == 1.0 && dx[5].abs() < 1e-30, "{dx:?}");
    }
}
