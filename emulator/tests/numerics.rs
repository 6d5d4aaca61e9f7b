//! Results of kernels, compiled by NVRTC, against f64. Each tolerance follows from the types and lengths of sums.

use crate::support::Parameter::{Address, Float, Integer};
use crate::support::{Device, numbers};
use phalanx_cuda_emulator::numbers::{Bfloat16, Binary16, Narrow};

const PTX: &str = include_str!("kernels/numerics.ptx");

fn bf16(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&value| Bfloat16::nearest(value).0).collect()
}

fn wide(bits: u16) -> f64 {
    f64::from(Bfloat16(bits).wide())
}

#[track_caller]
fn close(found: f64, expected: f64, tolerance: f64, what: &str) {
    assert!((found - expected).abs() <= tolerance, "{what}: {found} instead of {expected} ± {tolerance}");
}

#[test]
fn layer_norm() {
    for (rows, n, threads) in [(3, 200, 128), (2, 77, 32), (1, 1000, 1024)] {
        let mut device = Device::new(PTX);
        let x = bf16(&numbers(rows * n, 1));
        let (weight, bias) = (numbers(n, 2), numbers(n, 3));
        let arguments = [device.put(&x), device.put(&weight), device.put(&bias)];
        let (y, means) = (device.empty::<u16>(rows * n), device.empty::<f32>(rows));
        let mut parameters: Vec<_> = arguments.into_iter().chain([y, means]).map(Address).collect();
        parameters.push(Integer(n as i32));
        device.launch("layer_norm", [rows as u32, 1, 1], [threads, 1, 1], &parameters);
        device.assert_clean();
        let (y, means) = (device.get::<u16>(y, rows * n), device.get::<f32>(means, rows));
        for row in 0..rows {
            let values: Vec<f64> = x[row * n..][..n].iter().map(|&bits| wide(bits)).collect();
            let mean = values.iter().sum::<f64>() / n as f64;
            let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / n as f64;
            close(f64::from(means[row]), mean, 1e-6, "mean");
            for (i, value) in values.iter().enumerate() {
                let expected =
                    (value - mean) / (variance + 1e-5).sqrt() * f64::from(weight[i]) + f64::from(bias[i]);
                // The result has 8 bits.
                close(wide(y[row * n + i]), expected, expected.abs() / 256.0 + 1e-5, "layer norm");
            }
        }
    }
}

#[test]
fn column_sums_by_atomics() {
    let (rows, n) = (50, 300);
    let mut device = Device::new(PTX);
    let x = bf16(&numbers(rows * n, 1));
    let (input, out) = (device.put(&x), device.put(&vec![0f32; n]));
    let parameters = [Address(input), Address(out), Integer(rows as i32), Integer(n as i32)];
    device.launch("column_sums", [3, 4, 1], [128, 1, 1], &parameters);
    device.assert_clean();
    for (column, sum) in device.get::<f32>(out, n).into_iter().enumerate() {
        let expected: f64 = (0..rows).map(|row| wide(x[row * n + column])).sum();
        close(f64::from(sum), expected, 1e-5, "column sum");
    }
}

#[test]
fn gelu() {
    let n = 1000;
    let mut device = Device::new(PTX);
    let x: Vec<f32> = (0..n).map(|i| i as f32 / 100.0 - 5.0).collect();
    let (input, out) = (device.put(&x), device.empty::<f32>(n));
    device.launch("gelu", [8, 1, 1], [128, 1, 1], &[Address(input), Address(out), Integer(n as i32)]);
    device.assert_clean();
    for (&x, y) in x.iter().zip(device.get::<f32>(out, n)) {
        let x = f64::from(x);
        let expected = 0.5 * x * (1.0 + (0.7978845608 * (x + 0.044715 * x * x * x)).tanh());
        close(f64::from(y), expected, 2e-6, "gelu");
    }
}

