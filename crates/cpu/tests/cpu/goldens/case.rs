//! A case of a golden file, and the check of one kernel call against it.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "for who runs the test")]

use std::collections::BTreeSet;
use std::path::Path;

use half::{bf16, f16};
use phalanx_tensor::Element;
use phalanx_tensor::{Category, DType, Device, Shape, Tensor};
use safetensors::{Dtype, SafeTensors};

use crate::oracle::{EPS, KernelPath};

/// Inputs and outputs of one call, by name.
pub struct Case<'a> {
    tensors: &'a SafeTensors<'a>,
    prefix: &'a str,
    /// The compute type.
    pub dtype: DType,
}

/// An output: for each element its value, and the tolerance before rounding.
#[derive(Clone)]
pub struct Wanted {
    value: Vec<f64>,
    tolerance: Vec<f64>,
}

/// Runs `test` on every case of a family in one type.
pub fn each_case(family: &str, dtype: DType, test: impl Fn(&Case)) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let bytes = std::fs::read(folder.join(format!("{family}.safetensors"))).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let prefixes: BTreeSet<&str> =
        tensors.names().into_iter().map(|n| n.rsplit_once('/').unwrap().0).collect();
    let of_type = |prefix: &&str| prefix.split('/').next() == Some(dtype.name());
    let prefixes: Vec<&str> = prefixes.into_iter().filter(of_type).collect();
    assert!(!prefixes.is_empty(), "no case of {family} in {}", dtype.name());
    prefixes.iter().for_each(|prefix| test(&Case { tensors: &tensors, prefix, dtype }));
}

impl Case<'_> {
    /// The name of the case, without its type.
    pub fn name(&self) -> &str {
        self.prefix.split_once('/').unwrap().1
    }

    /// Returns whether the file has this tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.tensor(&format!("{}/{name}", self.prefix)).is_ok()
    }

    fn stored(&self, name: &str) -> safetensors::tensor::TensorView<'_> {
        let name = format!("{}/{name}", self.prefix);
        self.tensors.tensor(&name).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Extents of an input or output.
    pub fn dims<const N: usize>(&self, name: &str) -> [usize; N] {
        self.stored(name).shape().try_into().unwrap()
    }

    /// Numbers of an input or output.
    pub fn numbers(&self, name: &str) -> Vec<f64> {
        let stored = self.stored(name);
        let bytes = stored.data();
        match stored.dtype() {
            Dtype::F64 => bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
            Dtype::BF16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect(),
            Dtype::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f64()).collect(),
            other => panic!("numbers of type {other:?}"),
        }
    }

    /// An input on the device, in the type of the case.
    pub fn input(&self, device: &Device, name: &str) -> Tensor {
        self.input_as(device, name, self.dtype)
    }

    /// An input on the device in a type that holds it as well.
    pub fn input_as(&self, device: &Device, name: &str, dtype: DType) -> Tensor {
        upload(device, dtype, self.stored(name).shape(), &self.numbers(name))
    }

    /// A matrix, transposed.
    pub fn transposed(&self, device: &Device, name: &str) -> Tensor {
        self.transposed_as(device, name, self.dtype)
    }

    /// A matrix, transposed, in a type that holds it as well.
    pub fn transposed_as(&self, device: &Device, name: &str, dtype: DType) -> Tensor {
        let [rows, columns] = self.dims(name);
        upload(device, dtype, &[columns, rows], &transpose(rows, columns, &self.numbers(name)))
    }

    /// Token ids.
    pub fn ids(&self, device: &Device, name: &str) -> Tensor {
        let stored = self.stored(name);
        assert_eq!(stored.dtype(), Dtype::I32);
        let ids: Vec<u32> = stored.data().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let mut t = device.alloc(DType::U32, Shape::from(stored.shape()), Category::Activations, "golden");
        device.upload(&ids, t.view_mut());
        t
    }

    /// An output.
    pub fn wanted(&self, name: &str) -> Wanted {
        Wanted { value: self.numbers(name), tolerance: self.numbers(&format!("{name}.tolerance")) }
    }

    /// The element types that a gradient of parameters may have.
    pub fn gradient_types(&self) -> Vec<DType> {
        if self.dtype == DType::F32 { vec![DType::F32] } else { vec![DType::F32, self.dtype] }
    }

    /// Runs `kernel` with every instruction set on one thread, and checks the results; then on three threads and on the
    /// simulated accelerator, whose bits must be the same.
    #[track_caller]
    pub fn check(&self, what: &str, kernel: impl Fn(&Device) -> Vec<Tensor>, wanted: &[Wanted]) {
        for path in KernelPath::all() {
            let one = path.cpu(1);
            let outputs = kernel(&one);
            assert_eq!(outputs.len(), wanted.len());
            let others = [("3 threads", path.cpu(3)), ("the simulated accelerator", path.simulated())];
            let others = others.map(|(name, device)| (name, kernel(&device), device));
            for (index, (output, wanted)) in outputs.iter().zip(wanted).enumerate() {
                let what = format!("{}, {what}, output {index}, {}", self.prefix, path.name());
                let values = read(&one, output);
                wanted.compare(&what, output.dtype(), &values);
                for (name, others, device) in &others {
                    let other = read(device, &others[index]);
                    assert!(same_bits(&values, &other), "{what}: other bits on {name}");
                }
            }
        }
    }
}

