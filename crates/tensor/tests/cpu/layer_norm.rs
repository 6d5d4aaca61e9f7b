//! Layer norm.

use phalanx_tensor::Device;

use crate::differences::{gradient, weighted};
use crate::oracle::{Expected, check, numbers, output, poisoned, read, tensor, wide};

const SHAPES: [[usize; 2]; 9] =
    [[1, 2], [1, 17], [3, 67], [17, 16], [257, 33], [67, 257], [9, 1024], [2100, 5], [3, 20_000]];

/// y, mean, rstd.
fn reference(x: &[f64], gamma: &[f64], beta: &[f64], eps: f64) -> [Vec<f64>; 3] {
    let hidden = gamma.len();
    let [mut y, mut means, mut rstds] = [const { Vec::new() }; 3];
    for row in x.chunks(hidden) {
        let mean = row.iter().sum::<f64>() / hidden as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / hidden as f64;
        let rstd = 1.0 / (variance + eps).sqrt();
        y.extend(row.iter().zip(gamma.iter().zip(beta)).map(|(x, (g, b))| (x - mean) * rstd * g + b));
        means.push(mean);
        rstds.push(rstd);
    }
    [y, means, rstds]
}

/// Additions in one lane, the tree over the lanes, and the rest.
fn roundings(hidden: usize) -> f64 {
    hidden as f64 / 16.0 + 16.0
}

#[test]
fn forward() {
    for [rows, hidden] in SHAPES {
        let (x, gamma, beta) = (numbers(1, rows * hidden), numbers(2, hidden), numbers(3, hidden));
        let kernel = |device: &Device| {
            let x = tensor(device, [rows, hidden], &x);
            let (gamma, beta) = (tensor(device, [hidden], &gamma), tensor(device, [hidden], &beta));
            let mut y = poisoned(device, [rows, hidden]);
            let (mut mean, mut rstd) = (poisoned(device, [rows]), poisoned(device, [rows]));
            device.layer_norm(
                x.view(),
                [gamma.view(), beta.view()],
                1e-5,
                y.view_mut(),
                [mean.view_mut(), rstd.view_mut()],
            );
            vec![read(device, &y), read(device, &mean), read(device, &rstd)]
        };
        let eps = f64::from(1e-5f32);
        let [y, mean, rstd] = reference(&wide(&x), &wide(&gamma), &wide(&beta), eps);
        // Values are at most 1, so the mean's error is roundings * EPS * 1, and rstd enlarges it.
        let largest = rstd.iter().fold(1.0, |a: f64, r| a.max(*r));
        let n = roundings(hidden);
        let one =
            |value: Vec<f64>, size: f64| Expected { magnitude: vec![size; value.len()], value, roundings: n };
        check(
            &format!("layer_norm {rows} x {hidden}"),
            kernel,
            &[one(y, 2.0 * largest), one(mean, 1.0), Expected::relative(rstd, 2.0 * n)],
        );
    }
}

#[test]
fn backward_against_differences() {
    for [rows, hidden] in [[1, 5], [1, 17], [3, 67], [40, 5], [2, 131]] {
        for accumulate in [false, true] {
            let (x, gamma, beta) = (numbers(1, rows * hidden), numbers(2, hidden), numbers(3, hidden));
            let dy = numbers(4, rows * hidden);
            let before = numbers(5, rows * hidden);
            let eps = 1e-5f32;
            let kernel = |device: &Device| {
                backward(device, [rows, hidden], [&x, &gamma, &beta, &dy, &before], eps, accumulate)
            };
            let (x64, g64, b64) = (wide(&x), wide(&gamma), wide(&beta));
            let eps = f64::from(eps);
            let add = |d: Vec<f64>| -> Vec<f64> {
                d.iter().zip(&before).map(|(d, b)| if accumulate { d + f64::from(*b) } else { *d }).collect()
            };
            let dx = add(gradient(&x64, |x| weighted(&reference(x, &g64, &b64, eps)[0], &dy)));
            let dgamma = add(gradient(&g64, |g| weighted(&reference(&x64, g, &b64, eps)[0], &dy)));
            let dbeta = add(gradient(&b64, |b| weighted(&reference(&x64, &g64, b, eps)[0], &dy)));
            // The forward's roundings enter through mean and rstd, twice, and the rows are summed; rows of
            // two near-equal numbers enlarge them by rstd (at most about 100 with these numbers).
            let n = (4.0 * roundings(hidden) + rows as f64) * 8.0;
            let expected = [dx, dgamma, dbeta].map(|d| Expected::by_largest(d, n));
            check(&format!("layer_norm backward {rows} x {hidden} {accumulate}"), kernel, &expected);
        }
    }
}

