//! Linear and cross entropy in slices: plain, with label smoothing, with z-loss, with both.

use phalanx_tensor::{CrossEntropy, CrossEntropyGradients, DType, Device, Layout, Tensor, Weight};

use super::case::{Case, each_case, poisoned};

/// How a case is run.
#[derive(Clone, Copy, Debug)]
struct Way {
    layout: Layout,
    /// Rows of a slice of logits.
    slice: usize,
    /// Type of dw, and whether it is added to the weight itself; without it, the loss alone.
    gradients: Option<(DType, bool)>,
}

fn run(case: &Case, way: Way, device: &Device) -> Vec<Tensor> {
    let [_, vocab] = case.dims("w");
    let weight = |dtype: DType| match way.layout {
        Layout::InOut => case.input_as(device, "w", dtype),
        Layout::OutIn => case.transposed_as(device, "w", dtype),
    };
    let [scale, gradient_scale, label_smoothing, z_loss] =
        case.numbers("numbers").iter().map(|x| *x as f32).collect::<Vec<_>>().try_into().unwrap();
    let numbers = CrossEntropy { scale, gradient_scale, label_smoothing, z_loss };
    let (x, w, targets) = (case.input(device, "x"), weight(case.dtype), case.ids(device, "targets"));
    let mut logits = poisoned(device, case.dtype, [way.slice, vocab]);
    let mut loss = poisoned(device, DType::F32, [1]);
    let mut dx = poisoned(device, case.dtype, x.shape());
    let mut dw = way.gradients.map(|(dtype, accumulate)| match accumulate {
        true => weight(dtype),
        false => poisoned(device, dtype, w.shape()),
    });
    let accumulate = way.gradients.is_some_and(|(_, accumulate)| accumulate);
    let gradients =
        dw.as_mut().map(|dw| CrossEntropyGradients { dx: dx.view_mut(), dw: dw.view_mut(), accumulate });
    device.linear_cross_entropy(
        x.view(),
        Weight { matrix: w.view(), layout: way.layout },
        targets.view(),
        numbers,
        logits.view_mut(),
        loss.view_mut(),
        gradients,
    );
    match dw {
        Some(dw) => vec![loss, dx, dw],
        None => vec![loss],
    }
}

pub fn loss(dtype: DType) {
    each_case("cross_entropy", dtype, |case| {
        let [rows, _] = case.dims("x");
        for slice in [rows, 4] {
            let way = Way { layout: Layout::OutIn, slice, gradients: None };
            case.check(&format!("{way:?}"), |device| run(case, way, device), &[case.wanted("loss")]);
        }
    });
}

/// A dw of 16 bits is rounded with every slice, so it is compared where there is one slice.
pub fn loss_and_gradients(dtype: DType) {
    each_case("cross_entropy", dtype, |case| {
        let [rows, hidden] = case.dims("x");
        for (layout, accumulate) in [(Layout::InOut, false), (Layout::InOut, true), (Layout::OutIn, true)] {
            for gradient in case.gradient_types() {
                for slice in if gradient == DType::F32 { vec![rows, 4] } else { vec![rows + 1] } {
                    let way = Way { layout, slice, gradients: Some((gradient, accumulate)) };
                    let dw = case.wanted("dw");
                    let dw = if accumulate { dw.plus(&case.numbers("w"), rows) } else { dw };
                    let dw = if layout == Layout::OutIn { dw.transposed(hidden) } else { dw };
                    let wanted = [case.wanted("loss"), case.wanted("dx"), dw];
                    case.check(&format!("{way:?}"), |device| run(case, way, device), &wanted);
                }
            }
        }
    });
}
