//! Principal parts of weights, with which adapters start in place of nothing (Meng et al., "PiSSA", arXiv 2404.02948): of `w = u · s · vᵀ` the
//! largest singular values, `a = sqrt(s / scale) · vᵀ` and `b = u · sqrt(s / scale)`. The base is then what is left, `w - scale * b · a`.
//!
//! Singular vectors come from an iteration of subspaces (Halko et al., arXiv 0909.4061) with more vectors than are wanted, and a
//! Rayleigh-Ritz step at its end. Whatever it finds, b · a and what is left add up to w: an iteration that ends early costs nothing else.
//! The same weight gives the same numbers on every rank and in every run of the same instruction set; they are stored nowhere.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use phalanx_cpu::Cpu;
use phalanx_layers::lora::adapted_by;
use phalanx_layers::{AdapterInit, Checkpointing, Init, Lora, ParameterSpec};
use phalanx_models::Model;
use phalanx_parallel::TensorParallel;
use phalanx_tensor::{Arena, Category, DType, Device, Epilogue, Layout, Tensor, Weight};

use crate::engine::error::RunError;

/// Vectors of a subspace at least; twice the rank, where that is more, and never more than the weight has.
const VECTORS: usize = 64;

/// Most products with the weight and its transpose.
const ITERATIONS: usize = 24;

/// The iteration ends where the sum of squared singular values changes by less than this share.
const CHANGE: f64 = 1e-7;

/// Reads elements of a whole weight into memory of their number.
pub(crate) type ReadElements<'a, E> = dyn FnMut(Range<u64>, &mut [f32]) -> Result<(), E> + 'a;

/// The principal parts of the weights of all adapted layers; each is computed when it is first asked for.
pub(crate) struct Principal {
    rank: usize,
    scale: f32,
    threads: usize,
    /// The results that have an adapter.
    results: BTreeSet<String>,
    found: RefCell<BTreeMap<String, Rc<Factors>>>,
}

/// The principal part of a weight, `scale * b · a`.
pub(crate) struct Factors {
    /// `[rank, in]`
    pub(crate) a: Vec<f32>,
    /// `[out, rank]`
    pub(crate) b: Vec<f32>,
}

impl Principal {
    /// Those of a model with these adapters; None where they start as nothing.
    pub(crate) fn of(
        model: &dyn Model,
        adapters: &std::sync::Arc<Lora>,
        threads: usize,
    ) -> Option<Principal> {
        if adapters.init != AdapterInit::Principal {
            return None;
        }
        let tensor = TensorParallel::solo().adapting(std::sync::Arc::clone(adapters));
        let network = model.network(&tensor, Checkpointing::None).expect("one rank divides nothing");
        let results =
            network.members().filter_map(|spec| adapted_by(&spec.name)).map(str::to_string).collect();
        let Lora { width: rank, scale, .. } = **adapters;
        Some(Principal { rank, scale, threads, results, found: RefCell::default() })
    }

    /// The factors of a result's weight, of which `read` reads elements; None for a result without an adapter.
    ///
    /// # Errors
    /// Those of `read`.
    pub(crate) fn factors(
        &self,
        (result, layout): (&str, Layout),
        weight: &ParameterSpec,
        read: &mut ReadElements<RunError>,
    ) -> Result<Option<Rc<Factors>>, RunError> {
        if !self.results.contains(result) {
            return Ok(None);
        }
        if let Some(found) = self.found.borrow().get(result) {
            return Ok(Some(Rc::clone(found)));
        }
        let mut numbers = vec![0.0; weight.elements()];
        read(0..numbers.len() as u64, &mut numbers)?;
        let matrix = Matrix::new(&numbers, [weight.shape[0], weight.shape[1]], (layout, self.threads));
        drop(numbers);
        let factors = Rc::new(matrix.factors(self.rank, self.scale));
        self.found.borrow_mut().insert(result.to_string(), Rc::clone(&factors));
        Ok(Some(factors))
    }

    /// Subtracts a principal part from elements of its weight, which has `columns`, from element `start` on.
    pub(crate) fn subtract(
        &self,
        factors: &Factors,
        (layout, columns): (Layout, usize),
        start: u64,
        out: &mut [f32],
    ) {
        let inputs = factors.a.len() / self.rank;
        for (at, number) in (start as usize..).zip(out) {
            let (o, i) = match layout {
                Layout::OutIn => (at / columns, at % columns),
                Layout::InOut => (at % columns, at / columns),
            };
            let b = &factors.b[o * self.rank..][..self.rank];
            let part: f32 = b.iter().enumerate().map(|(k, b)| b * factors.a[k * inputs + i]).sum();
            *number -= self.scale * part;
        }
    }
}

