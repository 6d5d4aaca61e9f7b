//! GELU, and the elementwise kernels.

use half::{bf16, f16};
use phalanx_simd::Isa;
use phalanx_tensor::{Category, DType, Device, Gelu};

use crate::oracle::{
    Expected, FLOATS, check, check_as, check_exact, cpu, gradient_types, numbers, output, output_as,
    poisoned, poisoned_as, read, read_f32, rounded, tensor, tensor_as, wide,
};

const FORMS: [Gelu; 2] = [Gelu::Tanh, Gelu::Erf];

pub fn gelu(form: Gelu, x: f64) -> f64 {
    match form {
        Gelu::Tanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Gelu::Erf => x * normal(x),
    }
}

/// The normal distribution up to x. Near zero by its Taylor series, whose terms have one sign (80 of them leave
/// less than 1e-60); farther out by the continued fraction of its tail (Abramowitz and Stegun, 26.2.14), of which
/// 100 steps leave less than 1e-16.
fn normal(x: f64) -> f64 {
    let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let a = x.abs();
    if a < 3.0 {
        let (mut term, mut sum) = (x, x);
        for n in 1..80 {
            term *= x * x / f64::from(2 * n + 1);
            sum += term;
        }
        return 0.5 + density * sum;
    }
    let tail = density / (1..=100).rev().fold(a, |below, n| a + f64::from(n) / below);
    if x > 0.0 { 1.0 - tail } else { tail }
}

#[test]
fn the_reference_is_the_normal_distribution() {
    // Values of Abramowitz and Stegun, table 26.1, and the point where both formulas meet.
    for (x, value) in [(0.0, 0.5), (1.0, 0.841_344_746_068_543), (2.0, 0.977_249_868_051_821)] {
        assert!((normal(x) - value).abs() < 1e-15 && (normal(-x) + value - 1.0).abs() < 1e-15, "{x}");
    }
    assert!((normal(-3.0) - normal(-2.999_999_999_999)).abs() < 1e-13);
    assert!((normal(-3.0) - 1.349_898_031_630_095e-3).abs() < 1e-15);
}

/// Ordinary and extreme values, rounded to `dtype`.
fn inputs(dtype: DType, count: usize) -> Vec<f32> {
    let largest = if dtype == DType::F16 { 65_504.0 } else { 3e38 };
    let mut x: Vec<f32> = numbers(1, count).iter().map(|x| x * 6.0).collect();
    let special = [0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 1e4, -1e4, 1e20, -1e20, f32::MAX, f32::MIN];
    for (x, s) in x.iter_mut().skip(1).zip(special) {
        *x = s.clamp(-largest, largest);
    }
    rounded(dtype, &x)
}

/// The exponent is off by a few roundings of |2u|, which is below 88 where the result is a number.
pub const ROUNDINGS: f64 = 4.0 * 88.0;

#[test]
fn gelu_forward() {
    for (form, dtype) in FORMS.into_iter().flat_map(|form| FLOATS.map(|dtype| (form, dtype))) {
        for count in [1, 3, 16, 17, 67, 257, 40_001] {
            let x = inputs(dtype, count);
            let kernel = |device: &Device| {
                let x = tensor_as(device, dtype, [count], &x);
                let mut y = poisoned_as(device, dtype, [count]);
                device.gelu(x.view(), form, y.view_mut());
                vec![read_f32(device, &y)]
            };
            let y: Vec<f64> = wide(&x)
                .into_iter()
                .map(|x| if x.abs() > 1e3 { x.max(0.0) } else { gelu(form, x) })
                .collect();
            // Near zero output the reference's own 1 + tanh cancels: 1e-16 * |x| absolute.
            let magnitude =
                wide(&x).iter().zip(&y).map(|(x, y)| y.abs() + 1e-9 * x.abs().min(30.0)).collect();
            let expected = Expected { value: y, magnitude, roundings: ROUNDINGS };
            check_as("gelu", kernel, &[expected], &[dtype]);
        }
    }
}

