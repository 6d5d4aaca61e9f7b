//! GELU, and the elementwise kernels.

use phalanx_tensor::{Category, DType, Device};

use crate::oracle::{Expected, check, cpu, numbers, output, poisoned, read, tensor, wide};
use phalanx_tensor::cpu::simd::Isa;

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// Ordinary values and extreme ones.
fn inputs(count: usize) -> Vec<f32> {
    let mut x: Vec<f32> = numbers(1, count).iter().map(|x| x * 6.0).collect();
    let special = [0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 1e4, -1e4, 1e20, -1e20, f32::MAX, f32::MIN];
    for (x, s) in x.iter_mut().skip(1).zip(special) {
        *x = s;
    }
    x
}

/// exp's argument is off by a few roundings of |2u|, which is below 88 where the result is a number.
const ROUNDINGS: f64 = 4.0 * 88.0;

#[test]
fn gelu_forward() {
    for count in [1, 3, 16, 17, 67, 257, 40_001] {
        let x = inputs(count);
        let kernel = |device: &Device| {
            let x = tensor(device, [count], &x);
            let mut y = poisoned(device, [count]);
            device.gelu(x.view(), y.view_mut());
            vec![read(device, &y)]
        };
        let y: Vec<f64> =
            wide(&x).into_iter().map(|x| if x.abs() > 1e3 { x.max(0.0) } else { gelu(x) }).collect();
        // Near zero output the reference's own 1 + tanh cancels: 1e-16 * |x| absolute.
        let magnitude = wide(&x).iter().zip(&y).map(|(x, y)| y.abs() + 1e-9 * x.abs().min(30.0)).collect();
        check("gelu", kernel, &[Expected { value: y, magnitude, roundings: ROUNDINGS }]);
    }
}

#[test]
fn gelu_backward_against_differences() {
    for count in [1, 3, 17, 67, 257, 20_001] {
        let (x, dy) = (inputs(count), numbers(2, count));
        let kernel = |device: &Device| {
            let x = tensor(device, [count], &x);
            let mut dy = tensor(device, [count], &dy);
            let mut db = poisoned(device, [count]);
            device.gelu_backward(x.view(), dy.view_mut(), db.view_mut(), false);
            vec![read(device, &dy)]
        };
        let h = 1e-5;
        let slope = |x: f64| match x {
            x if x > 1e3 => 1.0,
            x if x < -1e3 => 0.0,
            x => (gelu(x + h) - gelu(x - h)) / (2.0 * h),
        };
        let dx: Vec<f64> = wide(&x).into_iter().zip(wide(&dy)).map(|(x, dy)| dy * slope(x)).collect();
        // s + x s (1 - s) 2u' has terms up to about 1 whatever their sum; differences are good to 1e-10.
        check(
            "gelu backward",
            kernel,
            &[Expected { magnitude: vec![0.2; count], value: dx, roundings: 64.0 }],
        );
    }
}

#[test]
fn gelu_of_what_is_not_a_number() {
    let device = cpu(1, Isa::detect());
    let x = tensor(&device, [2], &[f32::NAN, f32::INFINITY]);
    let mut y = poisoned(&device, [2]);
    device.gelu(x.view(), y.view_mut());
    let y = read(&device, &y);
    assert!(y[0].is_nan() && y[1] == f32::INFINITY, "{y:?}");
}

#[test]
fn fill_copy_add() {
    for count in [1, 3, 17, 67, 257, 70_001] {
        let (x, before) = (numbers(1, count), numbers(2, count));
        let kernel = |device: &Device| {
            let from = tensor(device, [count], &x);
            let mut filled = poisoned(device, [count]);
            device.fill(filled.view_mut(), 2.5);
            let mut copied = poisoned(device, [count]);
            device.copy(from.view(), copied.view_mut());
            let mut added = output(device, [count], &before, true);
            device.add(from.view(), added.view_mut());
            vec![read(device, &filled), read(device, &copied), read(device, &added)]
        };
        let sum: Vec<f64> = wide(&x).iter().zip(wide(&before)).map(|(a, b)| a + b).collect();
        let expected = [
            Expected::relative(vec![2.5; count], 0.0),
            Expected::relative(wide(&x), 0.0),
            Expected::relative(sum, 1.0),
        ];
        check("fill, copy, add", kernel, &expected);
    }
}

#[test]
fn f64_and_u32_travel_unchanged() {
    let device = cpu(2, Isa::detect());
    let values: Vec<f64> = (0..1000).map(|i| f64::from(i) / 7.0).collect();
    let mut t = device.alloc(DType::F64, [1000], Category::Workspace, "test");
    device.upload(&values, t.view_mut());
    let mut sum = device.alloc(DType::F64, [1000], Category::Workspace, "test");
    device.fill(sum.view_mut(), 1.0);
    device.add(t.view(), sum.view_mut());
    let mut out = vec![0f64; 1000];
    device.download(sum.view(), &mut out);
    assert!(out.iter().zip(&values).all(|(o, v)| *o == v + 1.0));

    let ids: Vec<u32> = (0..1000).map(|i| i * 4_000_000).collect();
    let mut t = device.alloc(DType::U32, [1000], Category::Workspace, "test");
    device.upload(&ids, t.view_mut());
    let mut copy = device.alloc(DType::U32, [1000], Category::Workspace, "test");
    device.copy(t.view(), copy.view_mut());
    let mut out = vec![0u32; 1000];
    device.download(copy.view(), &mut out);
    assert_eq!(out, ids);
}
