//! AdamW, SGD, the norm, and the count of what is not finite.

use std::ops::Range;

use phalanx_simd::Isa;
use phalanx_tensor::{AdamW, AdamWUpdate, Category, Clip, DType, Device, NORM_BLOCK, Sgd, SgdUpdate, Tensor};

use crate::oracle::{
    Expected, FLOATS, check_as, check_exact, cpu, numbers, poisoned, poisoned_as, read, read_f32, rounded,
    same_bits, tensor, tensor_as, wide,
};

const COUNTS: [usize; 8] = [1, 3, 15, 17, 67, 257, 4096, 33_001];

/// Types of the gradient and of the rounded copy.
const TYPES: [(DType, Option<DType>); 7] = [
    (DType::F32, None),
    (DType::F32, Some(DType::BF16)),
    (DType::F32, Some(DType::F16)),
    (DType::BF16, None),
    (DType::BF16, Some(DType::BF16)),
    (DType::F16, Some(DType::F16)),
    (DType::F16, Some(DType::F32)),
];

/// Memory for a rounded copy.
fn copy_of(device: &Device, dtype: Option<DType>, count: usize) -> Option<Tensor> {
    dtype.map(|dtype| poisoned_as(device, dtype, [count]))
}

/// Three steps on a range of p, g, m and v: p, m, v and the rounded copy of p.
fn adamw(
    device: &Device,
    (gradient, copy): (DType, Option<DType>),
    state: &[Vec<f32>; 4],
    range: Range<usize>,
) -> Vec<Vec<f32>> {
    let [mut p, _, mut m, mut v] = state.each_ref().map(|x| tensor(device, [range.len()], &x[range.clone()]));
    let g = tensor_as(device, gradient, [range.len()], &state[1][range.clone()]);
    let mut copy = copy_of(device, copy, range.len());
    let scale = tensor(device, [1], &[0.5]);
    for step in 3..6 {
        let numbers = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
        let rounded = copy.as_mut().map(|c| c.view_mut());
        device.run(AdamWUpdate {
            step: numbers,
            p: p.view_mut(),
            g: g.view(),
            moments: [m.view_mut(), v.view_mut()],
            gradient_scale: scale.view(),
            rounded,
        });
    }
    let mut out: Vec<Vec<f32>> = [p, m, v].iter().map(|x| read(device, x)).collect();
    out.extend(copy.map(|c| read_f32(device, &c)));
    out
}

fn adamw_state(count: usize, gradient: DType) -> [Vec<f32>; 4] {
    let mut v = numbers(4, count);
    v.iter_mut().for_each(|v| *v = v.abs());
    [numbers(1, count), rounded(gradient, &numbers(2, count)), numbers(3, count), v]
}

#[test]
fn adamw_as_pytorch() {
    for (types, count) in TYPES.into_iter().flat_map(|types| COUNTS.map(|count| (types, count))) {
        let state = adamw_state(count, types.0);
        let [mut p, g, mut m, mut v] = state.each_ref().map(|x| wide(x));
        let (lr, beta1, beta2) = (f64::from(1e-2f32), f64::from(0.9f32), f64::from(0.95f32));
        for step in 3..6 {
            for i in 0..count {
                let g = g[i] * 0.5;
                p[i] *= 1.0 - lr * f64::from(0.1f32);
                m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                let denominator = v[i].sqrt() / (1.0 - beta2.powi(step)).sqrt() + f64::from(1e-8f32);
                p[i] -= lr / (1.0 - beta1.powi(step)) * m[i] / denominator;
            }
        }
        // Three steps of about eight roundings each, of values up to about 1 (m and v) and 1 + 3 lr (p).
        let mut outputs = vec![p.clone(), m, v];
        let mut stored = vec![DType::F32; 3];
        if let Some(copy) = types.1 {
            outputs.push(p);
            stored.push(copy);
        }
        let one = |value: Vec<f64>| Expected { magnitude: vec![1.1; value.len()], value, roundings: 24.0 };
        let expected: Vec<Expected> = outputs.into_iter().map(one).collect();
        check_as("adamw", |device| adamw(device, types, &state, 0..count), &expected, &stored);
    }
}

/// A shard computes the same bits for an element as the whole, for any cut.
#[test]
fn adamw_does_not_depend_on_position() {
    for types in TYPES {
        let state = adamw_state(5000, types.0);
        for isa in Isa::ALL {
            let device = cpu(1, isa);
            let whole = adamw(&device, types, &state, 0..5000);
            for range in [1..5000, 4096..5000, 7..8, 13..400, 4999..5000] {
                let parts = adamw(&device, types, &state, range.clone());
                assert_eq!(whole.len(), parts.len());
                for (whole, part) in whole.iter().zip(&parts) {
                    assert!(same_bits(&whole[range.clone()], part), "{range:?}");
                }
            }
        }
    }
}

