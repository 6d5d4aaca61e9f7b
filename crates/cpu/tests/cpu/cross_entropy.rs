//! Linear and cross entropy in slices of rows and parts of the vocabulary, as a head composes them.

use std::ops::Range;

use phalanx_simd::Isa;
use phalanx_tensor::operations::{BiasGradient, InputGradient, WeightGradient};
use phalanx_tensor::{
    Category, CrossEntropy, DType, Device, IGNORED, Layout, Tensor, View, VocabularyLoss,
    VocabularyStatistics, Weight, logits_stride, vocabulary_blocks,
};

use crate::differences::gradient;
use crate::oracle::{
    Expected, check, cpu, indices, numbers, output, poisoned, poisoned_as, read, tensor, tokens, wide,
};

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    hidden: usize,
    vocab: usize,
    /// Rows of a slice.
    slice: usize,
    /// Pieces of the vocabulary.
    parts: usize,
    bias: bool,
    /// Every third row is ignored.
    ignores: bool,
    layout: Layout,
    accumulate: bool,
}

/// Inputs of a case in f32: x, w (`[vocab, hidden]`), bias, and the initial gradients.
struct Inputs {
    x: Vec<f32>,
    w: Vec<f32>,
    bias: Vec<f32>,
    before: Vec<f32>,
    targets: Vec<u32>,
}

impl Case {
    fn inputs(self) -> Inputs {
        let Case { rows, hidden, vocab, .. } = self;
        let mut targets = indices(4, rows, vocab);
        if self.ignores {
            targets.iter_mut().step_by(3).for_each(|target| *target = IGNORED);
        }
        Inputs {
            x: numbers(1, rows * hidden).iter().map(|x| 2.0 * x).collect(),
            w: numbers(2, hidden * vocab),
            bias: numbers(5, if self.bias { vocab } else { 0 }),
            before: numbers(3, (hidden + self.bias as usize) * vocab),
            targets,
        }
    }

    /// The classes of a part.
    fn part(self, part: usize) -> Range<usize> {
        part * self.vocab / self.parts..(part + 1) * self.vocab / self.parts
    }

    /// Converts a matrix `[columns, hidden]` to the layout, and back.
    fn laid(self, columns: usize, w: &[f32], back: bool) -> Vec<f32> {
        let (a, b) = if back { (self.hidden, columns) } else { (columns, self.hidden) };
        match self.layout {
            Layout::OutIn => w.to_vec(),
            Layout::InOut => (0..b).flat_map(|j| (0..a).map(move |i| w[i * b + j])).collect(),
        }
    }

    fn shape(self, columns: usize) -> [usize; 2] {
        if self.layout == Layout::OutIn { [columns, self.hidden] } else { [self.hidden, columns] }
    }
}

/// Loss, dx, dw, db in f64 by the formulas; dw and db on top of zero.
fn reference(
    case: Case,
    [x, w, bias]: [&[f64]; 3],
    targets: &[u32],
    numbers: CrossEntropy,
) -> (f64, [Vec<f64>; 3]) {
    let Case { rows, hidden, vocab, .. } = case;
    let [smoothing, z_loss] = [numbers.label_smoothing, numbers.z_loss].map(f64::from);
    let (mut loss, mut dx) = (0.0, vec![0.0; rows * hidden]);
    let (mut dw, mut db) = (vec![0.0; hidden * vocab], vec![0.0; bias.len()]);
    for row in (0..rows).filter(|row| targets[*row] != IGNORED) {
        let dot = |v: usize| (0..hidden).map(|h| x[row * hidden + h] * w[v * hidden + h]).sum::<f64>();
        let logits: Vec<f64> = (0..vocab).map(|v| dot(v) + bias.get(v).unwrap_or(&0.0)).collect();
        let top = logits.iter().fold(f64::NEG_INFINITY, |a, x| a.max(*x));
        let total: f64 = logits.iter().map(|l| (l - top).exp()).sum();
        let (log_sum_exp, target) = (total.ln() + top, targets[row] as usize);
        let mean = logits.iter().sum::<f64>() / vocab as f64;
        loss += f64::from(numbers.scale)
            * ((1.0 - smoothing) * (log_sum_exp - logits[target])
                + smoothing * (log_sum_exp - mean)
                + z_loss * log_sum_exp * log_sum_exp);
        for v in 0..vocab {
            let p = (logits[v] - top).exp() / total;
            let wanted = if v == target { 1.0 - smoothing } else { 0.0 } + smoothing / vocab as f64;
            let d = f64::from(numbers.gradient_scale) * (p * (1.0 + 2.0 * z_loss * log_sum_exp) - wanted);
            for h in 0..hidden {
                dx[row * hidden + h] += d * w[v * hidden + h];
                dw[v * hidden + h] += d * x[row * hidden + h];
            }
            if let Some(db) = db.get_mut(v) {
                *db += d;
            }
        }
    }
    (loss, [dx, dw, db])
}

