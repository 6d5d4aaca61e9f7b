//! Linear and cross entropy in slices.

use phalanx_tensor::{CrossEntropy, CrossEntropyGradients, Device, Layout, Weight};

use crate::differences::gradient;
use crate::oracle::{Expected, check, indices, numbers, output, poisoned, read, tensor, tokens, wide};

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    hidden: usize,
    vocab: usize,
    slice: usize,
    layout: Layout,
    accumulate: bool,
}

impl Case {
    fn weight(self, [h, v]: [usize; 2]) -> usize {
        if self.layout == Layout::InOut { h * self.vocab + v } else { v * self.hidden + h }
    }

    fn weight_shape(self) -> [usize; 2] {
        if self.layout == Layout::InOut { [self.hidden, self.vocab] } else { [self.vocab, self.hidden] }
    }
}

/// Loss, dx, dw in f64 by the formulas; dw on top of zero.
fn reference(case: Case, x: &[f64], w: &[f64], targets: &[u32], scale: f64) -> (f64, [Vec<f64>; 2]) {
    let Case { rows, hidden, vocab, .. } = case;
    let (mut loss, mut dx, mut dw) = (0.0, vec![0.0; rows * hidden], vec![0.0; hidden * vocab]);
    for row in 0..rows {
        let dot = |v: usize| (0..hidden).map(|h| x[row * hidden + h] * w[case.weight([h, v])]).sum::<f64>();
        let logits: Vec<f64> = (0..vocab).map(dot).collect();
        let top = logits.iter().fold(f64::NEG_INFINITY, |a, x| a.max(*x));
        let total: f64 = logits.iter().map(|l| (l - top).exp()).sum();
        let target = targets[row] as usize;
        loss += scale * (total.ln() + top - logits[target]);
        for v in 0..vocab {
            let d = scale * ((logits[v] - top).exp() / total - if v == target { 1.0 } else { 0.0 });
            for h in 0..hidden {
                dx[row * hidden + h] += d * w[case.weight([h, v])];
                dw[case.weight([h, v])] += d * x[row * hidden + h];
            }
        }
    }
    (loss, [dx, dw])
}

fn run(
    device: &Device,
    case: Case,
    [x, w, before]: [&[f32]; 3],
    targets: &[u32],
    scale: f32,
    train: bool,
) -> Vec<Vec<f32>> {
    let Case { rows, hidden, vocab, slice, layout, accumulate } = case;
    let x = tensor(device, [rows, hidden], x);
    let w = tensor(device, case.weight_shape(), w);
    let targets = tokens(device, [rows], targets);
    let mut logits = poisoned(device, [slice, vocab]);
    let mut loss = poisoned(device, [1]);
    let mut dx = poisoned(device, [rows, hidden]);
    let mut dw = output(device, case.weight_shape(), before, accumulate);
    let gradients = train.then(|| CrossEntropyGradients { dx: dx.view_mut(), dw: dw.view_mut(), accumulate });
    let w = Weight { matrix: w.view(), layout };
    device.linear_cross_entropy(
        x.view(),
        w,
        targets.view(),
        CrossEntropy::scaled(scale),
        logits.view_mut(),
        loss.view_mut(),
        gradients,
    );
    if train {
        vec![read(device, &loss), read(device, &dx), read(device, &dw)]
    } else {
        vec![read(device, &loss)]
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for [rows, hidden, vocab, slice] in
        [[1, 1, 1, 1], [3, 5, 17, 2], [17, 8, 3, 17], [67, 33, 257, 16], [9, 130, 1030, 4], [40, 16, 65, 64]]
    {
        for layout in [Layout::InOut, Layout::OutIn] {
            for accumulate in [false, true] {
                cases.push(Case { rows, hidden, vocab, slice, layout, accumulate });
            }
        }
    }
    cases
}

/// A logit sums `hidden` products; a row sums `vocab` exponentials; a gradient sums the rest.
fn roundings(case: Case) -> f64 {
    4.0 * (case.hidden + case.rows) as f64 + case.vocab as f64 / 4.0 + 32.0
}

#[test]
fn loss_and_gradients() {
    for case in cases() {
        let scale = 0.25f32;
        let x: Vec<f32> = numbers(1, case.rows * case.hidden).iter().map(|x| 2.0 * x).collect();
        let (w, before) = (numbers(2, case.hidden * case.vocab), numbers(3, case.hidden * case.vocab));
        let targets = indices(4, case.rows, case.vocab);
        let (loss, [dx, mut dw]) = reference(case, &wide(&x), &wide(&w), &targets, f64::from(scale));
        if case.accumulate {
            dw.iter_mut().zip(&before).for_each(|(d, b)| *d += f64::from(*b));
        }
        let n = roundings(case);
        // A vocabulary of one has loss and gradients of exactly zero, up to the size of one logit.
        let at_least =
            |e: Expected| Expected { magnitude: e.magnitude.iter().map(|m| m.max(0.25)).collect(), ..e };
        let loss = || at_least(Expected::by_largest(vec![loss], n));
        let expected = [loss(), at_least(Expected::by_largest(dx, n)), at_least(Expected::by_largest(dw, n))];
        let kernel = |device: &Device, train| run(device, case, [&x, &w, &before], &targets, scale, train);
        check(&format!("{case:?}"), |device| kernel(device, true), &expected);
        check(&format!("{case:?}, loss alone"), |device| kernel(device, false), &[loss()]);
    }
}

#[test]
fn reference_gradients_are_differences() {
    for layout in [Layout::InOut, Layout::OutIn] {
        let case = Case { rows: 3, hidden: 5, vocab: 17, slice: 2, layout, accumulate: false };
        let (x, w) = (wide(&numbers(1, 15)), wide(&numbers(2, 85)));
        let targets = indices(4, 3, 17);
        let (_, [dx, dw]) = reference(case, &x, &w, &targets, 0.5);
        let by_x = gradient(&x, |x| reference(case, x, &w, &targets, 0.5).0);
        let by_w = gradient(&w, |w| reference(case, &x, w, &targets, 0.5).0);
        for (a, b) in dx.iter().zip(by_x).chain(dw.iter().zip(by_w)) {
            assert!((a - b).abs() < 1e-8, "{a} {b}");
        }
    }
}

#[test]
fn huge_logits_stay_finite() {
    let case = Case { rows: 2, hidden: 1, vocab: 3, slice: 1, layout: Layout::InOut, accumulate: false };
    let device = crate::oracle::cpu(1, phalanx_tensor::cpu::simd::Isa::detect());
    let out = run(&device, case, [&[1e5, -1e5], &[1.0, 0.0, -1.0], &[0.0; 3]], &[0, 0], 1.0, true);
    assert_eq!(out[0], [2e5]);
    assert!(out.iter().flatten().all(|x| x.is_finite()));
}
