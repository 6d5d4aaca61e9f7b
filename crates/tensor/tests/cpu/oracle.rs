//! What the tests share: numbers, tensors, and the check of one kernel call.

use phalanx_tensor::cpu::Options;
use phalanx_tensor::cpu::simd::Isa;
use phalanx_tensor::{Arena, Category, Cpu, DType, Device, Shape, Tensor};

/// Spacing of f32 at 1, halved: the relative error of one rounding.
pub const EPS: f64 = f32::EPSILON as f64 / 2.0;

/// What a kernel should give, element by element.
pub struct Expected {
    pub value: Vec<f64>,
    /// Sum of the magnitudes of the terms that make up each element.
    pub magnitude: Vec<f64>,
    /// Roundings on the longest way from inputs to output: |error| <= roundings * EPS * magnitude.
    pub roundings: f64,
}

impl Expected {
    /// Errors measured against the largest value, for chains too long for a bound by element.
    pub fn by_largest(value: Vec<f64>, roundings: f64) -> Expected {
        let largest = value.iter().fold(0f64, |a, x| a.max(x.abs()));
        Expected { magnitude: vec![largest; value.len()], value, roundings }
    }

    /// Errors measured against each value.
    pub fn relative(value: Vec<f64>, roundings: f64) -> Expected {
        Expected { magnitude: value.iter().map(|x| x.abs()).collect(), value, roundings }
    }
}

/// Reproducible numbers in [-1, 1), of a scrambled counter (splitmix64).
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    (0..count as u64).map(|i| (mix(seed << 32 | i) >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}

/// Reproducible indices below `limit`.
pub fn indices(seed: u64, count: usize, limit: usize) -> Vec<u32> {
    (0..count as u64).map(|i| (mix(seed << 32 | i) % limit as u64) as u32).collect()
}

fn mix(x: u64) -> u64 {
    let x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

pub fn tensor(device: &Device, shape: impl Into<Shape>, values: &[f32]) -> Tensor {
    let mut t = device.alloc(DType::F32, shape, Category::Activations, "test");
    device.upload(values, t.view_mut());
    t
}

pub fn tokens(device: &Device, shape: impl Into<Shape>, values: &[u32]) -> Tensor {
    let mut t = device.alloc(DType::U32, shape, Category::Activations, "test");
    device.upload(values, t.view_mut());
    t
}

/// Memory that no kernel may read before it writes.
pub fn poisoned(device: &Device, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    tensor(device, shape, &vec![f32::NAN; shape.elements()])
}

/// An output that is accumulated into, or poisoned memory; and what it adds to the reference.
pub fn output(device: &Device, shape: impl Into<Shape>, before: &[f32], accumulate: bool) -> Tensor {
    if accumulate { tensor(device, shape, before) } else { poisoned(device, shape) }
}

pub fn read(device: &Device, t: &Tensor) -> Vec<f32> {
    let mut out = vec![0f32; t.shape().elements()];
    device.download(t.view(), &mut out);
    out
}

pub fn cpu(threads: usize, isa: Isa) -> Device {
    Device::new(Cpu::with_options(Options { isa, ..Options::new(threads) }), Arena::heap())
}

/// Runs `kernel` on every instruction set, whose results must be as expected, and on 1 to 4 threads,
/// whose bits must be equal.
#[track_caller]
pub fn check(what: &str, kernel: impl Fn(&Device) -> Vec<Vec<f32>>, expected: &[Expected]) {
    for isa in Isa::ALL {
        if isa > Isa::detect() {
            continue;
        }
        let outputs = kernel(&cpu(1, isa));
        assert_eq!(outputs.len(), expected.len());
        for (index, (output, expected)) in outputs.iter().zip(expected).enumerate() {
            let what = format!("{what}, output {index}, {}", isa.name());
            compare(&what, output, expected);
        }
        for threads in 2..=4 {
            for (index, (a, b)) in outputs.iter().zip(kernel(&cpu(threads, isa))).enumerate() {
                let same = a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{what}, output {index}: other bits on {threads} threads ({})", isa.name());
            }
        }
    }
}

#[track_caller]
pub fn compare(what: &str, output: &[f32], expected: &Expected) {
    assert_eq!(output.len(), expected.value.len(), "{what}");
    for (i, x) in output.iter().enumerate() {
        let (value, magnitude) = (expected.value[i], expected.magnitude[i]);
        let allowed = expected.roundings * EPS * magnitude + f64::from(f32::MIN_POSITIVE);
        let error = (f64::from(*x) - value).abs();
        assert!(
            error <= allowed,
            "{what}: element {i} is {x}, expected {value}: off by {error:e}, allowed {allowed:e}"
        );
    }
}
