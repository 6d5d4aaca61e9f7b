//! Shared by the tests: numbers, tensors, and the check of one kernel call.

use std::time::Duration;

use half::{bf16, f16};
use phalanx_cpu::{Cpu, Options, ProductMethod};
use phalanx_simd::Isa;
use phalanx_simd::tiles::TileUnit;
use phalanx_simulated::Simulated;
use phalanx_system::random::GOLDEN;
use phalanx_tensor::{Arena, Category, DType, Device, Shape, Tensor};
use phalanx_testing::sweeps;

/// Spacing of f32 at 1, halved: the relative error of one rounding.
pub const EPS: f64 = f32::EPSILON as f64 / 2.0;

/// The types that kernels compute with.
pub const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// The types of parameter gradients beside a compute type.
pub fn gradient_types(compute: DType) -> Vec<DType> {
    if compute == DType::F32 { vec![DType::F32] } else { vec![DType::F32, compute] }
}

/// Largest relative error of one rounding to a type: half the spacing at 1 (24, 8 and 11 bits).
pub fn half_ulp(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => EPS,
        DType::BF16 => 0.5f64.powi(8),
        DType::F16 => 0.5f64.powi(11),
        other => panic!("{} is not rounded to", other.name()),
    }
}

/// Largest error of one rounding to a type near 0, where numbers are subnormal.
fn half_smallest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 0.5f64.powi(25),
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

/// The numbers, rounded to `dtype`.
pub fn rounded(dtype: DType, x: &[f32]) -> Vec<f32> {
    x.iter()
        .map(|x| match dtype {
            DType::BF16 => bf16::from_f32(*x).to_f32(),
            DType::F16 => f16::from_f32(*x).to_f32(),
            _ => *x,
        })
        .collect()
}

/// The expected output of a kernel.
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

    /// `a · b` of `[m, k]` and `[k, n]`: one rounding per product and per addition, and three for bias, residual and storing.
    pub fn product([m, k, n]: [usize; 3], a: &[f32], b: &[f32]) -> Expected {
        let (mut value, mut magnitude) = (vec![0.0; m * n], vec![0.0; m * n]);
        for (i, l) in (0..m * k).map(|at| (at / k, at % k)) {
            let (x, row) = (f64::from(a[i * k + l]), &b[l * n..][..n]);
            let sums = value[i * n..][..n].iter_mut().zip(&mut magnitude[i * n..][..n]);
            for ((sum, size), y) in sums.zip(row) {
                let term = x * f64::from(*y);
                *sum += term;
                *size += term.abs();
            }
        }
        Expected { value, magnitude, roundings: 2.0 * k as f64 + 3.0 }
    }

    /// With one more term for each element.
    #[must_use]
    pub fn plus(&self, term: impl Fn(usize) -> f64) -> Expected {
        let terms = || (0..self.value.len()).map(&term);
        Expected {
            value: self.value.iter().zip(terms()).map(|(x, term)| x + term).collect(),
            magnitude: self.magnitude.iter().zip(terms()).map(|(x, term)| x + term.abs()).collect(),
            roundings: self.roundings,
        }
    }
}