/// The result depends only on the values of the gradient, not on its type, and the copy is p, rounded.
#[test]
fn types_change_nothing_but_the_copy() {
    for (gradient, copy) in TYPES {
        let state = adamw_state(40_001, gradient);
        let (start, g) = (&state[0], &state[1]);
        for isa in Isa::ALL {
            let device = cpu(2, isa);
            let pairs = [
                (
                    adamw(&device, (DType::F32, None), &state, 0..40_001),
                    adamw(&device, (gradient, copy), &state, 0..40_001),
                ),
                (sgd(&device, (DType::F32, None), start, g), sgd(&device, (gradient, copy), start, g)),
            ];
            for (plain, typed) in pairs {
                assert_eq!(plain, typed[..plain.len()]);
                assert_eq!(copy.map(|copy| rounded(copy, &plain[0])).as_ref(), typed.get(plain.len()));
            }
        }
    }
}

/// Three steps: p, velocity and the rounded copy of p.
fn sgd(device: &Device, (gradient, copy): (DType, Option<DType>), start: &[f32], g: &[f32]) -> Vec<Vec<f32>> {
    let count = start.len();
    let (mut p, mut velocity) = (tensor(device, [count], start), poisoned(device, [count]));
    let g = tensor_as(device, gradient, [count], g);
    let mut copy = copy_of(device, copy, count);
    let scale = tensor(device, [1], &[2.0]);
    for step in 0..3 {
        let numbers = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, first: step == 0 };
        let rounded = copy.as_mut().map(|c| c.view_mut());
        device.run(SgdUpdate {
            step: numbers,
            p: p.view_mut(),
            g: g.view(),
            velocity: velocity.view_mut(),
            gradient_scale: scale.view(),
            rounded,
        });
    }
    let mut out = vec![read(device, &p), read(device, &velocity)];
    out.extend(copy.map(|c| read_f32(device, &c)));
    out
}

#[test]
fn sgd_as_pytorch() {
    for (types, count) in TYPES.into_iter().flat_map(|types| COUNTS.map(|count| (types, count))) {
        let (start, g) = (numbers(1, count), rounded(types.0, &numbers(2, count)));
        let (mut p, mut v) = (wide(&start), vec![0.0; count]);
        for _ in 0..3 {
            for i in 0..count {
                v[i] = f64::from(0.9f32) * v[i] + f64::from(g[i]) * 2.0 + f64::from(0.01f32) * p[i];
                p[i] -= f64::from(0.1f32) * v[i];
            }
        }
        // Three steps of five roundings; the velocity grows to about 6.
        let mut outputs = vec![p.clone(), v];
        let mut stored = vec![DType::F32; 2];
        if let Some(copy) = types.1 {
            outputs.push(p);
            stored.push(copy);
        }
        let one = |value: Vec<f64>| Expected { magnitude: vec![6.0; value.len()], value, roundings: 15.0 };
        let expected: Vec<Expected> = outputs.into_iter().map(one).collect();
        check_as("sgd", |device| sgd(device, types, &start, &g), &expected, &stored);
    }
}

fn squares(device: &Device, dtype: DType, x: &[f32]) -> Vec<f64> {
    let t = tensor_as(device, dtype, [x.len()], x);
    let blocks = x.len().div_ceil(NORM_BLOCK);
    let mut squares = device.alloc(DType::F64, [blocks], Category::Workspace, "squares");
    device.block_squares(t.view(), squares.view_mut());
    let mut out = vec![0f64; blocks];
    device.download(squares.view(), &mut out).unwrap();
    out
}

#[test]
fn block_squares_are_the_same_on_every_instruction_set_and_cut() {
    for (dtype, count) in
        FLOATS.into_iter().flat_map(|d| [1, 3, 17, 4095, 4096, 4097, 100_003].map(|c| (d, c)))
    {
        let x = rounded(dtype, &numbers(1, count));
        let one = squares(&cpu(1, Isa::detect()), dtype, &x);
        for (b, block) in x.chunks(NORM_BLOCK).enumerate() {
            let exact: f64 = block.iter().map(|x| f64::from(*x).powi(2)).sum();
            assert!((one[b] - exact).abs() <= 4096.0 * f64::EPSILON * exact, "{} {exact}", one[b]);
            assert_eq!(squares(&cpu(1, Isa::detect()), dtype, block), [one[b]]);
        }
        // The type of the gradient does not matter if its values are equal.
        assert_eq!(one, squares(&cpu(2, Isa::detect()), DType::F32, &x));
        for (threads, isa) in [(1, Isa::Portable), (2, Isa::Avx2), (3, Isa::detect()), (4, Isa::Portable)] {
            assert_eq!(one, squares(&cpu(threads, isa), dtype, &x));
        }
    }
}

#[test]
fn what_is_not_finite_shows_in_its_block() {
    for (dtype, bad) in
        FLOATS.into_iter().flat_map(|d| [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|b| (d, b)))
    {
        for at in [0, 4095, 4096, 9000] {
            let mut x = numbers(1, 10_000);
            x[at] = bad;
            for (b, square) in squares(&cpu(2, Isa::detect()), dtype, &x).into_iter().enumerate() {
                assert_eq!(square.is_finite(), b != at / NORM_BLOCK, "{bad} at {at}: {square} in block {b}");
            }
        }
    }
}