#[test]
fn products_of_bf16() {
    let (m, n, k) = (128, 64, 96);
    let mut device = Device::new(PTX);
    let (a, b) = (bf16(&numbers(m * k, 1)), bf16(&numbers(k * n, 2)));
    let (left, right, out) = (device.put(&a), device.put(&b), device.empty::<f32>(m * n));
    let sizes = [m, n, k].map(|size| Integer(size as i32));
    let parameters = [Address(left), Address(right), Address(out), sizes[0], sizes[1], sizes[2]];
    let statistics = device.launch("product_bf16", [1, 2, 1], [128, 1, 1], &parameters);
    device.assert_clean();
    assert_eq!(statistics.multiplies as usize, m / 16 * (n / 8) * (k / 16));
    let c = device.get::<f32>(out, m * n);
    for (place, &found) in c.iter().enumerate() {
        let (row, column) = (place / n, place % n);
        let expected: f64 = (0..k).map(|i| wide(a[row * k + i]) * wide(b[i * n + column])).sum();
        // Each of k/16 sums is rounded to f32.
        close(f64::from(found), expected, 1e-5, "product");
    }
}

#[test]
fn products_of_tf32_and_f16() {
    let mut device = Device::new(PTX);
    let (a, b) = (numbers(128, 1), numbers(64, 2));
    let (left, right, out) = (device.put(&a), device.put(&b), device.empty::<f32>(128));
    device.launch("product_tf32", [1, 1, 1], [32, 1, 1], &[Address(left), Address(right), Address(out)]);
    let product = |row: usize, column: usize| -> f64 {
        (0..8).map(|i| f64::from(a[row * 8 + i]) * f64::from(b[i * 8 + column])).sum()
    };
    for (place, &found) in device.get::<f32>(out, 128).iter().enumerate() {
        // 11 bits of each factor.
        close(f64::from(found), product(place / 8, place % 8), 8.0 / 1024.0, "tf32");
    }
    let half = |value: f32| u32::from(Binary16::nearest(value).0);
    let pair = |low: f32, high: f32| half(low) | half(high) << 16;
    let rows: Vec<u32> = a.chunks_exact(2).map(|pair_of| pair(pair_of[0], pair_of[1])).collect();
    let columns: Vec<u32> = (0..32)
        .map(|place| {
            let (column, row) = (place / 4, place % 4 * 2);
            pair(b[row * 8 + column], b[(row + 1) * 8 + column])
        })
        .collect();
    let (left, right, out) = (device.put(&rows), device.put(&columns), device.empty::<u32>(64));
    device.launch("product_f16", [1, 1, 1], [32, 1, 1], &[Address(left), Address(right), Address(out)]);
    for (place, found) in device.get::<u32>(out, 64).into_iter().enumerate() {
        for (offset, bits) in [found as u16, (found >> 16) as u16].into_iter().enumerate() {
            let place = place * 2 + offset;
            close(f64::from(Binary16(bits).wide()), product(place / 8, place % 8), 8.0 / 1024.0, "f16");
        }
    }
    device.assert_clean();
}

#[test]
fn causal_attention() {
    let (heads, t, d) = (2, 128, 64);
    let mut device = Device::new(PTX);
    let [q, k, v] = [1, 2, 3].map(|seed| bf16(&numbers(heads * t * d, seed)));
    let inputs = [&q, &k, &v].map(|values| Address(device.put(values)));
    let (out, logs) = (device.empty::<u16>(heads * t * d), device.empty::<f32>(heads * t));
    let parameters =
        [inputs[0], inputs[1], inputs[2], Address(out), Address(logs), Integer(t as i32), Float(0.125)];
    device.launch("attention", [(t / 64) as u32, heads as u32, 1], [128, 1, 1], &parameters);
    device.assert_clean();
    let (out, logs) = (device.get::<u16>(out, heads * t * d), device.get::<f32>(logs, heads * t));
    for row in 0..heads * t {
        let (first, query) = (row / t * t, row % t);
        let at = |values: &[u16], row: usize, i: usize| wide(values[row * d + i]);
        let score = |key: usize| (0..d).map(|i| at(&q, row, i) * at(&k, first + key, i)).sum::<f64>() * 0.125;
        let scores: Vec<f64> = (0..=query).map(score).collect();
        let largest = scores.iter().copied().fold(f64::MIN, f64::max);
        let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
        close(f64::from(logs[row]), largest + total.ln(), 1e-4, "log of the sum");
        for i in 0..d {
            let value =
                |(key, score): (usize, &f64)| (score - largest).exp() / total * at(&v, first + key, i);
            let expected: f64 = scores.iter().enumerate().map(value).sum();
            // Probabilities and result have 8 bits.
            close(wide(out[row * d + i]), expected, 6e-3, "attention");
        }
    }
}

