//! Token and position embedding.

use phalanx_tensor::Device;

use crate::oracle::{
    Expected, FLOATS, check_as, gradient_types, indices, numbers, output_as, poisoned, poisoned_as, read_f32,
    rounded, tensor, tensor_as, tokens, wide,
};

/// (batch, seq, hidden, vocab, positions).
const SHAPES: [[usize; 5]; 8] = [
    [1, 1, 1, 1, 1],
    [2, 3, 17, 5, 3],
    [3, 17, 67, 11, 20],
    [2, 67, 257, 257, 67],
    [4, 33, 64, 3, 64],
    [1, 300, 130, 1000, 512],
    [2, 40, 1100, 7, 50],
    [3, 200, 33, 1, 200],
];

#[test]
fn forward() {
    for (dtype, [batch, seq, hidden, vocab, places]) in
        FLOATS.into_iter().flat_map(|d| SHAPES.map(|s| (d, s)))
    {
        let ids = indices(1, batch * seq, vocab);
        let table = rounded(dtype, &numbers(2, vocab * hidden));
        let positions = rounded(dtype, &numbers(3, places * hidden));
        let kernel = |device: &Device| {
            let ids = tokens(device, [batch, seq], &ids);
            let table = tensor_as(device, dtype, [vocab, hidden], &table);
            let positions = tensor_as(device, dtype, [places, hidden], &positions);
            let mut y = poisoned_as(device, dtype, [batch, seq, hidden]);
            device.embedding(ids.view(), table.view(), positions.view(), y.view_mut());
            vec![read_f32(device, &y)]
        };
        let mut y = Vec::new();
        for (t, id) in ids.iter().enumerate() {
            y.extend((0..hidden).map(|i| {
                f64::from(table[*id as usize * hidden + i]) + f64::from(positions[t % seq * hidden + i])
            }));
        }
        check_as("embedding", kernel, &[Expected::relative(y, 1.0)], &[dtype]);
    }
}

#[test]
fn backward() {
    let types = FLOATS.into_iter().flat_map(|d| gradient_types(d).into_iter().map(move |g| (d, g)));
    for ((dtype, stored), shape) in types.flat_map(|types| SHAPES.map(|shape| (types, shape))) {
        let [batch, seq, hidden, vocab, places] = shape;
        for accumulate in [[false, false], [true, false], [false, true], [true, true]] {
            let ids = indices(1, batch * seq, vocab);
            let dy = rounded(dtype, &numbers(2, batch * seq * hidden));
            let before =
                [numbers(3, vocab * hidden), numbers(4, places * hidden)].map(|x| rounded(stored, &x));
            let kernel = |device: &Device| {
                let ids = tokens(device, [batch, seq], &ids);
                let dy = tensor_as(device, dtype, [batch, seq, hidden], &dy);
                let mut dtable = output_as(device, stored, [vocab, hidden], &before[0], accumulate[0]);
                let mut dpositions = output_as(device, stored, [places, hidden], &before[1], accumulate[1]);
                device.embedding_backward(
                    ids.view(),
                    dy.view(),
                    dtable.view_mut(),
                    dpositions.view_mut(),
                    accumulate,
                );
                vec![read_f32(device, &dtable), read_f32(device, &dpositions)]
            };
            let mut sums =
                [0, 1].map(|k| if accumulate[k] { wide(&before[k]) } else { vec![0.0; before[k].len()] });
            let mut magnitudes = sums.clone().map(|x| x.iter().map(|x| x.abs()).collect::<Vec<_>>());
            for (t, id) in ids.iter().enumerate() {
                for i in 0..hidden {
                    let d = f64::from(dy[t * hidden + i]);
                    for (k, at) in [*id as usize * hidden + i, t % seq * hidden + i].into_iter().enumerate() {
                        sums[k][at] += d;
                        magnitudes[k][at] += d.abs();
                    }
                }
            }
            // At most batch * seq additions, in f32 whatever the type.
            let mut magnitudes = magnitudes.into_iter();
            let expected = sums.map(|value| Expected {
                magnitude: magnitudes.next().unwrap_or_default(),
                value,
                roundings: (batch * seq) as f64,
            });
            check_as(&format!("embedding backward {shape:?}"), kernel, &expected, &[stored; 2]);
        }
    }
}

#[test]
#[should_panic(expected = "token 7 in a table of 5 rows")]
fn a_token_out_of_range_is_named() {
    let device = crate::oracle::cpu(1, phalanx_tensor::cpu::simd::Isa::detect());
    let ids = tokens(&device, [1, 2], &[1, 7]);
    let (table, positions) = (tensor(&device, [5, 4], &[0.0; 20]), tensor(&device, [2, 4], &[0.0; 8]));
    let mut y = poisoned(&device, [1, 2, 4]);
    device.embedding(ids.view(), table.view(), positions.view(), y.view_mut());
}