/// An exponential and a quotient far from 0, a polynomial near it: a few roundings. `1 - y²` is rounded twice.
#[test]
fn tanh_forward_and_backward() {
    for (dtype, count) in
        FLOATS.into_iter().flat_map(|dtype| [1, 17, 257, 40_001].map(|count| (dtype, count)))
    {
        let (x, dy) = (inputs(dtype, count), rounded(dtype, &numbers(2, count)));
        let y = rounded(dtype, &wide(&x).into_iter().map(|x| x.tanh() as f32).collect::<Vec<_>>());
        let kernel = |device: &Device| {
            let x = tensor_as(device, dtype, [count], &x);
            let mut out = poisoned_as(device, dtype, [count]);
            device.tanh(x.view(), out.view_mut());
            let mut dx = tensor_as(device, dtype, [count], &dy);
            device.tanh_backward(tensor_as(device, dtype, [count], &y).view(), dx.view_mut());
            vec![read_f32(device, &out), read_f32(device, &dx)]
        };
        let value: Vec<f64> = wide(&x).into_iter().map(f64::tanh).collect();
        let magnitude = value.iter().map(|y| y.abs() + 1e-30).collect();
        let forward = Expected { value, magnitude, roundings: 16.0 };
        let value = wide(&y).iter().zip(wide(&dy)).map(|(y, dy)| dy * (1.0 - y * y)).collect();
        let magnitude = wide(&dy).iter().map(|dy| dy.abs()).collect();
        check_as("tanh", kernel, &[forward, Expected { value, magnitude, roundings: 4.0 }], &[dtype, dtype]);
    }
}

/// By erf nothing cancels: the tail is off by a few roundings of its own, `2 a² + 28` of them (an exponential whose
/// argument is off by some of its roundings, times a quotient of polynomials of 5 steps), however small it is.
#[test]
fn gelu_by_erf_is_relative_to_its_tail() {
    let x: Vec<f32> = (0..26_001).map(|i| i as f32 / 1000.0 - 13.0).collect();
    let (mut value, mut magnitude) = (Vec::new(), Vec::new());
    for x in wide(&x) {
        let y = gelu(Gelu::Erf, x);
        let tail = normal(-x.abs());
        value.push(y);
        magnitude.push(x.abs() * tail * (2.0 * x * x + 28.0) + 2.0 * y.abs());
    }
    let kernel = |device: &Device| {
        let x = tensor(device, [x.len()], &x);
        let mut y = poisoned(device, x.shape());
        device.gelu(x.view(), Gelu::Erf, y.view_mut());
        vec![read(device, &y)]
    };
    check("gelu by erf", kernel, &[Expected { value, magnitude, roundings: 1.0 }]);
}

/// dx against differences, and db against the sum of these.
#[test]
fn gelu_backward_against_differences() {
    let h = 1e-5;
    let slope = |form: Gelu, x: f64| match x {
        x if x > 1e3 => 1.0,
        x if x < -1e3 => 0.0,
        x => (gelu(form, x + h) - gelu(form, x - h)) / (2.0 * h),
    };
    let shapes = [[1, 1], [1, 3], [5, 1], [3, 17], [257, 33], [40, 1000], [3000, 5], [1, 20_001]];
    for (form, [rows, width]) in FORMS.into_iter().flat_map(|form| shapes.map(|shape| (form, shape))) {
        for (dtype, gradient) in
            FLOATS.into_iter().flat_map(|d| gradient_types(d).into_iter().map(move |g| (d, g)))
        {
            for accumulate in [false, true] {
                let (x, dy) = (inputs(dtype, rows * width), rounded(dtype, &numbers(2, rows * width)));
                let before = rounded(gradient, &numbers(3, width));
                let kernel = |device: &Device| {
                    let x = tensor_as(device, dtype, [rows, width], &x);
                    let mut dy = tensor_as(device, dtype, [rows, width], &dy);
                    let mut db = output_as(device, gradient, [width], &before, accumulate);
                    device.gelu_backward(x.view(), form, dy.view_mut(), Some(db.view_mut()), accumulate);
                    vec![read_f32(device, &dy), read_f32(device, &db)]
                };
                let dx: Vec<f64> =
                    wide(&x).into_iter().zip(wide(&dy)).map(|(x, dy)| dy * slope(form, x)).collect();
                let mut db = if accumulate { wide(&before) } else { vec![0.0; width] };
                let mut magnitude: Vec<f64> = db.iter().map(|b| b.abs() + 0.2 * rows as f64).collect();
                for (i, dx) in dx.iter().enumerate() {
                    db[i % width] += dx;
                    magnitude[i % width] += dx.abs();
                }
                // s + x s (1 - s) 2u' has terms up to about 1 whatever their sum; differences are good to
                // 1e-10.
                let dx = Expected { magnitude: vec![0.2; dx.len()], value: dx, roundings: 64.0 };
                // The errors of all dx before they are rounded, and at most `rows` additions.
                let db = Expected { value: db, magnitude, roundings: 64f64.max(rows as f64 + 1.0) };
                check_as(
                    &format!("gelu backward {rows} x {width} {accumulate}"),
                    kernel,
                    &[dx, db],
                    &[dtype, gradient],
                );
            }
        }
    }
}