/// The state of one part of the vocabulary.
struct Part {
    classes: Range<usize>,
    w: Tensor,
    bias: Option<Tensor>,
    exponentials: Tensor,
    blocks: Tensor,
    dw: Tensor,
    db: Option<Tensor>,
}

impl Part {
    fn new(device: &Device, case: Case, inputs: &Inputs, classes: Range<usize>) -> Part {
        let (hidden, columns) = (case.hidden, classes.len());
        let of = |all: &[f32]| case.laid(columns, &all[classes.start * hidden..classes.end * hidden], false);
        let biases = case.vocab * hidden;
        let before = inputs.before.get(biases + classes.start..biases + classes.end);
        Part {
            w: tensor(device, case.shape(columns), &of(&inputs.w)),
            bias: case.bias.then(|| tensor(device, [columns], &inputs.bias[classes.clone()])),
            exponentials: poisoned(device, [case.slice, logits_stride(columns)]),
            blocks: poisoned(device, [case.slice, 4 * vocabulary_blocks(columns)]),
            dw: output(device, case.shape(columns), &of(&inputs.before), case.accumulate),
            db: before.map(|before| output(device, [columns], before, case.accumulate)),
            classes,
        }
    }

    /// Statistics of a slice of rows.
    fn statistics(&mut self, device: &Device, case: Case, x: View, targets: View, train: bool) -> Vec<f32> {
        let (rows, columns) = (targets.elements(), self.classes.len());
        let mut statistics = poisoned(device, [rows, 4]);
        let w = Weight { matrix: self.w.view(), layout: case.layout };
        let stride = logits_stride(columns);
        let to = self.exponentials.view_mut().range(0..rows * stride).reshape([rows, stride]);
        let blocks = self.blocks.view_mut().range(0..rows * 4 * vocabulary_blocks(columns));
        device.run(VocabularyStatistics {
            x,
            w,
            bias: self.bias.as_ref().map(|b| b.view()),
            targets,
            first: self.classes.start,
            exponentials: train.then_some(to),
            blocks,
            statistics: statistics.view_mut(),
        });
        read(device, &statistics)
    }
}

