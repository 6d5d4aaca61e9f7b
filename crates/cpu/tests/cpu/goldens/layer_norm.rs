//! Layer norm.

use phalanx_tensor::{DType, Device, LayerNormBackward, Tensor};

use super::case::{Case, each_case, poisoned};

const EPS: f32 = 1e-5;

/// y, mean, rstd.
fn forward(case: &Case, device: &Device, x: &Tensor, gamma: &Tensor) -> [Tensor; 3] {
    let [rows, hidden] = case.dims("x");
    let beta = case.input(device, "beta");
    let mut y = poisoned(device, case.dtype, [rows, hidden]);
    let [mut mean, mut rstd] = [0; 2].map(|_| poisoned(device, DType::F32, [rows]));
    device.layer_norm(
        x.view(),
        (gamma.view(), Some(beta.view())),
        EPS,
        y.view_mut(),
        (Some(mean.view_mut()), rstd.view_mut()),
    );
    [y, mean, rstd]
}

pub fn layer_norm(dtype: DType) {
    each_case("layer_norm", dtype, |case| {
        let kernel = |device: &Device| {
            let (x, gamma) = (case.input(device, "x"), case.input(device, "gamma"));
            forward(case, device, &x, &gamma).into()
        };
        case.check("forward", kernel, &["y", "mean", "rstd"].map(|name| case.wanted(name)));
    });
}

/// Uses the statistics of the kernel's own forward. Accumulated outputs start with an input of the same shape.
pub fn layer_norm_backward(dtype: DType) {
    each_case("layer_norm", dtype, |case| {
        let [rows, hidden] = case.dims("x");
        for (add_input, add_parameters) in [(false, false), (true, false), (false, true)] {
            for gradient in case.gradient_types() {
                let kernel = |device: &Device| {
                    let (x, gamma) = (case.input(device, "x"), case.input(device, "gamma"));
                    let dy = case.input(device, "dy");
                    let [_, mean, rstd] = forward(case, device, &x, &gamma);
                    let mut dx = match add_input {
                        true => case.input(device, "dy"),
                        false => poisoned(device, dtype, [rows, hidden]),
                    };
                    let [mut dgamma, mut dbeta] = ["gamma", "beta"].map(|name| match add_parameters {
                        true => case.input_as(device, name, gradient),
                        false => poisoned(device, gradient, [hidden]),
                    });
                    device.run(LayerNormBackward {
                        x: x.view(),
                        gamma: gamma.view(),
                        norm: 1e-5.into(),
                        products: None,
                        mean: Some(mean.view()),
                        rstd: rstd.view(),
                        dy: dy.view(),
                        dx: dx.view_mut(),
                        accumulate_input: add_input,
                        gradients: [dgamma.view_mut(), dbeta.view_mut()].map(Some),
                        accumulate_parameters: add_parameters,
                    });
                    vec![dx, dgamma, dbeta]
                };
                let wanted = |name, add, before, additions| match add {
                    true => case.wanted(name).plus(&case.numbers(before), additions),
                    false => case.wanted(name),
                };
                let wanted = [
                    wanted("dx", add_input, "dy", 1),
                    wanted("dgamma", add_parameters, "gamma", rows),
                    wanted("dbeta", add_parameters, "beta", rows),
                ];
                let what = format!("add {add_input}, {add_parameters}, into {}", gradient.name());
                case.check(&what, kernel, &wanted);
            }
        }
    });
}