#[test]
fn gelu_of_what_is_not_a_number() {
    for (form, dtype) in FORMS.into_iter().flat_map(|form| FLOATS.map(|dtype| (form, dtype))) {
        let device = cpu(1, Isa::detect());
        let x = tensor_as(&device, dtype, [2], &[f32::NAN, f32::INFINITY]);
        let mut y = poisoned_as(&device, dtype, [2]);
        device.gelu(x.view(), form, y.view_mut());
        let y = read_f32(&device, &y);
        assert!(y[0].is_nan() && y[1] == f32::INFINITY, "{y:?}");
        let mut dy = tensor_as(&device, dtype, [2], &[1.0, 1.0]);
        let mut db = poisoned(&device, [2]);
        device.gelu_backward(x.view(), form, dy.view_mut(), Some(db.view_mut()), false);
        for dx in [read_f32(&device, &dy), read(&device, &db)] {
            assert!(dx[0].is_nan() && dx[1] == 1.0, "{dx:?}");
        }
    }
}

#[test]
fn bias_gradient() {
    for [rows, width] in [[1, 1], [1, 17], [7, 3], [257, 33], [3000, 5], [100, 1030], [3, 20_001]] {
        for (dtype, gradient) in
            FLOATS.into_iter().flat_map(|d| gradient_types(d).into_iter().map(move |g| (d, g)))
        {
            for accumulate in [false, true] {
                let dy = rounded(dtype, &numbers(1, rows * width));
                let before = rounded(gradient, &numbers(2, width));
                let kernel = |device: &Device| {
                    let dy = tensor_as(device, dtype, [rows, width], &dy);
                    let mut db = output_as(device, gradient, [width], &before, accumulate);
                    device.bias_gradient(dy.view(), db.view_mut(), accumulate);
                    vec![read_f32(device, &db)]
                };
                let mut db = if accumulate { wide(&before) } else { vec![0.0; width] };
                let mut magnitude: Vec<f64> = db.iter().map(|b| b.abs()).collect();
                for (i, dy) in wide(&dy).into_iter().enumerate() {
                    db[i % width] += dy;
                    magnitude[i % width] += dy.abs();
                }
                // At most `rows` additions.
                let expected = Expected { value: db, magnitude, roundings: rows as f64 + 1.0 };
                check_as(&format!("bias gradient {rows} x {width}"), kernel, &[expected], &[gradient]);
            }
        }
    }
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

/// Ordinary values, ties between two numbers of 16 bits, subnormals, the largest number, infinity and NaN.
fn rough(count: usize) -> Vec<f32> {
    let special = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.0,
        -0.0,
        1.0 + 0.5f32.powi(8),
        1.0 + 3.0 * 0.5f32.powi(8),
        1.0 + 0.5f32.powi(11),
        -1.0 - 3.0 * 0.5f32.powi(11),
        65_519.0,
        65_520.0,
        f32::MAX,
        3e-8,
        -6e-6,
        1e-40,
    ];
    let mut x: Vec<f32> = numbers(1, count).iter().map(|x| x * 100.0).collect();
    x.iter_mut().skip(count / 3).zip(special).for_each(|(x, s)| *x = s);
    x
}

#[test]
fn conversions_between_all_types() {
    for (from, to) in FLOATS.into_iter().flat_map(|from| FLOATS.map(|to| (from, to))) {
        for count in [1, 3, 16, 67, 257, 40_001] {
            let x = rounded(from, &rough(count));
            let kernel = |device: &Device| {
                let x = tensor_as(device, from, [count], &x);
                let mut y = tensor_as(device, to, [count], &vec![7.0; count]);
                device.convert(x.view(), y.view_mut());
                read_f32(device, &y)
            };
            check_exact(&format!("convert {} to {}", from.name(), to.name()), kernel, &rounded(to, &x));
        }
    }
}

