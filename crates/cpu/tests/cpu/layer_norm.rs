//! Layer norm, and RMS norm, which subtracts no mean.

use phalanx_tensor::{DType, Device, LayerNorm, LayerNormBackward, NormSums, RowNorm, Tensor, WholeSums};

use crate::differences::{gradient, weighted};
use crate::oracle::{
    Expected, FLOATS, KernelPath, check_as, gradient_types, numbers, output_as, poisoned, poisoned_as, read,
    read_f32, rounded, tensor_as, wide,
};

const SHAPES: [[usize; 2]; 9] =
    [[1, 2], [1, 17], [3, 67], [17, 16], [257, 33], [67, 257], [9, 1024], [2100, 5], [3, 20_000]];

/// y, mean (0 where it is not `centred`), rstd.
fn reference(centred: bool, x: &[f64], gamma: &[f64], beta: &[f64], eps: f64) -> [Vec<f64>; 3] {
    let hidden = gamma.len();
    let [mut y, mut means, mut rstds] = [const { Vec::new() }; 3];
    for row in x.chunks(hidden) {
        let mean = if centred { row.iter().sum::<f64>() / hidden as f64 } else { 0.0 };
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

/// x and the parameters, rounded to `dtype`.
fn inputs(dtype: DType, [rows, hidden]: [usize; 2]) -> [Vec<f32>; 3] {
    [numbers(1, rows * hidden), numbers(2, hidden), numbers(3, hidden)].map(|x| rounded(dtype, &x))
}

#[test]
fn forward() {
    let cases = FLOATS.into_iter().flat_map(|d| SHAPES.map(|s| (d, s)));
    for (dtype, [rows, hidden], centred) in cases.flat_map(|(d, s)| [(d, s, true), (d, s, false)]) {
        let [x, gamma, beta] = inputs(dtype, [rows, hidden]);
        let kernel = |device: &Device| {
            let x = tensor_as(device, dtype, [rows, hidden], &x);
            let [gamma, beta] = [&gamma, &beta].map(|p| tensor_as(device, dtype, [hidden], p));
            let mut y = poisoned_as(device, dtype, [rows, hidden]);
            let (mut mean, mut rstd) = (poisoned(device, [rows]), poisoned(device, [rows]));
            device.layer_norm(
                x.view(),
                (gamma.view(), Some(beta.view())),
                1e-5,
                y.view_mut(),
                (centred.then(|| mean.view_mut()), rstd.view_mut()),
            );
            let mean = if centred { read(device, &mean) } else { vec![0.0; rows] };
            vec![read_f32(device, &y), mean, read(device, &rstd)]
        };
        let eps = f64::from(1e-5f32);
        let [y, mean, rstd] = reference(centred, &wide(&x), &wide(&gamma), &wide(&beta), eps);
        // Values are at most 1, so the mean's error is roundings * EPS * 1, and rstd enlarges it.
        let largest = rstd.iter().fold(1.0, |a: f64, r| a.max(*r));
        let n = roundings(hidden);
        let one =
            |value: Vec<f64>, size: f64| Expected { magnitude: vec![size; value.len()], value, roundings: n };
        check_as(
            &format!("layer_norm {rows} x {hidden}, centred {centred}"),
            kernel,
            &[one(y, 2.0 * largest), one(mean, 1.0), Expected::relative(rstd, 2.0 * n)],
            &[dtype, DType::F32, DType::F32],
        );
    }
}

/// The types of activations and of parameter gradients.
fn types() -> impl Iterator<Item = [DType; 2]> {
    FLOATS.into_iter().flat_map(|dtype| gradient_types(dtype).into_iter().map(move |g| [dtype, g]))
}

#[test]
fn backward_against_differences() {
    for ([rows, hidden], [dtype, stored]) in [[1, 5], [1, 17], [3, 67], [40, 5], [2, 131]]
        .into_iter()
        .flat_map(|shape| types().map(move |types| (shape, types)))
    {
        for (accumulate, centred) in [(false, true), (true, true), (false, false), (true, false)] {
            let [x, gamma, beta] = inputs(dtype, [rows, hidden]);
            let dy = rounded(dtype, &numbers(4, rows * hidden));
            let before = numbers(5, rows * hidden);
            let eps = 1e-5f32;
            let kernel = |device: &Device| {
                let inputs = [&x, &gamma, &beta, &dy, &before].map(|x| &x[..]);
                backward(device, [dtype, stored], [rows, hidden], inputs, (eps, centred), accumulate)
            };
            let (x64, g64, b64) = (wide(&x), wide(&gamma), wide(&beta));
            let eps = f64::from(eps);
            let add = |d: Vec<f64>, stored: DType| -> Vec<f64> {
                let before = wide(&rounded(stored, &before));
                d.iter().zip(&before).map(|(d, b)| if accumulate { d + b } else { *d }).collect()
            };
            let dx =
                add(gradient(&x64, |x| weighted(&reference(centred, x, &g64, &b64, eps)[0], &dy)), dtype);
            let dgamma =
                add(gradient(&g64, |g| weighted(&reference(centred, &x64, g, &b64, eps)[0], &dy)), stored);
            let dbeta =
                add(gradient(&b64, |b| weighted(&reference(centred, &x64, &g64, b, eps)[0], &dy)), stored);
            // The forward's roundings enter through mean and rstd, twice, and the rows are summed; rows of
            // two near-equal numbers enlarge them by rstd (at most about 100 with these numbers).
            let n = (4.0 * roundings(hidden) + rows as f64) * 8.0;
            let expected = [dx, dgamma, dbeta].map(|d| Expected::by_largest(d, n));
            check_as(
                &format!("layer_norm backward {rows} x {hidden}, accumulate {accumulate}, centred {centred}"),
                kernel,
                &expected,
                &[dtype, stored, stored],
            );
        }
    }
}

/// dx, dgamma, dbeta of a forward and a backward.
fn backward(
    device: &Device,
    [dtype, stored]: [DType; 2],
    [rows, hidden]: [usize; 2],
    [x, gamma, beta, dy, before]: [&[f32]; 5],
    (eps, centred): (f32, bool),
    accumulate: bool,
) -> Vec<Vec<f32>> {
    let x = tensor_as(device, dtype, [rows, hidden], x);
    let [gamma, beta] = [gamma, beta].map(|p| tensor_as(device, dtype, [hidden], p));
    let mut y = poisoned_as(device, dtype, [rows, hidden]);
    let (mut mean, mut rstd) = (poisoned(device, [rows]), poisoned(device, [rows]));
    device.layer_norm(
        x.view(),
        (gamma.view(), Some(beta.view())),
        eps,
        y.view_mut(),
        (centred.then(|| mean.view_mut()), rstd.view_mut()),
    );
    let dy = tensor_as(device, dtype, [rows, hidden], dy);
    let mut dx = output_as(device, dtype, [rows, hidden], before, accumulate);
    let mut dgamma = output_as(device, stored, [hidden], &before[..hidden], accumulate);
    let mut dbeta = output_as(device, stored, [hidden], &before[..hidden], accumulate);
    device.run(LayerNormBackward {
        x: x.view(),
        gamma: gamma.view(),
        norm: 1e-5.into(),
        products: None,
        mean: centred.then(|| mean.view()),
        rstd: rstd.view(),
        dy: dy.view(),
        dx: dx.view_mut(),
        accumulate_input: accumulate,
        gradients: [dgamma.view_mut(), dbeta.view_mut()].map(Some),
        accumulate_parameters: accumulate,
    });
    vec![read_f32(device, &dx), read_f32(device, &dgamma), read_f32(device, &dbeta)]
}

/// Many rows are too slow for finite differences, so they are compared with the formula in f64.
#[test]
fn backward_of_many_rows() {
    let shapes = SHAPES.into_iter().filter(|[_, hidden]| *hidden > 2);
    let cases = shapes.flat_map(|shape| types().map(move |types| (shape, types)));
    for ([rows, hidden], [dtype, stored], centred) in cases.flat_map(|(s, t)| [(s, t, true), (s, t, false)]) {
        let [x, gamma, beta] = inputs(dtype, [rows, hidden]);
        let dy = rounded(dtype, &numbers(4, rows * hidden));
        let before = numbers(5, rows * hidden);
        let kernel = |device: &Device| {
            let inputs = [&x, &gamma, &beta, &dy, &before].map(|x| &x[..]);
            backward(device, [dtype, stored], [rows, hidden], inputs, (1e-5, centred), false)
        };
        let [_, mean, rstd] = reference(centred, &wide(&x), &wide(&gamma), &wide(&beta), f64::from(1e-5f32));
        let (mut dx, mut dgamma, mut dbeta) = (Vec::new(), vec![0.0; hidden], vec![0.0; hidden]);
        for row in 0..rows {
            let at = row * hidden..(row + 1) * hidden;
            let n: Vec<f64> = x[at.clone()].iter().map(|x| (f64::from(*x) - mean[row]) * rstd[row]).collect();
            let dy = wide(&dy[at]);
            let d: Vec<f64> = dy.iter().zip(&gamma).map(|(d, g)| d * f64::from(*g)).collect();
            let average = if centred { d.iter().sum::<f64>() / hidden as f64 } else { 0.0 };
            let average_n = d.iter().zip(&n).map(|(d, n)| d * n).sum::<f64>() / hidden as f64;
            for i in 0..hidden {
                dx.push(rstd[row] * (d[i] - average - n[i] * average_n));
                dgamma[i] += dy[i] * n[i];
                dbeta[i] += dy[i];
            }
        }
        let n = 4.0 * roundings(hidden) + rows as f64;
        let expected = [dx, dgamma, dbeta].map(|d| Expected::by_largest(d, n));
        check_as(
            &format!("layer_norm backward {rows} x {hidden}, centred {centred}"),
            kernel,
            &expected,
            &[dtype, stored, stored],
        );
    }
}

/// y, rstd, dx and dgamma of RMS norm of vectors of `hidden` elements in rows of `columns`; what is no vector stays.
fn of_vectors(
    device: &Device,
    dtype: DType,
    [rows, columns, hidden]: [usize; 3],
    norm: RowNorm,
    [x, gamma, dy]: [&[f32]; 3],
) -> Vec<Vec<f32>> {
    let [x, dy] = [x, dy].map(|x| tensor_as(device, dtype, [rows, columns], x));
    let gamma = tensor_as(device, dtype, [hidden], gamma);
    let [mut y, mut dx] =
        [0, 1].map(|_| tensor_as(device, dtype, [rows, columns], &vec![0.5; rows * columns]));
    let (mut rstd, mut dgamma) = (poisoned(device, [rows, norm.count]), poisoned(device, [hidden]));
    device.layer_norm(x.view(), (gamma.view(), None), norm, y.view_mut(), (None, rstd.view_mut()));
    device.run(LayerNormBackward {
        x: x.view(),
        gamma: gamma.view(),
        norm,
        products: None,
        mean: None,
        rstd: rstd.view(),
        dy: dy.view(),
        dx: dx.view_mut(),
        accumulate_input: false,
        gradients: [Some(dgamma.view_mut()), None],
        accumulate_parameters: false,
    });
    vec![read_f32(device, &y), read(device, &rstd), read_f32(device, &dx), read(device, &dgamma)]
}

/// Heads among other columns have the bits of the same vectors as rows of their own, but for the sums of dgamma over them; weights that
/// are counted from 1, those of their sums with 1.
#[test]
fn vectors_among_other_columns_and_weights_counted_from_one() {
    let shapes = [[5, 3, 2, 8, 24], [70, 16, 3, 64, 300]];
    let cases = FLOATS.into_iter().flat_map(|dtype| shapes.map(|shape| (dtype, shape)));
    for ((dtype, [rows, first, count, hidden, columns]), path) in
        cases.flat_map(|case| KernelPath::all().map(move |path| (case, path)))
    {
        let [x, dy] = [1, 4].map(|seed| rounded(dtype, &numbers(seed, rows * columns)));
        // Multiples of 1/64: with 1 they are exact in every type.
        let gamma: Vec<f32> = numbers(2, hidden).iter().map(|g| (g * 64.0).round() / 64.0).collect();
        let from_one: Vec<f32> = gamma.iter().map(|g| g - 1.0).collect();
        let vectors = |x: &[f32]| -> Vec<f32> {
            x.chunks(columns).flat_map(|row| row[first..first + count * hidden].to_vec()).collect()
        };
        let device = path.cpu(2);
        let heads = RowNorm { first, count, by_heads: true, ..1e-5.into() };
        let offset = RowNorm { offset: 1.0, ..heads };
        let shape = [rows, columns, hidden];
        let among = of_vectors(&device, dtype, shape, heads, [&x, &gamma, &dy]);
        assert!(among == of_vectors(&device, dtype, shape, offset, [&x, &from_one, &dy]), "{dtype:?}");
        let [own_x, own_dy] = [&x, &dy].map(|x| vectors(x));
        let alone = of_vectors(
            &device,
            dtype,
            [rows * count, hidden, hidden],
            1e-5.into(),
            [&own_x, &gamma, &own_dy],
        );
        for index in [0, 2] {
            assert!(vectors(&among[index]) == alone[index], "{dtype:?}");
            let others = among[index]
                .chunks(columns)
                .flat_map(|row| [&row[..first], &row[first + count * hidden..]].concat());
            assert!(others.into_iter().all(|x| x == 0.5), "{dtype:?}");
        }
        assert!(among[1] == alone[1], "{dtype:?}");
        let far = among[3].iter().zip(&alone[3]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // Sums of the same terms in another order: rows * count additions, of numbers of up to about 4.
        assert!(far <= 4.0 * (rows * count) as f32 * f32::EPSILON, "{dtype:?}: {far}");
    }
}

/// Halves of a row on two ranks, whose sums are added, are the parts of the whole.
#[test]
fn parts_of_a_row_with_the_sums_of_both() {
    let (rows, hidden) = (7, 96);
    let [x, dy] = [1, 4].map(|seed| numbers(seed, rows * hidden));
    let gamma = numbers(2, hidden);
    let device = KernelPath::all().next().unwrap().cpu(2);
    let whole = of_vectors(&device, DType::F32, [rows, hidden, hidden], 1e-5.into(), [&x, &gamma, &dy]);
    let half = hidden / 2;
    let halves = [0, half].map(|start| {
        let cut = |x: &[f32]| -> Vec<f32> {
            x.chunks(hidden).flat_map(|row| row[start..start + half].to_vec()).collect()
        };
        let [x, dy] = [&x, &dy].map(|x| tensor_as(&device, DType::F32, [rows, half], &cut(x)));
        (x, dy, tensor_as(&device, DType::F32, [half], &gamma[start..start + half]))
    });
    let norm = RowNorm::from(1e-5);
    let sums = |backward: bool| -> Tensor {
        let mut all = tensor_as(&device, DType::F32, [rows], &vec![0.0; rows]);
        for (x, dy, gamma) in &halves {
            let mut sums = poisoned(&device, [rows]);
            let dy = backward.then(|| dy.view());
            device.run(NormSums { x: x.view(), gamma: gamma.view(), norm, dy, sums: sums.view_mut() });
            device.add(sums.view(), all.view_mut());
        }
        all
    };
    let (squares, products) = (sums(false), sums(true));
    let [squares, products] =
        [&squares, &products].map(|sums| WholeSums { sums: sums.view(), elements: hidden });
    for ((x, dy, gamma), start) in halves.iter().zip([0, half]) {
        let [mut y, mut dx] = [0, 1].map(|_| poisoned(&device, [rows, half]));
        let (mut rstd, mut dgamma) = (poisoned(&device, [rows]), poisoned(&device, [half]));
        device.run(LayerNorm {
            x: x.view(),
            gamma: gamma.view(),
            beta: None,
            norm,
            squares: Some(squares),
            y: y.view_mut(),
            mean: None,
            rstd: rstd.view_mut(),
        });
        device.run(LayerNormBackward {
            x: x.view(),
            gamma: gamma.view(),
            norm,
            products: Some(products),
            mean: None,
            rstd: rstd.view(),
            dy: dy.view(),
            dx: dx.view_mut(),
            accumulate_input: false,
            gradients: [Some(dgamma.view_mut()), None],
            accumulate_parameters: false,
        });
        for (index, part) in [(0, &y), (2, &dx)] {
            for (row, own) in read(&device, part).chunks(half).enumerate() {
                for (a, b) in own.iter().zip(&whole[index][row * hidden + start..]) {
                    // The sum of squares has other roundings, and dx the differences of numbers of up to about 8.
                    assert!((a - b).abs() <= 64.0 * f32::EPSILON * b.abs().max(1.0), "{a} for {b}");
                }
            }
        }
        for (a, b) in read(&device, &dgamma).iter().zip(&whole[3][start..]) {
            assert!((a - b).abs() <= 64.0 * f32::EPSILON * b.abs().max(1.0), "{a} for {b}");
        }
    }
}