/// Loss, dx, dw, db; or only the loss.
fn run(device: &Device, case: Case, inputs: &Inputs, numbers: CrossEntropy, train: bool) -> Vec<Vec<f32>> {
    let Case { rows, hidden, vocab, slice, layout, accumulate, .. } = case;
    let x = tensor(device, [rows, hidden], &inputs.x);
    let targets = tokens(device, [rows], &inputs.targets);
    let mut parts: Vec<Part> =
        (0..case.parts).map(|part| Part::new(device, case, inputs, case.part(part))).collect();
    let mut dx = poisoned(device, [rows, hidden]);
    // Each part sums the same losses.
    let mut sums: Vec<Tensor> =
        parts.iter().map(|_| device.alloc(DType::F64, [1], Category::Workspace, "test")).collect();
    for start in (0..rows).step_by(slice) {
        let range = start..rows.min(start + slice);
        let flat = range.start * hidden..range.end * hidden;
        let x = x.view().range(flat.clone()).reshape([range.len(), hidden]);
        let targets = targets.view().range(range.clone());
        let all: Vec<f32> =
            parts.iter_mut().flat_map(|part| part.statistics(device, case, x, targets, train)).collect();
        let all = tensor(device, [parts.len(), range.len(), 4], &all);
        for (index, (part, sum)) in parts.iter_mut().zip(&mut sums).enumerate() {
            let columns = part.classes.len();
            let stride = logits_stride(columns);
            let mut to =
                part.exponentials.view_mut().range(0..range.len() * stride).reshape([range.len(), stride]);
            device.run(VocabularyLoss {
                statistics: all.view(),
                blocks: part.blocks.view().range(0..range.len() * 4 * vocabulary_blocks(columns)),
                targets,
                first: part.classes.start,
                columns,
                classes: vocab,
                numbers,
                exponentials: train.then(|| to.reborrow()),
                weights: None,
                losses: None,
                loss: sum.view_mut(),
                accumulate: start > 0,
            });
            if train {
                let add = accumulate || start > 0;
                let w = Weight { matrix: part.w.view(), layout };
                let dx = dx.view_mut().range(flat.clone()).reshape([range.len(), hidden]);
                let (dy, padded) = (to.as_view(), true);
                device.run(InputGradient { dy, padded, w, dx, accumulate: index > 0 });
                let dw = part.dw.view_mut();
                device.run(WeightGradient { x, dy, padded, dw, layout, accumulate: add });
                if let Some(db) = &mut part.db {
                    device.run(BiasGradient { dy, padded, db: db.view_mut(), accumulate: add });
                }
            }
        }
    }
    let losses: Vec<Vec<f32>> = sums
        .iter()
        .map(|sum| {
            let mut loss = poisoned(device, [1]);
            device.scaled(sum.view(), numbers.scale, loss.view_mut());
            read(device, &loss)
        })
        .collect();
    assert!(losses.iter().all(|loss| loss[0].to_bits() == losses[0][0].to_bits()), "{losses:?}");
    if !train {
        return vec![losses[0].clone()];
    }
    let dw = |part: &Part| case.laid(part.classes.len(), &read(device, &part.dw), true);
    let db = |part: &Part| part.db.as_ref().map_or(Vec::new(), |db| read(device, db));
    let [dw, db] = [parts.iter().flat_map(dw).collect(), parts.iter().flat_map(db).collect()];
    vec![losses[0].clone(), read(device, &dx), dw, db]
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for [rows, hidden, vocab, slice, parts] in [
        [1, 1, 1, 1, 1],
        [3, 5, 17, 2, 1],
        [17, 8, 3, 17, 3],
        [67, 33, 257, 16, 1],
        [67, 33, 257, 16, 2],
        [9, 130, 1030, 4, 1],
        [9, 130, 1030, 4, 3],
        [40, 16, 65, 64, 1],
    ] {
        for layout in [Layout::InOut, Layout::OutIn] {
            for [accumulate, bias, ignores] in
                [[false; 3], [true, false, true], [false, true, true], [true; 3]]
            {
                cases.push(Case { rows, hidden, vocab, slice, parts, bias, ignores, layout, accumulate });
            }
        }
    }
    cases
}

/// A logit sums `hidden` products; a row sums `vocab` exponentials; a gradient sums the rest.
fn roundings(case: Case) -> f64 {
    4.0 * (case.hidden + case.rows) as f64 + case.vocab as f64 / 4.0 + 32.0
}

/// Plain, and with everything.
const NUMBERS: [CrossEntropy; 2] = [
    CrossEntropy { scale: 0.25, gradient_scale: 0.25, label_smoothing: 0.0, z_loss: 0.0 },
    CrossEntropy { scale: 0.25, gradient_scale: 0.5, label_smoothing: 0.1, z_loss: 0.01 },
];

#[test]
fn loss_and_gradients() {
    for (case, numbers) in cases().into_iter().flat_map(|case| NUMBERS.map(|numbers| (case, numbers))) {
        let inputs = case.inputs();
        let [x, w, bias] = [&inputs.x, &inputs.w, &inputs.bias].map(|x| wide(x));
        let (loss, [dx, mut dw, mut db]) = reference(case, [&x, &w, &bias], &inputs.targets, numbers);
        if case.accumulate {
            let before = wide(&inputs.before);
            dw.iter_mut().chain(&mut db).zip(before).for_each(|(d, before)| *d += before);
        }
        let n = roundings(case);
        // A vocabulary of one has loss and gradients of exactly zero, up to the size of one logit.
        let with_magnitude_min =
            |e: Expected| Expected { magnitude: e.magnitude.iter().map(|m| m.max(0.25)).collect(), ..e };
        let loss = || with_magnitude_min(Expected::by_largest(vec![loss], n));
        let expected = [dx, dw, db].map(|d| with_magnitude_min(Expected::by_largest(d, n)));
        let expected: Vec<Expected> = std::iter::once(loss()).chain(expected).collect();
        let kernel = |device: &Device, train| run(device, case, &inputs, numbers, train);
        let what = format!("{case:?}, {numbers:?}");
        check(&what, |device| kernel(device, true), &expected);
        check(&format!("{what}, loss alone"), |device| kernel(device, false), &[loss()]);
    }
}

fn small(layout: Layout) -> Case {
    let (rows, hidden, vocab) = (3, 5, 17);
    Case { rows, hidden, vocab, slice: 2, parts: 1, bias: true, ignores: false, layout, accumulate: false }
}

