//! Attention in tiles against the whole matrix in f64.

use phalanx_tensor::{Device, Heads};

use crate::differences::{gradient, weighted};
use crate::oracle::{Expected, check, numbers, poisoned, read, tensor, wide};

#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    seq: usize,
    heads: usize,
    size: usize,
    causal: bool,
}

impl Case {
    fn hidden(self) -> usize {
        self.heads * self.size
    }
}

/// out and log_sum_exp.
fn reference(case: Case, qkv: &[f64]) -> [Vec<f64>; 2] {
    let Case { batch, seq, heads, size, causal } = case;
    let hidden = case.hidden();
    let at = |b: usize, row: usize, which: usize, h: usize| {
        &qkv[(b * seq + row) * 3 * hidden + which * hidden + h * size..][..size]
    };
    let mut out = vec![0.0; batch * seq * hidden];
    let mut lse = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..seq {
                let keys = if causal { i + 1 } else { seq };
                let dot =
                    |j: usize| at(b, i, 0, h).iter().zip(at(b, j, 1, h)).map(|(q, k)| q * k).sum::<f64>();
                let scores: Vec<f64> = (0..keys).map(|j| dot(j) / (size as f64).sqrt()).collect();
                let top = scores.iter().fold(f64::NEG_INFINITY, |a, x| a.max(*x));
                let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                lse.push(top + total.ln());
                let out = &mut out[(b * seq + i) * hidden + h * size..][..size];
                for (j, score) in scores.iter().enumerate() {
                    let p = (score - top).exp() / total;
                    out.iter_mut().zip(at(b, j, 2, h)).for_each(|(o, v)| *o += p * v);
                }
            }
        }
    }
    [out, lse]
}

/// dqkv by the formulas, in f64.
fn reference_backward(case: Case, qkv: &[f64], dout: &[f64]) -> Vec<f64> {
    let Case { batch, seq, heads, size, causal } = case;
    let hidden = case.hidden();
    let at = |b: usize, row: usize, which: usize, h: usize| {
        (b * seq + row) * 3 * hidden + which * hidden + h * size
    };
    let [out, lse] = reference(case, qkv);
    let mut d = vec![0.0; qkv.len()];
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let scale = 1.0 / (size as f64).sqrt();
    for (b, h, i) in (0..batch * heads * seq).map(|n| (n / seq / heads, n / seq % heads, n % seq)) {
        let o = (b * seq + i) * hidden + h * size;
        let delta = dot(&out[o..o + size], &dout[o..o + size]);
        for j in 0..if causal { i + 1 } else { seq } {
            let (q, k, v) = (at(b, i, 0, h), at(b, j, 1, h), at(b, j, 2, h));
            let score = dot(&qkv[q..q + size], &qkv[k..k + size]) * scale;
            let p = (score - lse[(b * heads + h) * seq + i]).exp();
            let ds = p * (dot(&dout[o..o + size], &qkv[v..v + size]) - delta) * scale;
            for c in 0..size {
                d[v + c] += p * dout[o + c];
                d[q + c] += ds * qkv[k + c];
                d[k + c] += ds * qkv[q + c];
            }
        }
    }
    d
}

fn forward(device: &Device, case: Case, qkv: &[f32]) -> [phalanx_tensor::Tensor; 3] {
    let Case { batch, seq, heads, causal, .. } = case;
    let qkv = tensor(device, [batch, seq, 3 * case.hidden()], qkv);
    let mut out = poisoned(device, [batch, seq, case.hidden()]);
    let mut lse = poisoned(device, [batch, heads, seq]);
    device.attention(qkv.view(), Heads { heads, causal }, None, out.view_mut(), lse.view_mut());
    [qkv, out, lse]
}

