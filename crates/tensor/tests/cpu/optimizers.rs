//! AdamW, SGD and the norm.

use phalanx_tensor::cpu::simd::Isa;
use phalanx_tensor::{AdamW, Category, Clip, DType, Device, NORM_BLOCK, Sgd};

use crate::oracle::{Expected, check, cpu, numbers, poisoned, read, tensor, wide};

const COUNTS: [usize; 8] = [1, 3, 15, 17, 67, 257, 4096, 33_001];

fn adamw(device: &Device, state: &[Vec<f32>; 4], range: std::ops::Range<usize>) -> Vec<Vec<f32>> {
    let [p, g, m, v] = state.each_ref().map(|x| tensor(device, [range.len()], &x[range.clone()]));
    let (mut p, mut m, mut v) = (p, m, v);
    let scale = tensor(device, [1], &[0.5]);
    for step in 3..6 {
        let numbers = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
        device.adamw(numbers, p.view_mut(), g.view(), m.view_mut(), v.view_mut(), scale.view(), None);
    }
    [p, m, v].iter().map(|x| read(device, x)).collect()
}

fn adamw_state(count: usize) -> [Vec<f32>; 4] {
    let mut v = numbers(4, count);
    v.iter_mut().for_each(|v| *v = v.abs());
    [numbers(1, count), numbers(2, count), numbers(3, count), v]
}

#[test]
fn adamw_as_pytorch() {
    for count in COUNTS {
        let state = adamw_state(count);
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
        let expected =
            [p, m, v].map(|value| Expected { magnitude: vec![1.1; value.len()], value, roundings: 24.0 });
        check("adamw", |device| adamw(device, &state, 0..count), &expected);
    }
}

/// What a shard computes for an element is what the whole computes, wherever the cut is.
#[test]
fn adamw_does_not_depend_on_position() {
    let state = adamw_state(5000);
    for isa in Isa::ALL {
        let device = cpu(1, isa);
        let whole = adamw(&device, &state, 0..5000);
        for range in [1..5000, 4096..5000, 7..8, 13..400, 4999..5000] {
            for (whole, part) in whole.iter().zip(adamw(&device, &state, range.clone())) {
                assert!(
                    whole[range.clone()].iter().zip(&part).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{range:?}"
                );
            }
        }
    }
}

#[test]
fn sgd_as_pytorch() {
    for count in COUNTS {
        let (start, g) = (numbers(1, count), numbers(2, count));
        let numbers = |first| Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, first };
        let kernel = |device: &Device| {
            let (mut p, g, mut velocity) =
                (tensor(device, [count], &start), tensor(device, [count], &g), poisoned(device, [count]));
            let scale = tensor(device, [1], &[2.0]);
            for step in 0..3 {
                device.sgd(
                    numbers(step == 0),
                    p.view_mut(),
                    g.view(),
                    velocity.view_mut(),
                    scale.view(),
                    None,
                );
            }
            vec![read(device, &p), read(device, &velocity)]
        };
        let (mut p, mut v) = (wide(&start), vec![0.0; count]);
        for _ in 0..3 {
            for i in 0..count {
                v[i] = f64::from(0.9f32) * v[i] + f64::from(g[i]) * 2.0 + f64::from(0.01f32) * p[i];
                p[i] -= f64::from(0.1f32) * v[i];
            }
        }
        // Three steps of five roundings; the velocity grows to about 6.
        let expected =
            [p, v].map(|value| Expected { magnitude: vec![6.0; value.len()], value, roundings: 15.0 });
        check("sgd", kernel, &expected);
    }
}

fn squares(device: &Device, x: &[f32]) -> Vec<f64> {
    let t = tensor(device, [x.len()], x);
    let blocks = x.len().div_ceil(NORM_BLOCK);
    let mut squares = device.alloc(DType::F64, [blocks], Category::Workspace, "squares");
    device.block_squares(t.view(), squares.view_mut());
    let mut out = vec![0f64; blocks];
    device.download(squares.view(), &mut out);
    out
}

#[test]
fn block_squares_are_the_same_on_every_instruction_set_and_cut() {
    for count in [1, 3, 17, 4095, 4096, 4097, 100_003] {
        let x = numbers(1, count);
        let one = squares(&cpu(1, Isa::detect()), &x);
        for (b, block) in x.chunks(NORM_BLOCK).enumerate() {
            let exact: f64 = block.iter().map(|x| f64::from(*x).powi(2)).sum();
            assert!((one[b] - exact).abs() <= 4096.0 * f64::EPSILON * exact, "{} {exact}", one[b]);
            assert_eq!(squares(&cpu(1, Isa::detect()), block), [one[b]]);
        }
        for (threads, isa) in [(1, Isa::Portable), (2, Isa::Avx2), (3, Isa::detect()), (4, Isa::Portable)] {
            assert_eq!(one, squares(&cpu(threads, isa), &x));
        }
    }
}

#[test]
fn norm_and_clipping() {
    let device = cpu(1, Isa::detect());
    let norm = |values: &[f64], max_norm: f32| {
        let mut t = device.alloc(DType::F64, [values.len()], Category::Workspace, "squares");
        device.upload(values, t.view_mut());
        let (mut norm, mut factor) = (poisoned(&device, [1]), poisoned(&device, [1]));
        device.norm(t.view(), Clip { max_norm, loss_scale: 1.0 }, norm.view_mut(), factor.view_mut());
        (device.fetch(norm.view()), device.fetch(factor.view()))
    };
    assert_eq!(norm(&[9.0, 16.0], 0.0), (5.0, 1.0));
    assert_eq!(norm(&[9.0, 16.0], 1.0), (5.0, 1.0 / (5.0 + 1e-6)));
    assert_eq!(norm(&[9.0, 16.0], 6.0), (5.0, 1.0));
    let (value, factor) = norm(&[9.0, f64::NAN], 1.0);
    assert!(value.is_nan() && factor.is_nan());
    // Trailing zeros (padding of a shard) change nothing, bit for bit.
    let squares: Vec<f64> = numbers(1, 1000).iter().map(|x| f64::from(*x).powi(2)).collect();
    let padded: Vec<f64> = squares.iter().copied().chain([0.0; 77]).collect();
    assert_eq!(norm(&squares, 1.0), norm(&padded, 1.0));
}
