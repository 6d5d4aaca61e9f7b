//! Linear and cross entropy in slices: plain, with label smoothing, with z-loss, with both; with a bias and rows
//! that are ignored.

use phalanx_tensor::{
    Category, CrossEntropy, DType, Device, Layout, Tensor, VocabularyLoss, VocabularyStatistics, Weight,
    vocabulary_blocks,
};

use super::case::{Case, each_case, poisoned};

/// Settings of a run of a case.
#[derive(Clone, Copy, Debug)]
struct RunCase {
    layout: Layout,
    /// Rows of a slice of logits.
    slice: usize,
    /// Type of dw, and whether it is added to the weight itself; None computes only the loss.
    gradients: Option<(DType, bool)>,
}

/// Inputs and outputs of a slice.
struct Head {
    x: Tensor,
    w: Tensor,
    bias: Option<Tensor>,
    targets: Tensor,
    numbers: CrossEntropy,
    sum: Tensor,
    /// dx, dw, db.
    gradients: Option<(Tensor, Tensor, Option<Tensor>)>,
    accumulate: bool,
}

impl Head {
    fn new(case: &Case, run_case: RunCase, device: &Device) -> Head {
        let weight = |dtype: DType| match run_case.layout {
            Layout::InOut => case.input_as(device, "w", dtype),
            Layout::OutIn => case.transposed_as(device, "w", dtype),
        };
        let [scale, gradient_scale, label_smoothing, z_loss] =
            case.numbers("numbers").iter().map(|x| *x as f32).collect::<Vec<_>>().try_into().unwrap();
        let (x, w) = (case.input(device, "x"), weight(case.dtype));
        let gradients = run_case.gradients.map(|(dtype, accumulate)| {
            let dx = poisoned(device, case.dtype, x.shape());
            let dw = if accumulate { weight(dtype) } else { poisoned(device, dtype, w.shape()) };
            let db = case.has("bias").then(|| match accumulate {
                true => case.input_as(device, "bias", dtype),
                false => poisoned(device, dtype, case.dims::<1>("bias")),
            });
            (dx, dw, db)
        });
        Head {
            x,
            w,
            bias: case.has("bias").then(|| case.input(device, "bias")),
            targets: case.ids(device, "targets"),
            numbers: CrossEntropy { scale, gradient_scale, label_smoothing, z_loss },
            sum: device.alloc(DType::F64, [1], Category::Workspace, "golden"),
            gradients,
            accumulate: run_case.gradients.is_some_and(|(_, accumulate)| accumulate),
        }
    }

    /// Some rows.
    fn slice(&mut self, device: &Device, layout: Layout, start: usize, rows: usize) {
        let w = Weight { matrix: self.w.view(), layout };
        let [hidden, vocab] = w.in_out();
        let flat = start * hidden..(start + rows) * hidden;
        let x = self.x.view().range(flat.clone()).reshape([rows, hidden]);
        let targets = self.targets.view().range(start..start + rows);
        let train = self.gradients.is_some();
        let mut logits = poisoned(device, self.x.dtype(), [rows, vocab]);
        let mut blocks = poisoned(device, DType::F32, [rows, 4 * vocabulary_blocks(vocab)]);
        let mut own = poisoned(device, DType::F32, [rows, 4]);
        let bias = self.bias.as_ref().map(|b| b.view());
        let to = train.then(|| logits.view_mut());
        device.run(VocabularyStatistics {
            x,
            w,
            bias,
            targets,
            first: 0,
            exponentials: to,
            blocks: blocks.view_mut(),
            statistics: own.view_mut(),
        });
        let (all, sum) = (own.view().reshape([1, rows, 4]), self.sum.view_mut());
        let (to, numbers) = (train.then(|| logits.view_mut()), self.numbers);
        device.run(VocabularyLoss {
            statistics: all,
            blocks: blocks.view(),
            targets,
            first: 0,
            columns: vocab,
            classes: vocab,
            numbers,
            exponentials: to,
            weights: None,
            losses: None,
            loss: sum,
            accumulate: start > 0,
        });
        if let Some((dx, dw, db)) = &mut self.gradients {
            let add = self.accumulate || start > 0;
            let dx = dx.view_mut().range(flat).reshape([rows, hidden]);
            device.linear_input_gradient(logits.view(), w, dx, false);
            device.linear_weight_gradient(x, logits.view(), dw.view_mut(), layout, add);
            if let Some(db) = db {
                device.bias_gradient(logits.view(), db.view_mut(), add);
            }
        }
    }
}

fn run(case: &Case, run_case: RunCase, device: &Device) -> Vec<Tensor> {
    let [rows, _] = case.dims("x");
    let mut head = Head::new(case, run_case, device);
    for start in (0..rows).step_by(run_case.slice) {
        head.slice(device, run_case.layout, start, run_case.slice.min(rows - start));
    }
    let mut loss = poisoned(device, DType::F32, [1]);
    device.scaled(head.sum.view(), head.numbers.scale, loss.view_mut());
    match head.gradients {
        Some((dx, dw, db)) => [loss, dx, dw].into_iter().chain(db).collect(),
        None => vec![loss],
    }
}

pub fn loss(dtype: DType) {
    each_case("cross_entropy", dtype, |case| {
        let [rows, _] = case.dims("x");
        for slice in [rows, 4] {
            let run_case = RunCase { layout: Layout::OutIn, slice, gradients: None };
            case.check(
                &format!("{run_case:?}"),
                |device| run(case, run_case, device),
                &[case.wanted("loss")],
            );
        }
    });
}

/// A dw of 16 bits is rounded with every slice, so it is compared only when there is one slice.
pub fn loss_and_gradients(dtype: DType) {
    each_case("cross_entropy", dtype, |case| {
        let [rows, hidden] = case.dims("x");
        for (layout, accumulate) in [(Layout::InOut, false), (Layout::InOut, true), (Layout::OutIn, true)] {
            for gradient in case.gradient_types() {
                for slice in if gradient == DType::F32 { vec![rows, 4] } else { vec![rows + 1] } {
                    let run_case = RunCase { layout, slice, gradients: Some((gradient, accumulate)) };
                    let sum = |name: &str, before: &str| match accumulate {
                        true => case.wanted(name).plus(&case.numbers(before), rows),
                        false => case.wanted(name),
                    };
                    let dw = sum("dw", "w");
                    let dw = if layout == Layout::OutIn { dw.transposed(hidden) } else { dw };
                    let mut wanted = vec![case.wanted("loss"), case.wanted("dx"), dw];
                    wanted.extend(case.has("bias").then(|| sum("db", "bias")));
                    case.check(&format!("{run_case:?}"), |device| run(case, run_case, device), &wanted);
                }
            }
        }
    });
}