#[test]
fn exchanges_between_lanes() {
    let mut device = Device::new(PTX);
    let values: Vec<i32> = (0..32).map(|lane| (lane * 7 % 11) - 3).collect();
    let (input, out) = (device.put(&values), device.empty::<u32>(256));
    device.launch("exchanges", [1, 1, 1], [32, 1, 1], &[Address(input), Address(out)]);
    device.assert_clean();
    let found = device.get::<u32>(out, 256);
    let mask =
        |test: &dyn Fn(i32) -> bool| (0..32).filter(|&l| test(values[l])).fold(0u32, |m, l| m | 1 << l);
    let branch = |lane: usize| match lane % 3 {
        0 => values[0],
        _ => values[..lane].iter().sum(),
    };
    for (lane, results) in found.chunks_exact(8).enumerate() {
        let segment_end = lane / 8 * 8 + 7;
        let from = if lane + 3 <= segment_end { lane + 3 } else { lane };
        let expected = [
            values.iter().sum::<i32>() as u32,
            *values.iter().min().unwrap() as u32,
            values.iter().fold(0, |all, value| all ^ value) as u32,
            mask(&|value| value > 0),
            mask(&|value| value == values[lane]),
            values[from] as u32,
            1 | u32::from(values.contains(&7)) << 1,
            branch(lane.saturating_sub(1)) as u32,
        ];
        assert_eq!(results, expected, "lane {lane}");
    }
}

#[test]
fn functions_of_the_library() {
    let mut device = Device::new(PTX);
    let mut x = numbers(70, 1);
    x.iter_mut().for_each(|value| *value *= 3.0);
    x[0] = 1e6; // The sine takes its slow path.
    let coefficients = [0.5, -1.0, 0.25, 0.125];
    let (input, table, out) = (device.put(&x), device.put(&coefficients), device.empty::<f64>(70 * 8));
    let parameters = [Address(input), Address(table), Address(out), Integer(70)];
    device.launch("functions", [3, 1, 1], [32, 1, 1], &parameters);
    device.assert_clean();
    for (&v, found) in x.iter().zip(device.get::<f64>(out, 70 * 8).chunks_exact(8)) {
        let wide = f64::from(v);
        let order: [f64; 4] = std::array::from_fn(|place| {
            let i = (0..4).find(|i| (i * 3 + v as i32) & 3 == place as i32).unwrap();
            coefficients[i as usize]
        });
        let polynomial = order.iter().rev().fold(0.0, |sum, coefficient| sum * wide + coefficient);
        let relative = |expected: f64| expected.abs() * 2e-6 + 1e-7;
        let expected = [
            (polynomial, polynomial.abs() * 1e-12),
            (wide.sin(), 2e-7),
            (wide.exp(), relative(wide.exp())),
            ((wide.abs() + f64::from(0.1f32)).ln(), 5e-7),
            (wide.exp(), wide.exp() * 1e-14),
            (wide.abs().sqrt() / 3.0, 1e-14 * wide.abs().sqrt()),
            (wide.cbrt() + wide.abs().powf(1.5), relative(wide.abs().powf(1.5)) + 1e-6),
            (f64::from((v * 1e6) as i64 as f32) + wide / 3.0, 1.0 + wide.abs()),
        ];
        for (index, (&found, (expected, tolerance))) in found.iter().zip(expected).enumerate() {
            let both_infinite = found == expected || expected > 3e38 && found.is_infinite();
            if !both_infinite {
                close(found, expected, tolerance, &format!("function {index} of {v}"));
            }
        }
    }
}

#[test]
fn seeds_change_the_order_but_not_the_result() {
    let results = [0, 1, 2, 3].map(|seed| {
        let mut device = Device::new(PTX);
        device.seed = seed;
        let (left, right) =
            (device.put(&bf16(&numbers(64 * 64, 1))), device.put(&bf16(&numbers(64 * 64, 2))));
        let out = device.empty::<f32>(64 * 64);
        let parameters = [Address(left), Address(right), Address(out), Integer(64), Integer(64), Integer(64)];
        device.launch("product_bf16", [1, 1, 1], [128, 1, 1], &parameters);
        device.assert_clean();
        device.get::<u32>(out, 64 * 64)
    });
    assert!(results.iter().all(|result| *result == results[0]));
}
