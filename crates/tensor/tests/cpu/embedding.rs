//! Token and position embedding.

use phalanx_tensor::Device;

use crate::oracle::{Expected, check, indices, numbers, output, poisoned, read, tensor, tokens, wide};

/// (batch, seq, hidden, vocab, positions).
const SHAPES: [[usize; 5]; 6] = [
    [1, 1, 1, 1, 1],
    [2, 3, 17, 5, 3],
    [3, 17, 67, 11, 20],
    [2, 67, 257, 257, 67],
    [4, 33, 64, 3, 64],
    [1, 300, 130, 1000, 512],
];

#[test]
fn forward() {
    for [batch, seq, hidden, vocab, places] in SHAPES {
        let ids = indices(1, batch * seq, vocab);
        let (table, positions) = (numbers(2, vocab * hidden), numbers(3, places * hidden));
        let kernel = |device: &Device| {
            let ids = tokens(device, [batch, seq], &ids);
            let (table, positions) =
                (tensor(device, [vocab, hidden], &table), tensor(device, [places, hidden], &positions));
            let mut y = poisoned(device, [batch, seq, hidden]);
            device.embedding(ids.view(), table.view(), positions.view(), y.view_mut());
            vec![read(device, &y)]
        };
        let mut y = Vec::new();
        for (t, id) in ids.iter().enumerate() {
            y.extend((0..hidden).map(|i| {
                f64::from(table[*id as usize * hidden + i]) + f64::from(positions[t % seq * hidden + i])
            }));
        }
        check("embedding", kernel, &[Expected::relative(y, 1.0)]);
    }
}

#[test]
fn backward() {
    for [batch, seq, hidden, vocab, places] in SHAPES {
        for accumulate in [[false, false], [true, false], [false, true], [true, true]] {
            let ids = indices(1, batch * seq, vocab);
            let dy = numbers(2, batch * seq * hidden);
            let before = [numbers(3, vocab * hidden), numbers(4, places * hidden)];
            let kernel = |device: &Device| {
                let ids = tokens(device, [batch, seq], &ids);
                let dy = tensor(device, [batch, seq, hidden], &dy);
                let mut dtable = output(device, [vocab, hidden], &before[0], accumulate[0]);
                let mut dpositions = output(device, [places, hidden], &before[1], accumulate[1]);
                device.embedding_backward(
                    ids.view(),
                    dy.view(),
                    dtable.view_mut(),
                    dpositions.view_mut(),
                    accumulate,
                );
                vec![read(device, &dtable), read(device, &dpositions)]
            };
            let mut sums =
                [0, 1].map(|k| if accumulate[k] { wide(&before[k]) } else { vec![0.0; before[k].len()] });
            for (t, id) in ids.iter().enumerate() {
                for i in 0..hidden {
                    let d = f64::from(dy[t * hidden + i]);
                    sums[0][*id as usize * hidden + i] += d;
                    sums[1][t % seq * hidden + i] += d;
                }
            }
            // At most batch * seq additions of numbers up to 1.
            let expected = sums.map(|value| Expected {
                magnitude: vec![(batch * seq) as f64; value.len()],
                value,
                roundings: (batch * seq) as f64,
            });
            check("embedding backward", kernel, &expected);
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
