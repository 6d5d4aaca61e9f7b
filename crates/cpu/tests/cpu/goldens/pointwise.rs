//! GELU, conversion and addition.

use phalanx_tensor::{DType, Device, Gelu};

use super::case::{Case, each_case, poisoned, read, upload};
use crate::oracle::cpu;
use phalanx_simd::Isa;

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// The GELU formula of a case.
fn form(case: &Case) -> Gelu {
    if case.name().ends_with("erf") { Gelu::Erf } else { Gelu::Tanh }
}

pub fn gelu(dtype: DType) {
    each_case("gelu", dtype, |case| {
        let kernel = |device: &Device| {
            let x = case.input(device, "x");
            let mut y = poisoned(device, dtype, x.shape());
            device.gelu(x.view(), form(case), y.view_mut());
            vec![y]
        };
        case.check("forward", kernel, &[case.wanted("y")]);
    });
}

pub fn gelu_backward(dtype: DType) {
    each_case("gelu", dtype, |case| {
        let [rows, width] = case.dims("x");
        // Initial values for accumulation: the first row of dy.
        let before = &case.numbers("dy")[..width];
        for accumulate in [false, true] {
            for gradient in case.gradient_types() {
                let kernel = |device: &Device| {
                    let (x, mut dy) = (case.input(device, "x"), case.input(device, "dy"));
                    let mut db = match accumulate {
                        true => upload(device, gradient, &[width], before),
                        false => poisoned(device, gradient, [width]),
                    };
                    device.gelu_backward(
                        x.view(),
                        form(case),
                        dy.view_mut(),
                        Some(db.view_mut()),
                        accumulate,
                    );
                    vec![dy, db]
                };
                let db = case.wanted("db");
                let db = if accumulate { db.plus(before, rows) } else { db };
                let what = format!("accumulate {accumulate}, into {}", gradient.name());
                case.check(&what, kernel, &[case.wanted("dx"), db]);
            }
        }
    });
}

/// Must equal PyTorch exactly, because there is only one correct rounding.
pub fn convert(dtype: DType) {
    each_case("convert", dtype, |case| {
        for to in TYPES {
            let wanted =
                if to == dtype { case.numbers("x") } else { case.numbers(&format!("to_{}", to.name())) };
            for isa in Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect()) {
                for threads in [1, 3] {
                    let device = cpu(threads, isa);
                    let from = case.input(&device, "x");
                    let mut into = poisoned(&device, to, from.shape());
                    device.convert(from.view(), into.view_mut());
                    let got = read(&device, &into);
                    assert_eq!(got.len(), wanted.len());
                    for (i, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                        let x = case.numbers("x")[i];
                        let (from, to) = (dtype.name(), to.name());
                        assert!(
                            got.to_bits() == wanted.to_bits(),
                            "{x:e} from {from} to {to} is {got:e}, PyTorch has {wanted:e} ({})",
                            isa.name()
                        );
                    }
                }
            }
        }
    });
}

pub fn add(dtype: DType) {
    each_case("convert", dtype, |case| {
        for other in TYPES {
            let name = other.name();
            let kernel = |device: &Device| {
                let mut into = case.input(device, "into");
                let from = case.input_as(device, &format!("from_{name}"), other);
                device.add(from.view(), into.view_mut());
                vec![into]
            };
            case.check(&format!("add {name}"), kernel, &[case.wanted(&format!("sum_{name}"))]);
        }
    });
}