/// A weight in memory of the host, and what multiplies it.
struct Matrix {
    device: Device,
    numbers: Tensor,
    layout: Layout,
    inputs: usize,
    outputs: usize,
}

/// Vectors one behind another, of this length.
struct Vectors {
    numbers: Vec<f32>,
    length: usize,
}

impl Matrix {
    fn new(numbers: &[f32], extents: [usize; 2], (layout, threads): (Layout, usize)) -> Matrix {
        let device = Device::new(Cpu::new(threads), Arena::heap());
        let mut own = device.alloc(DType::F32, extents, Category::Workspace, "principal.weight");
        device.upload(numbers, own.view_mut());
        let [inputs, outputs] = layout.in_out(extents);
        Matrix { device, numbers: own, layout, inputs, outputs }
    }

    fn weight(&self) -> Weight<'_> {
        Weight { matrix: self.numbers.view(), layout: self.layout }
    }

    /// `w · v` of vectors of inputs, or where `back` `wᵀ · v` of vectors of outputs.
    fn times(&self, vectors: &Vectors, back: bool) -> Vectors {
        let count = vectors.numbers.len() / vectors.length;
        let alloc = |length| {
            self.device.alloc(DType::F32, [1, count, length], Category::Workspace, "principal.vectors")
        };
        let mut from = alloc(vectors.length);
        self.device.upload(&vectors.numbers, from.view_mut());
        let length = if back { self.inputs } else { self.outputs };
        let mut to = alloc(length);
        match back {
            false => {
                let epilogue = Epilogue { bias: None, residual: None };
                self.device.linear(from.view(), self.weight(), epilogue, to.view_mut());
            }
            true => self.device.linear_input_gradient(from.view(), self.weight(), to.view_mut(), false),
        }
        let mut numbers = vec![0.0; count * length];
        self.device.download(to.view(), &mut numbers).expect("memory of the host is read");
        Vectors { numbers, length }
    }

    /// The factors of the largest `rank` singular values.
    fn factors(&self, rank: usize, scale: f32) -> Factors {
        let count = VECTORS.max(2 * rank).min(self.inputs.min(self.outputs)).max(1);
        let mut right = Vectors { numbers: vec![0.0; count * self.inputs], length: self.inputs };
        // Any start that is not orthogonal to what is looked for.
        Init::Normal(1.0).fill(0, "principal", 0, &mut right.numbers);
        right.orthonormalise();
        let mut before = 0.0;
        for _ in 0..ITERATIONS {
            let mut left = self.times(&right, false);
            left.orthonormalise();
            right = self.times(&left, true);
            let sum = right.orthonormalise();
            if (sum - before).abs() <= CHANGE * sum {
                break;
            }
            before = sum;
        }
        let left = self.times(&right, false);
        // wᵀw within the subspace: its eigenvectors are singular vectors, and its eigenvalues squared singular values.
        let (values, vectors) = eigen(left.products(), count);
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by(|i, j| values[*j].total_cmp(&values[*i]));
        let (mut a, mut b) = (vec![0.0; rank * self.inputs], vec![0.0; self.outputs * rank]);
        for (k, index) in order.into_iter().take(rank).enumerate().filter(|(_, index)| values[*index] > 0.0) {
            let root = values[index].sqrt();
            let turned = |of: &Vectors, factor: f64| -> Vec<f32> {
                let mut sum = vec![0f64; of.length];
                for (row, numbers) in of.numbers.chunks_exact(of.length).enumerate() {
                    let weight = factor * vectors[row * count + index];
                    sum.iter_mut().zip(numbers).for_each(|(sum, x)| *sum += weight * f64::from(*x));
                }
                sum.into_iter().map(|x| x as f32).collect()
            };
            let share = (root / f64::from(scale)).sqrt();
            a[k * self.inputs..][..self.inputs].copy_from_slice(&turned(&right, share));
            let column = turned(&left, share / root);
            b.iter_mut().skip(k).step_by(rank).zip(column).for_each(|(to, number)| *to = number);
        }
        Factors { a, b }
    }
}

impl Vectors {
    /// Makes the vectors orthogonal, twice by Gram and Schmidt, and of length 1, or 0 where one depends on those before it; the sum of
    /// the squared lengths that they had beside those before them.
    fn orthonormalise(&mut self) -> f64 {
        let (length, mut sum) = (self.length, 0.0);
        for index in 0..self.numbers.len() / length {
            let (before, rest) = self.numbers.split_at_mut(index * length);
            let own = &mut rest[..length];
            let whole = dot(own, own);
            for _ in 0..2 {
                for other in before.chunks_exact(length) {
                    let part = dot(own, other) as f32;
                    own.iter_mut().zip(other).for_each(|(x, y)| *x -= part * y);
                }
            }
            let square = dot(own, own);
            sum += square;
            let factor = if square > 1e-12 * whole { (1.0 / square.sqrt()) as f32 } else { 0.0 };
            own.iter_mut().for_each(|x| *x *= factor);
        }
        sum
    }