impl Wanted {
    /// The same for an output that was accumulated onto `before` with `additions` additions.
    pub fn plus(mut self, before: &[f64], additions: usize) -> Wanted {
        let roundings = (additions as f64).min(7.0 * (additions as f64).sqrt()) + 1.0;
        for ((value, tolerance), before) in self.value.iter_mut().zip(&mut self.tolerance).zip(before) {
            *value += before;
            *tolerance += EPS * (roundings * before.abs() + value.abs());
        }
        self
    }

    /// A matrix of `rows`, transposed.
    pub fn transposed(self, rows: usize) -> Wanted {
        let columns = self.value.len() / rows;
        let turn = |x: Vec<f64>| transpose(rows, columns, &x);
        Wanted { value: turn(self.value), tolerance: turn(self.tolerance) }
    }

    /// Half a unit in the last place of the output's type, plus the tolerance.
    #[track_caller]
    fn compare(&self, what: &str, dtype: DType, output: &[f64]) {
        assert_eq!(output.len(), self.value.len(), "{what}");
        let mut worst = 0f64;
        for (i, (x, value)) in output.iter().zip(&self.value).enumerate() {
            // Subnormal f32 may be flushed to zero on the path.
            let allowed = half_step(dtype, *value) + self.tolerance[i] + f64::from(f32::MIN_POSITIVE);
            let error = (x - value).abs();
            assert!(
                error <= allowed,
                "{what}: element {i} is {x}, PyTorch in f64 has {value}: off by {error:e}, allowed {allowed:e}"
            );
            worst = worst.max(error / allowed);
        }
        println!("{what}: {worst:.2} of what is allowed");
    }
}

/// Half the distance between numbers of a type around x.
fn half_step(dtype: DType, x: f64) -> f64 {
    let (digits, exponent_min) = match dtype {
        DType::F64 => return 0.0, // sums in f64: their roundings are the tolerance
        DType::F32 => (24, -126),
        DType::BF16 => (8, -126),
        DType::F16 => (11, -14),
        other => panic!("an output of type {}", other.name()),
    };
    let exponent = ((x.abs().to_bits() >> 52) as i32 - 1023).max(exponent_min);
    2f64.powi(exponent - digits)
}

fn transpose(rows: usize, columns: usize, x: &[f64]) -> Vec<f64> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| x[r * columns + c])).collect()
}

fn same_bits(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Numbers that the type holds exactly.
pub fn upload(device: &Device, dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
    let mut t = device.alloc(dtype, Shape::from(shape), Category::Activations, "golden");
    let to = t.view_mut();
    match dtype {
        DType::F32 => device.upload(&values.iter().map(|x| *x as f32).collect::<Vec<_>>(), to),
        DType::BF16 => device.upload(&values.iter().map(|x| bf16::from_f64(*x)).collect::<Vec<_>>(), to),
        DType::F16 => device.upload(&values.iter().map(|x| f16::from_f64(*x)).collect::<Vec<_>>(), to),
        other => panic!("an input of type {}", other.name()),
    }
    let stored = read(device, &t);
    assert!(stored.iter().zip(values).all(|(a, b)| a == b || b.is_nan()), "not exact in {}", dtype.name());
    t
}

/// Memory that no kernel may read before it writes.
pub fn poisoned(device: &Device, dtype: DType, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    match dtype {
        DType::F64 => {
            let mut t = device.alloc(dtype, shape, Category::Workspace, "golden");
            device.upload(&vec![f64::NAN; shape.elements()], t.view_mut());
            t
        }
        _ => {
            let dims = [shape.elements()];
            upload(device, dtype, &dims, &vec![f64::NAN; dims[0]]).reshape(shape)
        }
    }
}

/// The numbers of a tensor of any float type.
pub fn read(device: &Device, t: &Tensor) -> Vec<f64> {
    fn from<T: Element + Default + Into<f64>>(device: &Device, t: &Tensor) -> Vec<f64> {
        let mut out = vec![T::default(); t.shape().elements()];
        device.download(t.view(), &mut out).unwrap();
        out.into_iter().map(Into::into).collect()
    }
    match t.dtype() {
        DType::F32 => from::<f32>(device, t),
        DType::F64 => from::<f64>(device, t),
        DType::BF16 => from::<bf16>(device, t),
        DType::F16 => from::<f16>(device, t),
        other => panic!("an output of type {}", other.name()),
    }
}