/// The tree of the norm: left subtrees hold a power of two of numbers.
#[test]
fn sums_along_the_tree_of_the_norm() {
    fn tree(x: &[f64]) -> f64 {
        match x.len() {
            0 => 0.0,
            1 => x[0],
            n => {
                let left = 1 << (n - 1).ilog2();
                tree(&x[..left]) + tree(&x[left..])
            }
        }
    }
    let device = cpu(2, Isa::detect());
    for count in [1, 2, 3, 7, 8, 9, 1000] {
        let x: Vec<f64> = numbers(1, count).iter().map(|x| f64::from(*x).powi(3)).collect();
        let squares: Vec<f64> = x.iter().map(|x| x * x).collect();
        let upload = |values: &[f64]| {
            let mut t = device.alloc(DType::F64, [values.len()], Category::Workspace, "test");
            device.upload(values, t.view_mut());
            t
        };
        let sum = |values: &[f64]| {
            let mut out = upload(&[f64::NAN]);
            device.tree_sum(upload(values).view(), out.view_mut());
            let mut sum = [0f64];
            device.download(out.view(), &mut sum).unwrap();
            sum[0]
        };
        assert_eq!(sum(&x).to_bits(), tree(&x).to_bits(), "{count}");
        let (mut norm, mut factor) = (poisoned(&device, [1]), poisoned(&device, [1]));
        let clip = Clip { max_norm: 0.0, loss_scale: 1.0 };
        device.norm(upload(&squares).view(), clip, norm.view_mut(), factor.view_mut());
        assert_eq!(device.fetch([norm.view()]).unwrap()[0], sum(&squares).sqrt() as f32, "{count}");
    }
}

#[test]
fn norm_and_clipping() {
    let device = cpu(1, Isa::detect());
    let scaled = |values: &[f64], max_norm: f32, loss_scale: f32| {
        let mut t = device.alloc(DType::F64, [values.len()], Category::Workspace, "squares");
        device.upload(values, t.view_mut());
        let (mut norm, mut factor) = (poisoned(&device, [1]), poisoned(&device, [1]));
        device.norm(t.view(), Clip { max_norm, loss_scale }, norm.view_mut(), factor.view_mut());
        (device.fetch([norm.view()]).unwrap()[0], device.fetch([factor.view()]).unwrap()[0])
    };
    let norm = |values: &[f64], max_norm: f32| scaled(values, max_norm, 1.0);
    assert_eq!(norm(&[9.0, 16.0], 0.0), (5.0, 1.0));
    assert_eq!(norm(&[9.0, 16.0], 1.0), (5.0, 1.0 / (5.0 + 1e-6)));
    assert_eq!(norm(&[9.0, 16.0], 6.0), (5.0, 1.0));
    // Gradients multiplied by 1024 give the same norm, and a factor that divides by 1024.
    let square = 1024.0 * 1024.0;
    assert_eq!(scaled(&[9.0 * square, 16.0 * square], 0.0, 1024.0), (5.0, 1.0 / 1024.0));
    assert_eq!(scaled(&[9.0 * square, 16.0 * square], 1.0, 1024.0), (5.0, 1.0 / (5.0 + 1e-6) / 1024.0));
    assert_eq!(scaled(&[9.0 * square, 16.0 * square], 6.0, 1024.0), (5.0, 1.0 / 1024.0));
    let (value, factor) = norm(&[9.0, f64::NAN], 1.0);
    assert!(value.is_nan() && factor.is_nan());
    assert_eq!(scaled(&[9.0, f64::INFINITY], 1.0, 8.0), (f32::INFINITY, 0.0));
    // Trailing zeros (padding of a shard) change nothing, bit for bit.
    let squares: Vec<f64> = numbers(1, 1000).iter().map(|x| f64::from(*x).powi(2)).collect();
    let padded: Vec<f64> = squares.iter().copied().chain([0.0; 77]).collect();
    assert_eq!(norm(&squares, 1.0), norm(&padded, 1.0));
}

#[test]
fn count_of_what_is_not_finite() {
    for (dtype, count) in FLOATS.into_iter().flat_map(|d| [1, 3, 17, 257, 1025, 100_003].map(|c| (d, c))) {
        let mut x = numbers(1, count);
        // The largest of every type is finite.
        x[0] = 65_504.0;
        let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN];
        for step in [0, 1, 2, 7, 1000] {
            let mut x = x.clone();
            let at: Vec<usize> =
                if step == 0 { Vec::new() } else { (step.min(count - 1)..count).step_by(step).collect() };
            at.iter().for_each(|i| x[*i] = bad[i % 4]);
            let kernel = |device: &Device| {
                let x = tensor_as(device, dtype, [count], &x);
                let mut found = poisoned(device, [1]);
                device.count_non_finite(x.view(), found.view_mut());
                read(device, &found)
            };
            check_exact("count_non_finite", kernel, &[at.len() as f32]);
        }
    }
}
