//! Attention forward, over a cache, and backward: heads of several sizes, both masks, dropout.

use phalanx_tensor::arguments::{Dropout, Heads};
use phalanx_tensor::{Category, DType, Device};

use super::bench::{Bench, FLOATS, Results, random, read, tolerance};

struct Case {
    batch: usize,
    seq: usize,
    heads: usize,
    size: usize,
    causal: bool,
    dropout: bool,
}

/// Heads that fill a tile and that do not, rows that are whole chunks of 16 bytes and that are not, several tiles of keys.
const CASES: [Case; 6] = [
    Case { batch: 2, seq: 5, heads: 2, size: 8, causal: true, dropout: false },
    Case { batch: 1, seq: 70, heads: 2, size: 16, causal: true, dropout: true },
    Case { batch: 1, seq: 67, heads: 3, size: 5, causal: false, dropout: true },
    Case { batch: 1, seq: 130, heads: 1, size: 40, causal: true, dropout: false },
    Case { batch: 1, seq: 40, heads: 1, size: 72, causal: false, dropout: false },
    Case { batch: 1, seq: 200, heads: 1, size: 64, causal: true, dropout: false },
];

fn run(device: &Device, dtype: DType, case: &Case) -> Results {
    let Case { batch, seq, heads, size, causal, dropout } = *case;
    let hidden = heads * size;
    let dropout =
        dropout.then_some(Dropout { p: 0.2, key: 11, first: 3, sample: (heads * seq * seq) as u64 });
    let heads = Heads { heads, causal };
    let qkv = random(device, dtype, &[batch, seq, 3 * hidden], 1);
    let mut out = random(device, dtype, &[batch, seq, hidden], 2);
    let mut lse = device.alloc(DType::F32, [batch, heads.heads, seq], Category::Workspace, "lse");
    device.attention(qkv.view(), heads, dropout, out.view_mut(), lse.view_mut());
    let dout = random(device, dtype, &[batch, seq, hidden], 3);
    let mut dqkv = random(device, dtype, &[batch, seq, 3 * hidden], 4);
    let saved = [out.view(), lse.view(), dout.view()];
    device.attention_backward(qkv.view(), saved, heads, dropout, dqkv.view_mut());
    let all = [("out", &out), ("lse", &lse), ("dqkv", &dqkv)];
    all.map(|(name, x)| (name, read(device, x.view()))).into()
}

pub(super) fn attention_and_its_gradient(bench: &Bench) {
    for dtype in FLOATS {
        for case in &CASES {
            let Case { seq, size, causal, .. } = case;
            // Sums of probabilities that are rounded to the type, through two products.
            let tolerance = if dtype == DType::F32 { 2e-5 } else { 2.0 * tolerance(dtype) };
            bench.compare(
                &format!("{dtype:?}, {seq} positions, size {size}, causal {causal}"),
                tolerance,
                |device| run(device, dtype, case),
            );
        }
    }
}

pub(super) fn cached_attention_has_the_bits_of_the_whole_sequence(bench: &Bench) {
    let (seq, heads, size) = (70, 2, 8);
    let hidden = heads * size;
    let heads = Heads { heads, causal: true };
    for dtype in FLOATS {
        let device = bench.card();
        let qkv = random(device, dtype, &[1, seq, 3 * hidden], 1);
        let mut whole = random(device, dtype, &[1, seq, hidden], 2);
        let mut lse = device.alloc(DType::F32, [1, heads.heads, seq], Category::Workspace, "lse");
        device.attention(qkv.view(), heads, None, whole.view_mut(), lse.view_mut());
        let mut cache = random(device, dtype, &[1, seq + 3, 2 * hidden], 3);
        let mut cached = random(device, dtype, &[1, seq, hidden], 4);
        let first = 60;
        for rows in std::iter::once(0..first).chain((first..seq).map(|row| row..row + 1)) {
            let new = rows.len();
            let part = qkv.view().range(rows.start * 3 * hidden..rows.end * 3 * hidden);
            let out = cached.view_mut().range(rows.start * hidden..rows.end * hidden);
            device.attention_cached(
                part.reshape([1, new, 3 * hidden]),
                heads,
                rows.start,
                cache.view_mut(),
                out.reshape([1, new, hidden]),
            );
        }
        let mut last = random(device, dtype, &[1, 1, hidden], 5);
        device.attention_cached(qkv.view(), heads, 0, cache.view_mut(), last.view_mut());
        let expected = read(device, whole.view().range((seq - 1) * hidden..seq * hidden));
        let last = read(device, last.view());
        let [whole, cached] = [whole.view(), cached.view()].map(|view| read(device, view));
        bench.check(&format!("over a cache, {dtype:?}"), 0.0, vec![("out", whole)], vec![("out", cached)]);
        bench.check(
            &format!("of the last row, {dtype:?}"),
            0.0,
            vec![("out", expected)],
            vec![("out", last)],
        );
    }
}