/// The transposed matrix of `[rows, columns]`.
pub fn transposed([rows, columns]: [usize; 2], x: &[f32]) -> Vec<f32> {
    (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect()
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
    phalanx_system::random::mix(x.wrapping_mul(GOLDEN).wrapping_add(GOLDEN))
}

pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

pub fn tensor(device: &Device, shape: impl Into<Shape>, values: &[f32]) -> Tensor {
    let mut t = device.alloc(DType::F32, shape, Category::Activations, "test");
    device.upload(values, t.view_mut());
    t
}

/// Like [`tensor`], rounded to `dtype`.
pub fn tensor_as(device: &Device, dtype: DType, shape: impl Into<Shape>, values: &[f32]) -> Tensor {
    let mut t = device.alloc(dtype, shape, Category::Activations, "test");
    match dtype {
        DType::BF16 => {
            let values: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
            device.upload(&values, t.view_mut());
        }
        DType::F16 => {
            let values: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
            device.upload(&values, t.view_mut());
        }
        _ => device.upload(values, t.view_mut()),
    }
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

/// Like [`poisoned`], of type `dtype`.
pub fn poisoned_as(device: &Device, dtype: DType, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    tensor_as(device, dtype, shape, &vec![f32::NAN; shape.elements()])
}

/// Like [`output`], of type `dtype`.
pub fn output_as(
    device: &Device,
    dtype: DType,
    shape: impl Into<Shape>,
    before: &[f32],
    accumulate: bool,
) -> Tensor {
    if accumulate { tensor_as(device, dtype, shape, before) } else { poisoned_as(device, dtype, shape) }
}

/// An output with initial values to accumulate onto, or poisoned memory; and the values that the reference must add.
pub fn output(device: &Device, shape: impl Into<Shape>, before: &[f32], accumulate: bool) -> Tensor {
    if accumulate { tensor(device, shape, before) } else { poisoned(device, shape) }
}

pub fn read(device: &Device, t: &Tensor) -> Vec<f32> {
    let mut out = vec![0f32; t.shape().elements()];
    device.download(t.view(), &mut out).unwrap();
    out
}

/// Like [`read`], widened from any compute type.
pub fn read_f32(device: &Device, t: &Tensor) -> Vec<f32> {
    let elements = t.shape().elements();
    match t.dtype() {
        DType::BF16 => {
            let mut out = vec![bf16::ZERO; elements];
            device.download(t.view(), &mut out).unwrap();
            out.into_iter().map(bf16::to_f32).collect()
        }
        DType::F16 => {
            let mut out = vec![f16::ZERO; elements];
            device.download(t.view(), &mut out).unwrap();
            out.into_iter().map(f16::to_f32).collect()
        }
        _ => read(device, t),
    }
}

/// One path through the kernels.
#[derive(Clone, Copy)]
pub struct KernelPath {
    pub isa: Isa,
    /// Tile registers for all matrix products: bf16 as they are, f32 and f16 in parts.
    pub tiles: Option<TileUnit>,
}

impl KernelPath {
    /// The paths of this machine: every instruction set without tile registers; the model of tile registers beside the
    /// best one, and the processor's own if it has some.
    pub fn all() -> impl Iterator<Item = KernelPath> {
        let sets = Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect());
        let units = TileUnit::ALL.into_iter().filter(|unit| unit.is_available());
        sets.map(|isa| KernelPath { isa, tiles: None })
            .chain(units.map(|unit| KernelPath { isa: Isa::detect(), tiles: Some(unit) }))
    }

    /// More than one thread, which must give the same bits; `what` chooses one number of them, unless sweeps are whole.
    fn more_threads(self, what: &str) -> impl Iterator<Item = usize> + use<> {
        // The model is slow.
        let numbers: &[usize] = if self.tiles == Some(TileUnit::Model) { &[3] } else { &[2, 3, 4] };
        sweeps::share(
            numbers,
            what.bytes().map(usize::from).sum::<usize>() + self.isa as usize,
            numbers.len(),
        )
        .copied()
    }

    pub fn name(self) -> String {
        self.tiles.map_or(self.isa.name(), TileUnit::name).to_owned()
    }

    pub fn options(self, threads: usize) -> Options {
        let KernelPath { isa, tiles } = self;
        Options { isa, tiles, products: ProductMethod::Split, ..Options::new(threads) }
    }

    pub fn cpu(self, threads: usize) -> Device {
        Device::new(Cpu::with_options(self.options(threads)).unwrap(), Arena::heap())
    }

    /// A simulated accelerator that computes with one thread of the processor.
    pub fn simulated(self) -> Device {
        let kernels = Cpu::with_options(self.options(1)).unwrap();
        let max_delay = Duration::from_micros(20);
        let options = phalanx_simulated::Options { max_delay, ..phalanx_simulated::Options::new(1 << 30) };
        Simulated::unplanned_device(kernels, options).unwrap()
    }
}

/// A processor that computes with an instruction set, without tile registers.
pub fn cpu(threads: usize, isa: Isa) -> Device {
    KernelPath { isa, tiles: None }.cpu(threads)
}

/// Runs `kernel` in every [`KernelPath`] on one thread and checks the results, and on others of 1 to 4 threads, whose bits must be
/// equal.
#[track_caller]
pub fn check(what: &str, kernel: impl Fn(&Device) -> Vec<Vec<f32>>, expected: &[Expected]) {
    check_as(what, kernel, expected, &vec![DType::F32; expected.len()]);
}

/// Like [`check`], for outputs stored as `stored`; see [`compare_as`].
#[track_caller]
pub fn check_as(
    what: &str,
    kernel: impl Fn(&Device) -> Vec<Vec<f32>>,
    expected: &[Expected],
    stored: &[DType],
) {
    for path in KernelPath::all() {
        let outputs = kernel(&path.cpu(1));
        assert_eq!([expected.len(), stored.len()], [outputs.len(); 2]);
        for (index, (output, expected)) in outputs.iter().zip(expected).enumerate() {
            let what = format!("{what}, output {index} in {}, {}", stored[index].name(), path.name());
            compare_as(&what, output, expected, stored[index]);
        }
        for threads in path.more_threads(what) {
            let others = kernel(&path.cpu(threads));
            assert_eq!(outputs.len(), others.len(), "{what} on {threads} threads");
            for (index, (a, b)) in outputs.iter().zip(&others).enumerate() {
                assert!(
                    same_bits(a, b),
                    "{what}, output {index}: other bits on {threads} threads ({})",
                    path.name()
                );
            }
        }
    }
}

/// Compares length and bits: `zip` alone would stop at the end of the shorter one.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// The bound of `expected` is that of the computation in f32. A result that is then stored in 16 bits is off
/// by one more rounding: half an ulp of what was computed, which is the value up to that bound.
#[track_caller]
pub fn compare_as(what: &str, output: &[f32], expected: &Expected, stored: DType) {
    assert_eq!(output.len(), expected.value.len(), "{what}");
    for (i, x) in output.iter().enumerate() {
        let (value, magnitude) = (expected.value[i], expected.magnitude[i]);
        let computed = expected.roundings * EPS * magnitude;
        let last = if stored == DType::F32 { 0.0 } else { half_ulp(stored) * (value.abs() + computed) };
        let allowed = computed + last + half_smallest(stored);
        let error = (f64::from(*x) - value).abs();
        assert!(
            error <= allowed,
            "{what}: element {i} is {x}, expected {value}: off by {error:e}, allowed {allowed:e}"
        );
    }
}

/// Runs `kernel` with every instruction set and on 1 to 4 threads; the output must equal `expected` bit for bit (all
/// NaNs are equal).
#[track_caller]
pub fn check_exact(what: &str, kernel: impl Fn(&Device) -> Vec<f32>, expected: &[f32]) {
    for isa in Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect()) {
        for threads in 1..=4 {
            let output = kernel(&cpu(threads, isa));
            assert_eq!(output.len(), expected.len(), "{what}");
            for (i, (x, e)) in output.iter().zip(expected).enumerate() {
                let same = x.to_bits() == e.to_bits() || x.is_nan() && e.is_nan();
                assert!(same, "{what}: element {i} is {x:e}, expected {e:e} ({})", isa.name());
            }
        }
    }
}
