//! Norms of weights with what an adapter adds, and columns over them.

use phalanx_tensor::{DType, Device, Layout, Rescale, RescaleGradient, Weight};

use crate::oracle::{
    Expected, FLOATS, check_as, gradient_types, numbers, output_as, poisoned, read, read_f32, rounded,
    tensor, tensor_as, transposed,
};

#[test]
fn norms_of_weights() {
    // Inputs, outputs, rank: less than a vector, whole ones, and beyond the groups that kernels compute together.
    for [inputs, outputs, rank] in [[1, 1, 1], [7, 5, 2], [64, 16, 3], [97, 35, 8], [300, 70, 33]] {
        for (dtype, layout) in FLOATS.into_iter().flat_map(|t| [(t, Layout::OutIn), (t, Layout::InOut)]) {
            let [w, a, b] = [(1, outputs * inputs), (2, rank * inputs), (3, outputs * rank)]
                .map(|(seed, count)| rounded(dtype, &numbers(seed, count)));
            let kernel = |device: &Device| {
                let matrix = match layout {
                    Layout::OutIn => tensor_as(device, dtype, [outputs, inputs], &w),
                    Layout::InOut => {
                        tensor_as(device, dtype, [inputs, outputs], &transposed([outputs, inputs], &w))
                    }
                };
                let a = tensor_as(device, dtype, [rank, inputs], &a);
                let b = tensor_as(device, dtype, [outputs, rank], &b);
                let mut squares = poisoned(device, [outputs]);
                let w = Weight { matrix: matrix.view(), layout };
                device.weight_squares(w, [a.view(), b.view()], 0.5, squares.view_mut());
                vec![read(device, &squares)]
            };
            let (mut value, mut magnitude) = (vec![0.0; outputs], vec![0.0; outputs]);
            for (at, w) in w.iter().enumerate() {
                let (o, i) = (at / inputs, at % inputs);
                let terms =
                    (0..rank).map(|k| 0.5 * f64::from(b[o * rank + k]) * f64::from(a[k * inputs + i]));
                let (mut sum, mut size) = (f64::from(*w), f64::from(w.abs()));
                terms.for_each(|term| (sum, size) = (sum + term, size + term.abs()));
                value[o] += sum * sum;
                magnitude[o] += size * size;
            }
            // Twice those of a weight's sum, for its square, and those of the sum of squares.
            let expected = Expected { value, magnitude, roundings: (4 * rank + inputs + 16) as f64 };
            let what = format!("{inputs} x {outputs}, rank {rank}, {dtype:?}, {layout:?}");
            check_as(&what, kernel, &[expected], &[DType::F32]);
        }
    }
}

#[test]
fn columns_over_norms_and_the_gradient() {
    for [rows, first, n, columns] in [[1, 0, 1, 1], [5, 3, 17, 40], [130, 16, 300, 333]] {
        let types =
            FLOATS.into_iter().flat_map(|dtype| gradient_types(dtype).into_iter().map(move |g| [dtype, g]));
        for ([dtype, gradient], biased, accumulate) in
            types.flat_map(|t| [(t, false, true), (t, true, false)])
        {
            let [x, dy] = [1, 2].map(|seed| rounded(dtype, &numbers(seed, rows * columns)));
            let [m, bias] = [3, 4].map(|seed| rounded(dtype, &numbers(seed, n)));
            let mut squares: Vec<f32> = numbers(5, n).iter().map(|x| x * x + 0.1).collect();
            squares[0] = 0.0;
            let before = rounded(gradient, &numbers(6, n));
            let kernel = |device: &Device| {
                let [x, dy] = [&x, &dy].map(|x| tensor_as(device, dtype, [rows, columns], x));
                let [m, bias] = [&m, &bias].map(|x| tensor_as(device, dtype, [n], x));
                let squares = tensor(device, [n], &squares);
                let (x, squares, bias) = (x.view(), squares.view(), biased.then(|| bias.view()));
                // What is outside of the columns stays.
                let mut y = tensor_as(device, dtype, [rows, columns], &vec![7.0; rows * columns]);
                device.run(Rescale { x, first, magnitudes: m.view(), squares, bias, y: y.view_mut() });
                let mut dm = output_as(device, gradient, [n], &before, accumulate);
                let (dy, to) = (dy.view(), dm.view_mut());
                device.run(RescaleGradient { x, first, squares, bias, dy, dm: to, accumulate });
                vec![read_f32(device, &y), read_f32(device, &dm)]
            };
            let norm = |j: usize| f64::from(squares[j]).sqrt();
            let over = |number: f64, j: usize| if squares[j] > 0.0 { number / norm(j) } else { 0.0 };
            let shift = |j: usize| if biased { f64::from(bias[j]) } else { 0.0 };
            let mut y = Expected::by_largest(vec![7.0; rows * columns], 6.0);
            let mut sums: Vec<[f64; 2]> = before.iter().map(|x| [f64::from(*x); 2]).collect();
            if !accumulate {
                sums.fill([0.0; 2]);
            }
            for row in 0..rows {
                for j in 0..n {
                    let at = row * columns + first + j;
                    let apart = f64::from(x[at]) - shift(j);
                    y.value[at] = over(apart * f64::from(m[j]), j) + shift(j);
                    y.magnitude[at] =
                        over((f64::from(x[at].abs()) + shift(j).abs()) * f64::from(m[j].abs()), j)
                            + shift(j).abs();
                    let size = f64::from(x[at].abs()) + shift(j).abs();
                    sums[j][0] += over(f64::from(dy[at]) * apart, j);
                    sums[j][1] = sums[j][1].abs() + over(f64::from(dy[at].abs()) * size, j);
                }
            }
            let dm = Expected {
                value: sums.iter().map(|[sum, _]| *sum).collect(),
                magnitude: sums.iter().map(|[_, size]| size.abs()).collect(),
                roundings: rows as f64 + 8.0,
            };
            let what = format!("{rows} x {n} from {first} of {columns}, {dtype:?}, bias {biased}");
            check_as(&what, kernel, &[y, dm], &[dtype, gradient]);
        }
    }
}