fn backward(device: &Device, case: Case, qkv: &[f32], dout: &[f32]) -> Vec<Vec<f32>> {
    let [qkv, out, lse] = forward(device, case, qkv);
    let dout = tensor(device, [case.batch, case.seq, case.hidden()], dout);
    let mut dqkv = poisoned(device, [case.batch, case.seq, 3 * case.hidden()]);
    let heads = Heads { heads: case.heads, causal: case.causal };
    device.attention_backward(
        qkv.view(),
        [out.view(), lse.view(), dout.view()],
        heads,
        None,
        dqkv.view_mut(),
    );
    vec![read(device, &dqkv)]
}

/// (batch, seq, heads, size); both masks each.
fn cases(shapes: &[[usize; 4]]) -> impl Iterator<Item = Case> {
    shapes.iter().flat_map(|&[batch, seq, heads, size]| {
        [false, true].map(|causal| Case { batch, seq, heads, size, causal })
    })
}

/// A score is a sum of `size` products, then an exponential of up to a few units; a row sums `seq` of them.
fn roundings(case: Case) -> f64 {
    4.0 * (case.size + case.seq) as f64 + 32.0
}

#[test]
fn forward_in_tiles() {
    for case in cases(&[
        [1, 1, 1, 1],
        [1, 3, 1, 17],
        [2, 17, 3, 5],
        [1, 64, 2, 64],
        [2, 67, 2, 33],
        [1, 129, 1, 16],
        [1, 257, 2, 80],
        [1, 130, 1, 200],
    ]) {
        // Three times as large: scores between about -9 and 9, so that the maximum moves.
        let qkv: Vec<f32> =
            numbers(1, case.batch * case.seq * 3 * case.hidden()).iter().map(|x| 3.0 * x).collect();
        let kernel = |device: &Device| {
            let [_, out, lse] = forward(device, case, &qkv);
            vec![read(device, &out), read(device, &lse)]
        };
        let expected = reference(case, &wide(&qkv)).map(|x| Expected::by_largest(x, roundings(case)));
        check(&format!("{case:?}"), kernel, &expected);
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let case = Case { batch: 1, seq: 70, heads: 1, size: 16, causal: true };
    let qkv: Vec<f32> = numbers(1, 70 * 48).iter().map(|x| 40.0 * x).collect();
    let kernel = |device: &Device| {
        let [_, out, lse] = forward(device, case, &qkv);
        vec![read(device, &out), read(device, &lse)]
    };
    // Scores reach 6000: their own rounding is 6000 * EPS, which the exponential makes relative.
    let expected = reference(case, &wide(&qkv)).map(|x| Expected::by_largest(x, 6000.0 * 8.0));
    check("large scores", kernel, &expected);
}

#[test]
fn backward_against_differences() {
    for case in cases(&[[1, 1, 1, 1], [1, 3, 1, 5], [2, 7, 2, 3], [1, 17, 1, 4], [1, 67, 1, 2]]) {
        let qkv = numbers(1, case.batch * case.seq * 3 * case.hidden());
        let dout = numbers(2, case.batch * case.seq * case.hidden());
        let d = gradient(&wide(&qkv), |qkv| weighted(&reference(case, qkv)[0], &dout));
        let expected = Expected::by_largest(d, 4.0 * roundings(case));
        check(
            &format!("backward {case:?}"),
            |device: &Device| backward(device, case, &qkv, &dout),
            &[expected],
        );
    }
}

#[test]
fn backward_in_tiles() {
    for case in cases(&[[1, 64, 1, 64], [2, 67, 2, 33], [1, 129, 3, 16], [1, 257, 1, 80], [3, 65, 2, 8]]) {
        let qkv: Vec<f32> =
            numbers(1, case.batch * case.seq * 3 * case.hidden()).iter().map(|x| 2.0 * x).collect();
        let dout = numbers(2, case.batch * case.seq * case.hidden());
        let d = reference_backward(case, &wide(&qkv), &wide(&dout));
        let expected = Expected::by_largest(d, 4.0 * roundings(case));
        check(
            &format!("backward {case:?}"),
            |device: &Device| backward(device, case, &qkv, &dout),
            &[expected],
        );
    }
}
