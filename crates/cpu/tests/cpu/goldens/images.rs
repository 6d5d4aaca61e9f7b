//! Convolution, max pooling and ReLU. The name of a case is the image, and the kernel, stride and padding of its patches.

use phalanx_tensor::operations::{Fold, MaxPool, MaxPoolBackward, Relu, ReluBackward, Unfold};
use phalanx_tensor::{DType, Device, Epilogue, Layout, Patches, Tensor, Weight};

use super::case::{Case, each_case, poisoned};

fn patches(case: &Case) -> Patches {
    let pair = |text: &str| -> [usize; 2] {
        let (a, b) = text.split_once('x').unwrap();
        [a.parse().unwrap(), b.parse().unwrap()]
    };
    let pairs: Vec<[usize; 2]> = case.name().split(' ').map(pair).collect();
    let [image, kernel, stride, padding] = pairs.try_into().unwrap();
    Patches { image, kernel, stride, padding }
}

/// The rows of patches and the weight as a matrix.
fn operands(case: &Case, device: &Device) -> [Tensor; 2] {
    let (patches, [batch, _, channels]) = (patches(case), case.dims("x"));
    let columns = channels * patches.size();
    let (x, mut rows) =
        (case.input(device, "x"), poisoned(device, case.dtype, [batch, patches.count(), columns]));
    device.run(Unfold { x: x.view(), patches, y: rows.view_mut() });
    let [outputs, ..] = case.dims::<4>("w");
    [rows, case.input(device, "w").reshape([outputs, columns])]
}

/// As `layers::Conv2d` computes it.
pub fn convolution(dtype: DType) {
    each_case("images", dtype, |case| {
        let kernel = |device: &Device| {
            let ([rows, w], bias) = (operands(case, device), case.input(device, "bias"));
            let mut y = poisoned(device, dtype, case.dims::<3>("y"));
            let epilogue = Epilogue { bias: Some(bias.view()), residual: None };
            let w = Weight { matrix: w.view(), layout: Layout::OutIn };
            device.linear(rows.view(), w, epilogue, y.view_mut());
            vec![y]
        };
        case.check("convolution", kernel, &[case.wanted("y")]);
    });
}

pub fn convolution_backward(dtype: DType) {
    each_case("images", dtype, |case| {
        let kernel = |device: &Device| {
            let ([mut rows, w], dy) = (operands(case, device), case.input(device, "dy"));
            let mut dw = poisoned(device, DType::F32, w.shape());
            device.linear_weight_gradient(rows.view(), dy.view(), dw.view_mut(), Layout::OutIn, false);
            let mut db = poisoned(device, DType::F32, case.dims::<1>("bias"));
            device.bias_gradient(dy.view(), db.view_mut(), false);
            let w = Weight { matrix: w.view(), layout: Layout::OutIn };
            device.linear_input_gradient(dy.view(), w, rows.view_mut(), false);
            let mut dx = poisoned(device, dtype, case.dims::<3>("x"));
            device.run(Fold { x: rows.view(), patches: patches(case), y: dx.view_mut() });
            vec![dx, dw, db]
        };
        case.check("convolution backward", kernel, &["dx", "dw", "db"].map(|name| case.wanted(name)));
    });
}

/// ReLU and max pooling behind it; many pixels are equal.
pub fn pooling(dtype: DType) {
    each_case("images", dtype, |case| {
        let patches = patches(case);
        let kernel = |device: &Device| {
            let (mut x, dy) = (case.input(device, "steps"), case.input(device, "dpooled"));
            device.run(Relu { x: x.view_mut() });
            let mut y = poisoned(device, dtype, case.dims::<3>("pooled"));
            device.run(MaxPool { x: x.view(), patches, y: y.view_mut() });
            let mut dx = poisoned(device, dtype, x.shape());
            device.run(MaxPoolBackward { x: x.view(), patches, dy: dy.view(), dx: dx.view_mut() });
            device.run(ReluBackward { y: x.view(), dy: dx.view_mut() });
            vec![y, dx]
        };
        case.check("ReLU and max pooling", kernel, &["pooled", "dsteps"].map(|name| case.wanted(name)));
    });
}