#[test]
fn reference_gradients_are_differences() {
    for numbers in NUMBERS.map(|n| CrossEntropy { gradient_scale: n.scale, ..n }) {
        let case = small(Layout::OutIn);
        let inputs = case.inputs();
        let [x, w, bias] = [&inputs.x, &inputs.w, &inputs.bias].map(|x| wide(x));
        let loss =
            |x: &[f64], w: &[f64], bias: &[f64]| reference(case, [x, w, bias], &inputs.targets, numbers).0;
        let (_, [dx, dw, db]) = reference(case, [&x, &w, &bias], &inputs.targets, numbers);
        let by_x = gradient(&x, |x| loss(x, &w, &bias));
        let by_w = gradient(&w, |w| loss(&x, w, &bias));
        let by_bias = gradient(&bias, |bias| loss(&x, &w, bias));
        for (a, b) in dx.iter().chain(&dw).chain(&db).zip(by_x.iter().chain(&by_w).chain(&by_bias)) {
            assert!((a - b).abs() < 1e-8, "{a} {b}");
        }
    }
}

/// The sum over rows continues where the previous slice ended.
#[test]
fn slices_do_not_change_the_bits_of_the_loss() {
    let device = cpu(2, Isa::detect());
    for parts in [1, 3] {
        let case = Case { rows: 67, hidden: 33, vocab: 257, parts, ..small(Layout::OutIn) };
        let inputs = case.inputs();
        let loss = |slice| run(&device, Case { slice, ..case }, &inputs, NUMBERS[1], true)[0][0].to_bits();
        assert!([1, 2, 16, 66].map(loss).iter().all(|bits| *bits == loss(67)));
    }
}

#[test]
fn huge_logits_stay_finite() {
    for parts in [1, 3] {
        let case = Case { rows: 2, hidden: 1, vocab: 3, parts, bias: false, ..small(Layout::InOut) };
        let inputs = Inputs {
            x: vec![1e5, -1e5],
            w: vec![1.0, 0.0, -1.0],
            bias: Vec::new(),
            before: vec![0.0; 3],
            targets: vec![0, 0],
        };
        let out = run(&cpu(1, Isa::detect()), case, &inputs, CrossEntropy::scaled(1.0), true);
        assert_eq!(out[0], [2e5]);
        assert!(out.iter().flatten().all(|x| x.is_finite()));
    }
}

#[test]
fn what_is_not_a_number_is_not_hidden() {
    let case = Case { parts: 2, ..small(Layout::OutIn) };
    let mut inputs = case.inputs();
    inputs.w[16 * 5] = f32::NAN;
    let loss = run(&cpu(1, Isa::detect()), case, &inputs, CrossEntropy::scaled(1.0), true)[0][0];
    assert!(loss.is_nan(), "{loss}");
}

#[test]
fn ignored_rows_have_neither_loss_nor_derivatives() {
    for dtype in crate::oracle::FLOATS {
        let device = cpu(2, Isa::detect());
        let ids = tokens(&device, [3], &[IGNORED; 3]);
        let statistics = tensor(&device, [1, 3, 4], &[f32::NAN; 12]);
        let blocks = tensor(&device, [3, 8], &[f32::NAN; 24]);
        let mut exponentials = poisoned_as(&device, dtype, [3, 130]);
        let mut loss = device.alloc(DType::F64, [1], Category::Workspace, "test");
        let to = Some(exponentials.view_mut());
        let numbers = NUMBERS[1];
        let (statistics, blocks) = (statistics.view(), blocks.view());
        device.run(VocabularyLoss {
            statistics,
            blocks,
            targets: ids.view(),
            first: 0,
            columns: 130,
            classes: 130,
            numbers,
            exponentials: to,
            weights: None,
            losses: None,
            loss: loss.view_mut(),
            accumulate: false,
        });
        let mut sum = [f64::NAN];
        device.download(loss.view(), &mut sum).unwrap();
        assert_eq!(sum, [0.0]);
        assert!(crate::oracle::read_f32(&device, &exponentials).iter().all(|x| *x == 0.0));
    }
}

#[test]
#[should_panic(expected = "target 17 is outside the vocabulary of 17")]
fn a_target_out_of_range_is_named() {
    let case = small(Layout::OutIn);
    let mut inputs = case.inputs();
    inputs.targets[1] = 17;
    run(&cpu(1, Isa::detect()), case, &inputs, NUMBERS[0], false);
}
