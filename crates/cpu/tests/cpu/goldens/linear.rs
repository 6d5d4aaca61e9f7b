//! Matrix products: one golden product a · b is, with a or b transposed, all three of a linear layer.

use phalanx_tensor::{DType, Device, Epilogue, Gelu, Layout, Tensor, Weight};

use super::case::{Case, each_case, poisoned, read};

const LAYOUTS: [Layout; 2] = [Layout::InOut, Layout::OutIn];

/// A matrix `[in, out]` of the file as a weight of that layout.
fn weight(case: &Case, device: &Device, name: &str, layout: Layout) -> Tensor {
    match layout {
        Layout::InOut => case.input(device, name),
        Layout::OutIn => case.transposed(device, name),
    }
}

/// An output with initial values to accumulate onto, or poisoned.
fn target(case: &Case, device: &Device, accumulate: bool, dtype: DType) -> Tensor {
    if accumulate {
        case.input_as(device, "before", dtype)
    } else {
        poisoned(device, dtype, case.dims::<2>("before"))
    }
}

pub fn linear(dtype: DType) {
    each_case("linear", dtype, |case| {
        let before = case.numbers("before");
        for layout in LAYOUTS {
            for (with_bias, with_residual) in [(false, false), (true, false), (false, true), (true, true)] {
                let kernel = |device: &Device| {
                    let (x, w) = (case.input(device, "a"), weight(case, device, "b", layout));
                    let bias = with_bias.then(|| case.input(device, "bias"));
                    let residual = with_residual.then(|| case.input(device, "before"));
                    let mut y = poisoned(device, dtype, case.dims::<2>("before"));
                    let epilogue = Epilogue {
                        bias: bias.as_ref().map(|b| b.view()),
                        residual: residual.as_ref().map(|r| r.view()),
                    };
                    device.linear(x.view(), Weight { matrix: w.view(), layout }, epilogue, y.view_mut());
                    vec![y]
                };
                let wanted = case.wanted(if with_bias { "pre" } else { "product" });
                let wanted = if with_residual { wanted.plus(&before, 1) } else { wanted };
                let what = format!("{layout:?}, bias {with_bias}, residual {with_residual}");
                case.check(&what, kernel, &[wanted]);
            }
        }
    });
}

pub fn linear_gelu(dtype: DType) {
    each_case("linear", dtype, |case| {
        let forms = [(Gelu::Tanh, "gelu"), (Gelu::Erf, "gelu_erf")];
        let cases = LAYOUTS.into_iter().flat_map(|layout| forms.map(|form| (layout, form)));
        for (layout, (form, name)) in cases.filter(|(_, (_, name))| case.has(name)) {
            let kernel = |device: &Device| {
                let (x, w) = (case.input(device, "a"), weight(case, device, "b", layout));
                let bias = case.input(device, "bias");
                let [mut pre, mut y, mut again] =
                    [0; 3].map(|_| poisoned(device, dtype, case.dims::<2>(name)));
                let w = Weight { matrix: w.view(), layout };
                device.linear_gelu(x.view(), w, Some(bias.view()), form, pre.view_mut(), y.view_mut());
                // The contract: y is the GELU of the stored `pre`, so that it can be recomputed.
                device.gelu(pre.view(), form, again.view_mut());
                assert_eq!(read(device, &y), read(device, &again), "{}: GELU of the stored pre", case.name());
                vec![pre, y]
            };
            case.check(&format!("{layout:?} {form:?}"), kernel, &[case.wanted("pre"), case.wanted(name)]);
        }
    });
}

/// dy = a, and b is the transposed weight.
pub fn linear_input_gradient(dtype: DType) {
    each_case("linear", dtype, |case| {
        let [_, inner] = case.dims("a");
        for layout in LAYOUTS {
            for accumulate in [false, true] {
                let kernel = |device: &Device| {
                    let dy = case.input(device, "a");
                    let w = match layout {
                        Layout::InOut => case.transposed(device, "b"),
                        Layout::OutIn => case.input(device, "b"),
                    };
                    let mut dx = target(case, device, accumulate, dtype);
                    let w = Weight { matrix: w.view(), layout };
                    device.linear_input_gradient(dy.view(), w, dx.view_mut(), accumulate);
                    vec![dx]
                };
                let wanted = case.wanted("product");
                let wanted = if accumulate { wanted.plus(&case.numbers("before"), inner) } else { wanted };
                case.check(&format!("{layout:?}, accumulate {accumulate}"), kernel, &[wanted]);
            }
        }
    });
}

/// x = aᵀ and dy = b, or swapped if the weight is `[out, in]`.
pub fn linear_weight_gradient(dtype: DType) {
    each_case("linear", dtype, |case| {
        let [_, rows] = case.dims("a");
        for (layout, accumulate) in LAYOUTS.into_iter().flat_map(|l| [(l, false), (l, true)]) {
            for gradient in case.gradient_types() {
                let kernel = |device: &Device| {
                    let (turned, straight) = (case.transposed(device, "a"), case.input(device, "b"));
                    let (x, dy) = match layout {
                        Layout::InOut => (turned.view(), straight.view()),
                        Layout::OutIn => (straight.view(), turned.view()),
                    };
                    let mut dw = target(case, device, accumulate, gradient);
                    device.linear_weight_gradient(x, dy, dw.view_mut(), layout, accumulate);
                    vec![dw]
                };
                let wanted = case.wanted("product");
                let wanted = if accumulate { wanted.plus(&case.numbers("before"), rows) } else { wanted };
                let what = format!("{layout:?}, accumulate {accumulate}, into {}", gradient.name());
                case.check(&what, kernel, &[wanted]);
            }
        }
    });
}

pub fn bias_gradient(dtype: DType) {
    each_case("linear", dtype, |case| {
        let [rows, out] = case.dims("b");
        for accumulate in [false, true] {
            for gradient in case.gradient_types() {
                let kernel = |device: &Device| {
                    let dy = case.input(device, "b");
                    let mut db = match accumulate {
                        true => case.input_as(device, "bias", gradient),
                        false => poisoned(device, gradient, [out]),
                    };
                    device.bias_gradient(dy.view(), db.view_mut(), accumulate);
                    vec![db]
                };
                let wanted = case.wanted("columns");
                let wanted = if accumulate { wanted.plus(&case.numbers("bias"), rows) } else { wanted };
                case.check(&format!("accumulate {accumulate}, into {}", gradient.name()), kernel, &[wanted]);
            }
        }
    });
}