    /// The products of all pairs, row by row.
    fn products(&self) -> Vec<f64> {
        let rows = || self.numbers.chunks_exact(self.length);
        rows().flat_map(|x| rows().map(move |y| dot(x, y))).collect()
    }
}

fn dot(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}

/// Eigenvalues of a symmetric matrix, and their vectors as columns, by Jacobi's rotations.
fn eigen(mut matrix: Vec<f64>, n: usize) -> (Vec<f64>, Vec<f64>) {
    let mut vectors = vec![0.0; n * n];
    (0..n).for_each(|i| vectors[i * n + i] = 1.0);
    let total: f64 = matrix.iter().map(|x| x * x).sum();
    for _ in 0..30 {
        let beside = |(at, x): (usize, &f64)| if at / n == at % n { 0.0 } else { x * x };
        if matrix.iter().enumerate().map(beside).sum::<f64>() <= 1e-28 * total {
            break;
        }
        for (p, q) in (0..n).flat_map(|p| (p + 1..n).map(move |q| (p, q))) {
            let (between, apart) = (matrix[p * n + q], matrix[q * n + q] - matrix[p * n + p]);
            if between == 0.0 {
                continue;
            }
            let half = apart / (2.0 * between);
            let tangent = half.signum() / (half.abs() + half.mul_add(half, 1.0).sqrt());
            let cosine = 1.0 / tangent.mul_add(tangent, 1.0).sqrt();
            let sine = tangent * cosine;
            let turn = |numbers: &mut [f64], i: usize, j: usize| {
                let (x, y) = (numbers[i], numbers[j]);
                (numbers[i], numbers[j]) = (cosine * x - sine * y, sine * x + cosine * y);
            };
            (0..n).for_each(|k| turn(&mut matrix, k * n + p, k * n + q));
            (0..n).for_each(|k| turn(&mut matrix, p * n + k, q * n + k));
            (0..n).for_each(|k| turn(&mut vectors, k * n + p, k * n + q));
        }
    }
    ((0..n).map(|i| matrix[i * n + i]).collect(), vectors)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A product of orthogonal vectors with known singular values is found, in both layouts, and the rest is left.
    #[test]
    fn the_largest_singular_values_are_found() {
        let [inputs, outputs, rank] = [90, 70, 3];
        let basis = |name: &str, length: usize| {
            let mut vectors = Vectors { numbers: vec![0.0; 66 * length], length };
            Init::Normal(1.0).fill(7, name, 0, &mut vectors.numbers);
            vectors.orthonormalise();
            vectors.numbers
        };
        let (u, v) = (basis("u", outputs), basis("v", inputs));
        let value = |k: usize| 8.0 * 0.7f32.powi(k as i32);
        let element = |o: usize, i: usize, many: usize| -> f32 {
            (0..many).map(|k| value(k) * u[k * outputs + o] * v[k * inputs + i]).sum()
        };
        for layout in [Layout::OutIn, Layout::InOut] {
            let extents = if layout == Layout::OutIn { [outputs, inputs] } else { [inputs, outputs] };
            let of = |at: usize, many| match layout {
                Layout::OutIn => element(at / inputs, at % inputs, many),
                Layout::InOut => element(at % outputs, at / outputs, many),
            };
            let numbers: Vec<f32> = (0..inputs * outputs).map(|at| of(at, 66)).collect();
            let factors = Matrix::new(&numbers, extents, (layout, 2)).factors(rank, 0.5);
            let results = BTreeSet::new();
            let principal = Principal { rank, scale: 0.5, threads: 1, results, found: RefCell::default() };
            let mut left = numbers.clone();
            principal.subtract(&factors, (layout, extents[1]), 0, &mut left);
            for (at, left) in left.iter().enumerate() {
                let expected = numbers[at] - of(at, rank);
                // Singular values of at most 8, with 24 bits; the vectors are as far off as those beside them are near.
                assert!((left - expected).abs() < 1e-5, "{layout:?}: {at} is {left}, expected {expected}");
            }
            let lengths: Vec<f64> = factors.a.chunks(inputs).map(|a| 0.5 * dot(a, a)).collect();
            let near = |(k, square): (usize, &f64)| (square - f64::from(value(k))).abs() < 1e-5;
            assert!(lengths.iter().enumerate().all(near), "{lengths:?}");
        }
    }
}