fn backward(
    device: &Device,
    [rows, hidden]: [usize; 2],
    [x, gamma, beta, dy, before]: [&[f32]; 5],
    eps: f32,
    accumulate: bool,
) -> Vec<Vec<f32>> {
    let x = tensor(device, [rows, hidden], x);
    let (gamma, beta) = (tensor(device, [hidden], gamma), tensor(device, [hidden], beta));
    let mut y = poisoned(device, [rows, hidden]);
    let (mut mean, mut rstd) = (poisoned(device, [rows]), poisoned(device, [rows]));
    device.layer_norm(
        x.view(),
        [gamma.view(), beta.view()],
        eps,
        y.view_mut(),
        [mean.view_mut(), rstd.view_mut()],
    );
    let dy = tensor(device, [rows, hidden], dy);
    let mut dx = output(device, [rows, hidden], before, accumulate);
    let mut dgamma = output(device, [hidden], &before[..hidden], accumulate);
    let mut dbeta = output(device, [hidden], &before[..hidden], accumulate);
    device.layer_norm_backward(
        x.view(),
        gamma.view(),
        [mean.view(), rstd.view()],
        dy.view(),
        dx.view_mut(),
        accumulate,
        [dgamma.view_mut(), dbeta.view_mut()],
        accumulate,
    );
    vec![read(device, &dx), read(device, &dgamma), read(device, &dbeta)]
}

/// Many rows: too slow for differences, so against the formula in f64.
#[test]
fn backward_of_many_rows() {
    for [rows, hidden] in SHAPES.into_iter().filter(|[_, hidden]| *hidden > 2) {
        let (x, gamma, beta) = (numbers(1, rows * hidden), numbers(2, hidden), numbers(3, hidden));
        let (dy, before) = (numbers(4, rows * hidden), numbers(5, rows * hidden));
        let kernel = |device: &Device| {
            backward(device, [rows, hidden], [&x, &gamma, &beta, &dy, &before], 1e-5, false)
        };
        let [_, mean, rstd] = reference(&wide(&x), &wide(&gamma), &wide(&beta), f64::from(1e-5f32));
        let (mut dx, mut dgamma, mut dbeta) = (Vec::new(), vec![0.0; hidden], vec![0.0; hidden]);
        for row in 0..rows {
            let at = row * hidden..(row + 1) * hidden;
            let n: Vec<f64> = x[at.clone()].iter().map(|x| (f64::from(*x) - mean[row]) * rstd[row]).collect();
            let dy = wide(&dy[at]);
            let d: Vec<f64> = dy.iter().zip(&gamma).map(|(d, g)| d * f64::from(*g)).collect();
            let average = d.iter().sum::<f64>() / hidden as f64;
            let average_n = d.iter().zip(&n).map(|(d, n)| d * n).sum::<f64>() / hidden as f64;
            for i in 0..hidden {
                dx.push(rstd[row] * (d[i] - average - n[i] * average_n));
                dgamma[i] += dy[i] * n[i];
                dbeta[i] += dy[i];
            }
        }
        let n = 4.0 * roundings(hidden) + rows as f64;
        let expected = [dx, dgamma, dbeta].map(|d| Expected::by_largest(d, n));
        check(&format!("layer_norm backward {rows} x {hidden}"), kernel, &expected);
    }
}