/// One addition in f32, one rounding: known to the bit.
#[test]
fn additions_of_all_types() {
    for (from, to) in FLOATS.into_iter().flat_map(|from| FLOATS.map(|to| (from, to))) {
        for count in [1, 3, 16, 67, 257, 40_001] {
            let (x, before) = (rounded(from, &rough(count)), rounded(to, &numbers(2, count)));
            let kernel = |device: &Device| {
                let x = tensor_as(device, from, [count], &x);
                let mut y = tensor_as(device, to, [count], &before);
                device.add(x.view(), y.view_mut());
                read_f32(device, &y)
            };
            let sums: Vec<f32> = x.iter().zip(&before).map(|(a, b)| b + a).collect();
            check_exact(&format!("add {} to {}", from.name(), to.name()), kernel, &rounded(to, &sums));
        }
    }
}

#[test]
fn fills_and_copies_of_16_bits() {
    for dtype in FLOATS {
        for count in [1, 17, 140_001] {
            let fill = |device: &Device| {
                let mut y = poisoned_as(device, dtype, [count]);
                device.fill(y.view_mut(), 0.1);
                read_f32(device, &y)
            };
            check_exact("fill", fill, &rounded(dtype, &vec![0.1; count]));
            let x = rounded(dtype, &rough(count));
            let copy = |device: &Device| {
                let x = tensor_as(device, dtype, [count], &x);
                let mut y = tensor_as(device, dtype, [count], &vec![7.0; count]);
                device.copy(x.view(), y.view_mut());
                read_f32(device, &y)
            };
            check_exact("copy", copy, &x);
        }
    }
}

#[test]
fn other_types_travel_unchanged() {
    let device = cpu(2, Isa::detect());
    let values: Vec<f64> = (0..1000).map(|i| f64::from(i) / 7.0).collect();
    let mut t = device.alloc(DType::F64, [1000], Category::Workspace, "test");
    device.upload(&values, t.view_mut());
    let mut sum = device.alloc(DType::F64, [1000], Category::Workspace, "test");
    device.fill(sum.view_mut(), 1.0);
    device.add(t.view(), sum.view_mut());
    let mut out = vec![0f64; 1000];
    device.download(sum.view(), &mut out).unwrap();
    assert!(out.iter().zip(&values).all(|(o, v)| *o == v + 1.0));

    let ids: Vec<u32> = (0..1000).map(|i| i * 4_000_000).collect();
    let mut t = device.alloc(DType::U32, [1000], Category::Workspace, "test");
    device.upload(&ids, t.view_mut());
    let mut copy = device.alloc(DType::U32, [1000], Category::Workspace, "test");
    device.copy(t.view(), copy.view_mut());
    let mut out = vec![0u32; 1000];
    device.download(copy.view(), &mut out).unwrap();
    assert_eq!(out, ids);

    // Every pattern of 16 bits, including NaNs.
    let bits = 0..=u16::MAX;
    let mut t = device.alloc(DType::BF16, [1 << 16], Category::Workspace, "test");
    device.upload(&bits.clone().map(bf16::from_bits).collect::<Vec<_>>(), t.view_mut());
    let mut out = vec![bf16::ZERO; 1 << 16];
    device.download(t.view(), &mut out).unwrap();
    assert!(out.iter().map(|x| x.to_bits()).eq(bits.clone()));
    let mut t = device.alloc(DType::F16, [1 << 16], Category::Workspace, "test");
    device.upload(&bits.clone().map(f16::from_bits).collect::<Vec<_>>(), t.view_mut());
    let mut out = vec![f16::ZERO; 1 << 16];
    device.download(t.view(), &mut out).unwrap();
    assert!(out.iter().map(|x| x.to_bits()).eq(bits));
}

/// The factor is rounded to the type before: 55.4256 is 55.5 in bf16, as transformers multiplies Gemma's embeddings.
#[test]
fn products_with_a_factor() {
    for (dtype, factor) in [(DType::F32, 55.4256), (DType::BF16, 55.5), (DType::F16, 55.4375)] {
        let x = rounded(dtype, &numbers(1, 4099));
        let expected: Vec<f32> = x.iter().map(|x| x * factor).collect();
        let kernel = |device: &Device| {
            let mut x = tensor_as(device, dtype, [4099], &x);
            device.multiply(x.view_mut(), 55.4256);
            read_f32(device, &x)
        };
        check_exact(dtype.name(), kernel, &rounded(dtype, &expected));
    }
}
