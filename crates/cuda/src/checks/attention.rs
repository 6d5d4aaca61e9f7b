//! Attention forward, over a cache, and backward: heads of several sizes and groups, both masks, windows, caps, dropout; rotary positions.

use phalanx_tensor::arguments::{Dropout, Heads};
use phalanx_tensor::{Category, DType, Device, Rotary, RotaryScaling, RowPositions, Tensor};

use super::bench::{Bench, FLOATS, Results, random, read, tolerance};

#[derive(Clone, Copy)]
struct Case {
    batch: usize,
    seq: usize,
    heads: Heads,
    /// Rows of a document, if a sequence has several.
    document: Option<usize>,
    dropout: bool,
}

/// Heads that fill a tile and that do not, rows that are whole chunks of 16 bytes and that are not, several tiles of keys;
/// groups of heads, alone and with windows and caps; documents, short ones and such as cover several tiles.
fn cases() -> [Case; 13] {
    let case = |batch, seq, heads: Heads, dropout| Case { batch, seq, heads, document: None, dropout };
    let equal = Heads::equal;
    let grouped = Heads { kv_heads: 2, ..equal(4, 16, true) };
    let all = Heads { kv_heads: 1, window: Some(33), scale: 0.2, soft_cap: Some(1.5), ..equal(2, 24, true) };
    [
        case(2, 5, equal(2, 8, true), false),
        case(1, 70, equal(2, 16, true), true),
        case(1, 67, equal(3, 5, false), true),
        case(1, 130, equal(1, 40, true), false),
        case(1, 40, equal(1, 72, false), false),
        case(1, 200, equal(1, 64, true), false),
        case(2, 70, grouped, true),
        case(1, 150, all, false),
        case(1, 150, Heads { causal: false, ..all }, true),
        Case { document: Some(7), ..case(2, 70, grouped, true) },
        Case { document: Some(83), ..case(2, 200, grouped, false) },
        Case { document: Some(7), ..case(2, 70, equal(2, 16, false), true) },
        Case { document: Some(83), ..case(2, 200, equal(2, 24, false), false) },
    ]
}

/// Positions of rows in documents of `rows` rows each. Each sequence begins one row further in its first document.
fn positions(device: &Device, [batch, seq]: [usize; 2], rows: usize) -> Tensor {
    let position = |row: usize| ((row % seq + row / seq) % rows) as u32;
    let of_rows: Vec<u32> = (0..batch * seq).map(position).collect();
    let mut positions = device.alloc(DType::U32, [batch, seq], Category::Workspace, "positions");
    device.upload(&of_rows, positions.view_mut());
    positions
}

fn run(device: &Device, dtype: DType, case: &Case) -> Results {
    let Case { batch, seq, heads, document, dropout } = *case;
    let (width, hidden) = (heads.qkv_width(), heads.out_width());
    let sample = (heads.heads * seq * seq) as u64;
    let dropout = dropout.then_some(Dropout { p: 0.2, key: 11, first: 3, sample });
    let qkv = random(device, dtype, &[batch, seq, width], 1);
    let mut out = random(device, dtype, &[batch, seq, hidden], 2);
    let mut lse = device.alloc(DType::F32, [batch, heads.heads, seq], Category::Workspace, "lse");
    let positions = document.map(|rows| positions(device, [batch, seq], rows));
    let positions = positions.as_ref().map(|positions| positions.view());
    device.attention(qkv.view(), heads, positions, dropout, out.view_mut(), lse.view_mut());
    let dout = random(device, dtype, &[batch, seq, hidden], 3);
    let mut dqkv = random(device, dtype, &[batch, seq, width], 4);
    let saved = [out.view(), lse.view(), dout.view()];
    device.attention_backward(qkv.view(), saved, heads, positions, dropout, dqkv.view_mut());
    let all = [("out", &out), ("lse", &lse), ("dqkv", &dqkv)];
    all.map(|(name, x)| (name, read(device, x.view()))).into()
}

pub(super) fn attention_and_its_gradient(bench: &Bench) {
    for dtype in FLOATS {
        for case in &cases() {
            let Case { seq, heads, .. } = case;
            // Sums of probabilities that are rounded to the type, through two products.
            let tolerance = if dtype == DType::F32 { 2e-5 } else { 2.0 * tolerance(dtype) };
            bench.compare(&format!("{dtype:?}, {seq} positions, {heads:?}"), tolerance, |device| {
                run(device, dtype, case)
            });
        }
    }
}

pub(super) fn rotary_positions_have_the_processors_bits(bench: &Bench) {
    // Heads that turn whole and in part, in chunks of 16 bytes and not; columns behind them; positions far out.
    for (dtype, [seq, heads, head_dim, rotated, behind, first]) in FLOATS.into_iter().flat_map(|d| {
        [[5, 3, 6, 6, 3, 0], [3, 2, 64, 32, 64, 1000], [2, 5, 256, 256, 0, 131_071]].map(|case| (d, case))
    }) {
        let turned = Rotary::new(head_dim, rotated, 1e4, RotaryScaling::Default);
        let rotary = Rotary::of(head_dim, 1.2, turned.frequencies());
        bench.compare(&format!("{dtype:?}, {heads} heads of {head_dim}, {rotated} turn"), 0.0, |device| {
            let dims = [2, seq, heads * head_dim + behind];
            let [mut x, mut dx] = [1, 2].map(|seed| random(device, dtype, &dims, seed));
            let each = positions(device, [2, seq], 2);
            let counted = RowPositions::From(first);
            let kinds = if first == 0 { [counted, RowPositions::Each(each.view())] } else { [counted; 2] };
            device.rotary(x.view_mut(), &rotary, heads, kinds[0]);
            device.rotary_backward(dx.view_mut(), &rotary, heads, kinds[1]);
            vec![("x", read(device, x.view())), ("dx", read(device, dx.view()))]
        });
    }
}

pub(super) fn cached_attention_has_the_bits_of_the_whole_sequence(bench: &Bench) {
    let equal = Heads::equal(2, 8, true);
    for heads in [equal, Heads { kv_heads: 1, window: Some(20), soft_cap: Some(2.0), ..equal }] {
        cached_attention(bench, heads);
    }
}

fn cached_attention(bench: &Bench, heads: Heads) {
    let (seq, width, hidden) = (70, heads.qkv_width(), heads.out_width());
    for dtype in FLOATS {
        let device = bench.card();
        let qkv = random(device, dtype, &[1, seq, width], 1);
        let mut whole = random(device, dtype, &[1, seq, hidden], 2);
        let mut lse = device.alloc(DType::F32, [1, heads.heads, seq], Category::Workspace, "lse");
        device.attention(qkv.view(), heads, None, None, whole.view_mut(), lse.view_mut());
        let mut cache = random(device, dtype, &[1, seq + 3, heads.cache_width()], 3);
        let mut cached = random(device, dtype, &[1, seq, hidden], 4);
        let first = 60;
        for rows in std::iter::once(0..first).chain((first..seq).map(|row| row..row + 1)) {
            let new = rows.len();
            let part = qkv.view().range(rows.start * width..rows.end * width);
            let out = cached.view_mut().range(rows.start * hidden..rows.end * hidden);
            device.attention_cached(
                part.reshape([1, new, width]),
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
        bench.check(
            &format!("over a cache, {dtype:?}, {heads:?}"),
            0.0,
            vec![("out", whole)],
            vec![("out", cached)],
        );
        bench.check(
            &format!("of the last row, {dtype:?}, {heads:?}"),
            0.0,
            vec![("out", expected)],
            vec![("out", last)],
        );
    }
}
