//! How placements pass through each operation, and what is said where they do not fit.
//!
//! Each rule is a table: how the operands are placed along one axis, and how the results then are, by the
//! algebra of sums over parts; or the words of the fault.

use phalanx_tensor::{
    AdamW, AdamWUpdate, Category, Clip, CrossEntropy, DType, Device, Dropout, Epilogue, Gelu, Heads,
    LayerNormBackward, Layout, Lookup, NORM_BLOCK, Positions, Tensor, VocabularyLoss, VocabularyStatistics,
    Weight,
};
use phalanx_trace::Placement::{self, Partial, Replicated, Shard};
use phalanx_trace::{Axis, Fault, PhaseName, Placements};

const AXIS: Axis = Axis::Tensor;

/// A device on which the axis is checked.
fn device() -> Device {
    let device = Device::meta(1);
    let x = tensor(&device, "marked", &[2]);
    device.place(x.view(), along(Shard(0)));
    device
}

fn along(placement: Placement) -> Placements {
    Placements::REPLICATED.with(AXIS, placement)
}

fn tensor(device: &Device, name: &'static str, shape: &[usize]) -> Tensor {
    device.alloc(DType::F32, shape, Category::Activations, name)
}

/// A tensor that is placed along the axis.
fn placed(device: &Device, name: &'static str, shape: &[usize], placement: Placement) -> Tensor {
    let x = tensor(device, name, shape);
    device.place(x.view(), along(placement));
    x
}

/// Tokens or targets that are placed along the axis.
fn ids(device: &Device, name: &'static str, shape: &[usize], placement: Placement) -> Tensor {
    let ids = device.alloc(DType::U32, shape, Category::Activations, name);
    device.place(ids.view(), along(placement));
    ids
}

/// A sum of numbers that is zero.
fn zero_sum(device: &Device) -> Tensor {
    let mut sum = device.alloc(DType::F64, [1], Category::Workspace, "sum");
    device.fill(sum.view_mut(), 0.0);
    sum
}

fn of(device: &Device, x: &Tensor) -> Placement {
    device.placements(x.view()).get(AXIS)
}

fn faults(device: &Device) -> Vec<Fault> {
    device.take_trace(0).faults
}

/// No fault where `words` are empty, else one that has them.
#[track_caller]
fn found(device: &Device, words: &[&str], row: &str) {
    let faults = faults(device);
    assert_eq!(faults.len(), usize::from(!words.is_empty()), "{row}: {faults:?}");
    for word in words {
        let text = faults[0].to_string();
        assert!(text.contains(word), "{row}: {text} lacks {word}");
        assert!(text.contains("tests/placement.rs:") && faults[0].axis == AXIS, "{row}: {text}");
    }
}

/// x, w `[in, out]`, bias and residual (None: no such operand), then y, or the words of the fault.
type LinearRow = ([Placement; 2], [Option<Placement>; 2], Placement, &'static [&'static str]);

#[test]
fn linear() {
    let (none, replicated) = (None, Some(Replicated));
    let rows: [LinearRow; 16] = [
        ([Replicated, Replicated], [replicated, replicated], Replicated, &[]),
        // Column, row, and rows of the batch or of the sequence.
        ([Replicated, Shard(1)], [Some(Shard(0)), Some(Shard(2))], Shard(2), &[]),
        ([Shard(2), Shard(0)], [none, none], Partial, &[]),
        ([Shard(0), Replicated], [replicated, Some(Shard(0))], Shard(0), &[]),
        ([Shard(1), Replicated], [replicated, Some(Shard(1))], Shard(1), &[]),
        ([Shard(2), Shard(0)], [none, Some(Partial)], Partial, &[]),
        ([Partial, Replicated], [none, none], Replicated, &["`x` is a partial sum that linear reads as `x`"]),
        ([Shard(2), Replicated], [none, none], Partial, &["`w` is replicated", "shares with `w`"]),
        ([Replicated, Shard(0)], [none, none], Partial, &["`x` is replicated", "both sharded"]),
        ([Shard(1), Shard(1)], [none, none], Shard(1), &["`w` is sharded in dimension 1", "`x` of the same"]),
        (
            [Shard(2), Shard(0)],
            [replicated, none],
            Partial,
            &[
                "`bias` is replicated, but linear adds it as `bias` to what is a partial sum",
                "would add it once",
            ],
        ),
        (
            [Shard(2), Shard(0)],
            [none, replicated],
            Partial,
            &["`residual` is replicated", "reduce the sum over `tensor` first"],
        ),
        (
            [Replicated, Shard(1)],
            [replicated, none],
            Shard(2),
            &["`bias` is replicated", "cut over `tensor`"],
        ),
        ([Replicated, Shard(1)], [none, Some(Shard(0))], Shard(2), &["`residual` is sharded in dimension 0"]),
        ([Replicated, Replicated], [none, Some(Partial)], Replicated, &["all_reduce", "missing before"]),
        ([Shard(1), Replicated], [Some(Shard(0)), none], Shard(1), &["`bias` is sharded", "all_gather"]),
    ];
    for layout in [Layout::InOut, Layout::OutIn] {
        for ([x, w], [bias, residual], expected, words) in rows {
            let row = format!("{layout:?} x {x}, w {w}, bias {bias:?}, residual {residual:?}");
            let device = device();
            // The table is of [in, out].
            let w = match (layout, w) {
                (Layout::OutIn, Shard(d)) => Shard(1 - d),
                (_, w) => w,
            };
            let shape = if layout == Layout::InOut { [6, 8] } else { [8, 6] };
            let (x, w) = (placed(&device, "x", &[2, 4, 6], x), placed(&device, "w", &shape, w));
            let bias = bias.map(|p| placed(&device, "bias", &[8], p));
            let residual = residual.map(|p| placed(&device, "residual", &[2, 4, 8], p));
            let epilogue = Epilogue {
                bias: bias.as_ref().map(Tensor::view),
                residual: residual.as_ref().map(Tensor::view),
            };
            let mut y = tensor(&device, "y", &[2, 4, 8]);
            device.linear(x.view(), Weight { matrix: w.view(), layout }, epilogue, y.view_mut());
            assert_eq!(of(&device, &y), expected, "{row}");
            let words: Vec<String> = words.iter().map(|w| swapped(w, layout)).collect();
            found(&device, &words.iter().map(String::as_str).collect::<Vec<_>>(), &row);
        }
    }
}

/// The weight's dimension, as the other layout counts it.
fn swapped(words: &str, layout: Layout) -> String {
    match layout {
        Layout::OutIn => words.replace("`w` is sharded in dimension 1", "`w` is sharded in dimension 0"),
        Layout::InOut => words.to_string(),
    }
}

/// x, w, dy, and then dx, dw, db.
#[test]
fn linear_backward() {
    for (x, w, dy, dx, dw, db) in [
        (Replicated, Replicated, Replicated, Replicated, Replicated, Replicated),
        // Column: dx is to be reduced.
        (Replicated, Shard(1), Shard(2), Partial, Shard(1), Shard(0)),
        // Row.
        (Shard(2), Shard(0), Replicated, Shard(2), Shard(0), Replicated),
        // Rows of the batch, of the sequence.
        (Shard(0), Replicated, Shard(0), Shard(0), Partial, Partial),
        (Shard(1), Replicated, Shard(1), Shard(1), Partial, Partial),
    ] {
        let row = format!("x {x}, w {w}, dy {dy}");
        let device = device();
        let (x, w) = (placed(&device, "x", &[2, 4, 6], x), placed(&device, "w", &[6, 8], w));
        let dy = placed(&device, "dy", &[2, 4, 8], dy);
        let mut results = [&[2, 4, 6][..], &[6, 8], &[8]].map(|shape| tensor(&device, "result", shape));
        let [into_dx, into_dw, into_db] = &mut results;
        let weight = Weight { matrix: w.view(), layout: Layout::InOut };
        // The second micro-batch is added to the first.
        for accumulate in [false, true] {
            device.linear_input_gradient(dy.view(), weight, into_dx.view_mut(), accumulate);
            let (x, dy, layout) = (x.view(), dy.view(), Layout::InOut);
            device.linear_weight_gradient(x, dy, into_dw.view_mut(), layout, accumulate);
            device.bias_gradient(dy, into_db.view_mut(), accumulate);
        }
        assert_eq!(results.each_ref().map(|x| of(&device, x)), [dx, dw, db], "{row}");
        found(&device, &[], &row);
    }
}

#[test]
fn what_is_accumulated_is_placed_likewise() {
    for (old, words) in [
        (Partial, &[][..]),
        (Replicated, &["`dw` is replicated", "adds it as `dw`"]),
        (Shard(0), &["`dw` is sharded in dimension 0"]),
    ] {
        let device = device();
        let x = placed(&device, "x", &[4, 6], Shard(0));
        let mut dw = placed(&device, "dw", &[6, 6], old);
        device.linear_weight_gradient(x.view(), x.view(), dw.view_mut(), Layout::InOut, true);
        assert_eq!(of(&device, &dw), Partial);
        found(&device, words, &format!("{old}"));
    }
    let device = device();
    let x = placed(&device, "x", &[4, 6], Shard(0));
    let mut dw = tensor(&device, "dw", &[6, 6]);
    device.fill(dw.view_mut(), 0.0);
    device.linear_weight_gradient(x.view(), x.view(), dw.view_mut(), Layout::InOut, true);
    assert_eq!(of(&device, &dw), Partial);
    found(&device, &[], "zero");
}

/// A tensor that was placed with three dimensions is used with two, and made again with three.
#[test]
fn flattened_rows_stay_rows() {
    for (placement, flat) in [(Shard(0), Shard(0)), (Shard(1), Shard(0)), (Shard(2), Shard(1))] {
        let device = device();
        let x = placed(&device, "x", &[2, 4, 6], placement);
        let mut y = tensor(&device, "y", &[8, 6]);
        device.gelu(x.view().reshape([8, 6]), Gelu::Tanh, y.view_mut());
        assert_eq!(of(&device, &y), flat);
        assert_eq!(device.placements(y.view().reshape([2, 4, 6])), along(placement), "{placement}");
        found(&device, &[], "flat");
    }
}

/// Two axes cut two dimensions, or the same one.
#[test]
fn axes_are_followed_one_by_one() {
    for sequence in [Shard(0), Shard(1)] {
        let device = device();
        let (x, w) = (tensor(&device, "x", &[2, 4, 6]), placed(&device, "w", &[6, 6], Replicated));
        device.place(x.view(), along(sequence).with(Axis::Data, Shard(0)));
        let mut y = tensor(&device, "y", &[2, 4, 6]);
        let w = Weight { matrix: w.view(), layout: Layout::InOut };
        device.linear(x.view(), w, Epilogue::default(), y.view_mut());
        assert_eq!(device.placements(y.view()), along(sequence).with(Axis::Data, Shard(0)));
        let mut dw = tensor(&device, "dw", &[6, 6]);
        device.linear_weight_gradient(x.view(), y.view(), dw.view_mut(), Layout::InOut, false);
        assert_eq!(device.placements(dw.view()), along(Partial).with(Axis::Data, Partial));
        found(&device, &[], "axes");
    }
}

#[test]
fn element_by_element() {
    for (x, words) in [
        (Replicated, &[][..]),
        (Shard(0), &[]),
        (Shard(1), &[]),
        (Shard(2), &[]),
        (
            Partial,
            &["`x` is a partial sum", "before it is reduced", "all_reduce or reduce_scatter over `tensor`"],
        ),
    ] {
        let expected = if x == Partial { Replicated } else { x };
        let db_expected = match x {
            Shard(2) => Shard(0),
            Shard(_) => Partial,
            _ => Replicated,
        };
        for (op, gelu) in [
            ("gelu", Gelu::Tanh),
            ("gelu", Gelu::Erf),
            ("gelu_backward", Gelu::Tanh),
            ("gelu_backward", Gelu::Erf),
            ("dropout", Gelu::Tanh),
        ] {
            let device = device();
            let row = format!("{op} {gelu:?} of {x}");
            let x = placed(&device, "x", &[2, 4, 6], x);
            let mut y = placed(&device, "y", &[2, 4, 6], expected);
            let mut db = tensor(&device, "db", &[6]);
            match op {
                "gelu" => device.gelu(x.view(), gelu, y.view_mut()),
                "dropout" => {
                    let residual = placed(&device, "residual", &[2, 4, 6], expected);
                    let dropout = Dropout { p: 0.5, key: 0, first: 0, sample: 0 };
                    device.dropout(x.view(), dropout, Some(residual.view()), y.view_mut());
                }
                _ => {
                    device.gelu_backward(x.view(), gelu, y.view_mut(), db.view_mut(), false);
                    assert_eq!(of(&device, &db), db_expected, "{row}");
                }
            }
            assert_eq!(of(&device, &y), expected, "{row}");
            found(&device, words, &row);
        }
    }
}

#[test]
fn linear_gelu() {
    for (x, w, bias, expected, words) in [
        (Replicated, Shard(1), Shard(0), Shard(2), &[][..]),
        (Shard(1), Replicated, Replicated, Shard(1), &[]),
        (
            Shard(2),
            Shard(0),
            Replicated,
            Replicated,
            &["`x` is sharded in dimension 2", "would be a partial sum"],
        ),
    ] {
        let device = device();
        let row = format!("x {x}, w {w}");
        let (x, w) = (placed(&device, "x", &[2, 4, 6], x), placed(&device, "w", &[6, 8], w));
        let bias = placed(&device, "bias", &[8], bias);
        let [mut pre, mut y] = ["pre", "y"].map(|name| tensor(&device, name, &[2, 4, 8]));
        let w = Weight { matrix: w.view(), layout: Layout::InOut };
        device.linear_gelu(x.view(), w, bias.view(), Gelu::Tanh, pre.view_mut(), y.view_mut());
        assert_eq!([of(&device, &pre), of(&device, &y)], [expected; 2], "{row}");
        found(&device, words, &row);
    }
}

/// x, and then y and dx, the row statistics, the gradients of the parameters.
#[test]
fn layer_norm() {
    for (x, statistics, gradients, words) in [
        (Replicated, Replicated, Replicated, &[][..]),
        (Shard(0), Shard(0), Partial, &[]),
        (Shard(1), Shard(0), Partial, &[]),
        (Partial, Replicated, Replicated, &["layer_norm reads as `x`"]),
        (Shard(2), Replicated, Replicated, &["needs it whole", "an all_gather over `tensor` is missing"]),
    ] {
        let device = device();
        let row = format!("{x}");
        let right = words.is_empty();
        let x = placed(&device, "x", &[2, 4, 6], x);
        let [gamma, beta] = ["gamma", "beta"].map(|name| tensor(&device, name, &[6]));
        let mut y = tensor(&device, "y", &[2, 4, 6]);
        let [mut mean, mut rstd] = ["mean", "rstd"].map(|name| tensor(&device, name, &[8]));
        let rows = [mean.view_mut(), rstd.view_mut()];
        device.layer_norm(x.view(), [gamma.view(), beta.view()], 1e-5, y.view_mut(), rows);
        assert_eq!([&mean, &rstd].map(|s| of(&device, s)), [statistics; 2], "{row}");
        if right {
            assert_eq!(of(&device, &y), of(&device, &x), "{row}");
            let mut dx = tensor(&device, "dx", &[2, 4, 6]);
            let [mut dgamma, mut dbeta] = ["dgamma", "dbeta"].map(|name| tensor(&device, name, &[6]));
            for accumulate in [false, true] {
                let parameters = [dgamma.view_mut(), dbeta.view_mut()];
                let (rows, into) = ([mean.view(), rstd.view()], dx.view_mut());
                let (x, dy) = (x.view(), y.view());
                device.run(LayerNormBackward {
                    x,
                    gamma: gamma.view(),
                    statistics: rows,
                    dy,
                    dx: into,
                    accumulate_input: accumulate,
                    gradients: parameters,
                    accumulate_parameters: accumulate,
                });
            }
            assert_eq!(of(&device, &dx), of(&device, &x), "{row}");
            assert_eq!([&dgamma, &dbeta].map(|g| of(&device, g)), [gradients; 2], "{row}");
        }
        found(&device, words, &row);
    }
}

/// qkv, and then the output and the statistics of rows.
#[test]
fn attention() {
    for (qkv, out, statistics, words) in [
        (Replicated, Replicated, Replicated, &[][..]),
        (Shard(0), Shard(0), Shard(0), &[]),
        // By heads.
        (Shard(2), Shard(2), Shard(1), &[]),
        (Shard(1), Shard(1), Shard(2), &["needs it whole (every position looks at the others)"]),
        (Partial, Replicated, Replicated, &["attention reads as `qkv`"]),
    ] {
        let device = device();
        let row = format!("{qkv}");
        let right = words.is_empty();
        let qkv = placed(&device, "qkv", &[2, 4, 24], qkv);
        let (mut y, mut sums) = (tensor(&device, "out", &[2, 4, 8]), tensor(&device, "lse", &[2, 4, 4]));
        let heads = Heads { heads: 4, causal: true };
        device.attention(qkv.view(), heads, None, y.view_mut(), sums.view_mut());
        assert_eq!([of(&device, &y), of(&device, &sums)], [out, statistics], "{row}");
        if right {
            let mut dqkv = tensor(&device, "dqkv", &[2, 4, 24]);
            let kept = [y.view(), sums.view(), y.view()];
            device.attention_backward(qkv.view(), kept, heads, None, dqkv.view_mut());
            assert_eq!(of(&device, &dqkv), of(&device, &qkv), "{row}");
        }
        found(&device, words, &row);
    }
}

/// The second half of the table's rows, and all of them.
const LOOKUPS: [Lookup; 2] = [Lookup::Token { first: 10, vocab: 20 }, Lookup::Token { first: 0, vocab: 10 }];

/// tokens, table, positions (None: none in the same call), and then y. Positions are found by the number of
/// the first row, so that their table is whole where rows are cut.
#[test]
fn embedding() {
    for (tokens, table, positions, y, words) in [
        (Replicated, Replicated, Some(Replicated), Replicated, &[][..]),
        (Shard(0), Replicated, Some(Replicated), Shard(0), &[]),
        (Shard(1), Replicated, Some(Replicated), Shard(1), &[]),
        (Replicated, Shard(1), Some(Shard(1)), Shard(2), &[]),
        (Replicated, Shard(1), None, Shard(2), &[]),
        // Rows of the vocabulary: a term of each rank.
        (Replicated, Shard(0), None, Partial, &[]),
        (
            Replicated,
            Shard(0),
            Some(Replicated),
            Partial,
            &[
                "`positions` is replicated, but embedding adds it as `positions` to what is a partial sum",
                "would add it once",
            ],
        ),
        (
            Replicated,
            Shard(1),
            Some(Replicated),
            Shard(2),
            &["`positions` is replicated", "cut over `tensor`"],
        ),
        (Shard(1), Replicated, Some(Shard(0)), Shard(1), &["`positions` is sharded in dimension 0"]),
        (Replicated, Replicated, Some(Shard(1)), Replicated, &["`positions` is sharded", "all_gather"]),
        (Shard(0), Shard(0), None, Shard(0), &["`table` is sharded in dimension 0", "`ids` of the same"]),
        (
            Replicated,
            Partial,
            None,
            Replicated,
            &["`table` is a partial sum that embedding reads as `table`"],
        ),
    ] {
        for lookup in LOOKUPS {
            let device = device();
            let row = format!("tokens {tokens}, table {table}, positions {positions:?}, {lookup:?}");
            let mut ids = ids(&device, "tokens", &[2, 4], tokens);
            device.upload(&[0u32; 8], ids.view_mut());
            let table = placed(&device, "table", &[10, 6], table);
            let positions = positions.map(|p| placed(&device, "positions", &[4, 6], p));
            let added = positions.as_ref().map(|p| Positions { table: p.view(), first_row: 0, seq: 4 });
            let mut x = tensor(&device, "x", &[2, 4, 6]);
            device.embedding(ids.view(), lookup, table.view(), added, false, x.view_mut());
            assert_eq!(of(&device, &x), y, "{row}");
            found(&device, words, &row);
        }
    }
}

/// Types are added to what tokens gave: ids, table, y before (None: zero), and then y.
#[test]
fn embeddings_that_are_added() {
    for (ids_are, table, before, after, words) in [
        (Replicated, Replicated, Some(Replicated), Replicated, &[][..]),
        (Shard(0), Replicated, Some(Shard(0)), Shard(0), &[]),
        (Shard(1), Replicated, Some(Shard(1)), Shard(1), &[]),
        (Replicated, Shard(1), Some(Shard(2)), Shard(2), &[]),
        // Another term of the same sum.
        (Replicated, Shard(0), Some(Partial), Partial, &[]),
        (Replicated, Shard(0), None, Partial, &[]),
        (Replicated, Replicated, Some(Partial), Replicated, &["`y` is a partial sum", "missing before"]),
        (Replicated, Shard(0), Some(Replicated), Partial, &["`y` is replicated", "would add it once"]),
        (Shard(1), Replicated, Some(Replicated), Shard(1), &["`y` is replicated", "cut over `tensor`"]),
        (Shard(1), Replicated, Some(Shard(2)), Shard(1), &["`y` is sharded in dimension 2"]),
    ] {
        let device = device();
        let row = format!("ids {ids_are}, table {table}, y {before:?}");
        let ids = ids(&device, "ids", &[2, 4], ids_are);
        let (table, mut y) = (placed(&device, "table", &[2, 6], table), tensor(&device, "y", &[2, 4, 6]));
        match before {
            Some(placement) => device.place(y.view(), along(placement)),
            None => device.fill(y.view_mut(), 0.0),
        }
        device.embedding(ids.view(), Lookup::Type, table.view(), None, true, y.view_mut());
        assert_eq!(of(&device, &y), after, "{row}");
        found(&device, words, &row);
    }
}

/// y before (None: zero), positions, and then y: it stays as it is, and is no term of a sum.
#[test]
fn add_positions() {
    for (before, positions, after, words) in [
        (Some(Replicated), Replicated, Replicated, &[][..]),
        (Some(Shard(0)), Replicated, Shard(0), &[]),
        (Some(Shard(1)), Replicated, Shard(1), &[]),
        (Some(Shard(2)), Shard(1), Shard(2), &[]),
        (None, Replicated, Replicated, &[]),
        (
            Some(Partial),
            Replicated,
            Replicated,
            &["`y` is a partial sum, but add_positions adds it as `y`", "all_reduce or reduce_scatter"],
        ),
        (Some(Shard(2)), Replicated, Shard(2), &["`positions` is replicated", "cut over `tensor`"]),
        (Some(Shard(2)), Shard(0), Shard(2), &["`positions` is sharded in dimension 0"]),
        (Some(Shard(1)), Shard(0), Shard(1), &["`positions` is sharded in dimension 0", "all_gather"]),
        (Some(Replicated), Shard(1), Replicated, &["`positions` is sharded in dimension 1", "all_gather"]),
        (Some(Replicated), Partial, Replicated, &["`positions` is a partial sum", "missing before"]),
    ] {
        let device = device();
        let row = format!("y {before:?}, positions {positions}");
        let (positions, mut y) =
            (placed(&device, "positions", &[4, 6], positions), tensor(&device, "y", &[2, 4, 6]));
        match before {
            Some(placement) => device.place(y.view(), along(placement)),
            None => device.fill(y.view_mut(), 0.0),
        }
        device.add_positions(Positions { table: positions.view(), first_row: 0, seq: 4 }, y.view_mut());
        assert_eq!(of(&device, &y), after, "{row}");
        found(&device, words, &row);
    }
}

/// tokens, dy, what was said of dtable, and then dtable and dpositions, also when the next micro-batch is
/// added.
#[test]
fn embedding_backward() {
    for (tokens, dy, said, dtable, dpositions, words) in [
        (Replicated, Replicated, Replicated, Replicated, Replicated, &[][..]),
        (Shard(0), Shard(0), Replicated, Partial, Partial, &[]),
        (Shard(1), Shard(1), Replicated, Partial, Partial, &[]),
        // Every rank has all rows of dy and some of the table.
        (Replicated, Replicated, Shard(0), Shard(0), Replicated, &[]),
        (Replicated, Shard(2), Replicated, Shard(1), Shard(1), &[]),
        (Replicated, Shard(2), Shard(1), Shard(1), Shard(1), &[]),
        // What was said of columns does not make whole ones parts.
        (Replicated, Replicated, Shard(1), Replicated, Replicated, &[]),
        (Shard(1), Replicated, Replicated, Partial, Replicated, &["`dy` is replicated", "`ids` of the same"]),
        (
            Replicated,
            Shard(1),
            Replicated,
            Partial,
            Partial,
            &["`tokens` is replicated", "shares with `ids`"],
        ),
    ] {
        for lookup in LOOKUPS {
            let device = device();
            let row = format!("tokens {tokens}, dy {dy}, dtable {said}");
            let ids = ids(&device, "tokens", &[2, 4], tokens);
            let dy = placed(&device, "dy", &[2, 4, 6], dy);
            let mut table = placed(&device, "dtable", &[10, 6], said);
            let mut positions = tensor(&device, "dpositions", &[4, 6]);
            for accumulate in [false, true] {
                device.embedding_backward(ids.view(), lookup, dy.view(), table.view_mut(), accumulate);
                device.position_gradient(dy.view(), 0, 4, positions.view_mut(), accumulate);
                assert_eq!([of(&device, &table), of(&device, &positions)], [dtable, dpositions], "{row}");
                found(&device, words, &row);
            }
        }
    }
}

/// Terms of a gradient are added to terms: ids and dy, what is added to, and then that.
#[test]
fn gradients_of_tables_are_added_to_their_like() {
    for (rows, old, expected, words) in [
        (Shard(1), Partial, Partial, &[][..]),
        (Replicated, Replicated, Replicated, &[]),
        (Shard(1), Replicated, Partial, &["is replicated", "would add it once"]),
        (Shard(1), Shard(0), Partial, &["is sharded in dimension 0", "to what is a partial sum"]),
        (Replicated, Partial, Replicated, &["is a partial sum", "missing before"]),
        (Replicated, Shard(1), Replicated, &["is sharded in dimension 1", "all_gather"]),
    ] {
        let device = device();
        let row = format!("rows {rows}, gradient {old}");
        let ids = ids(&device, "tokens", &[2, 4], rows);
        let dy = placed(&device, "dy", &[2, 4, 6], rows);
        let [mut table, mut positions] =
            [("dtable", 10), ("dpositions", 4)].map(|(name, rows)| placed(&device, name, &[rows, 6], old));
        device.embedding_backward(ids.view(), LOOKUPS[1], dy.view(), table.view_mut(), true);
        assert_eq!(of(&device, &table), expected, "{row}");
        found(&device, words, &row);
        device.position_gradient(dy.view(), 0, 4, positions.view_mut(), true);
        assert_eq!(of(&device, &positions), expected, "{row}");
        found(&device, words, &row);
    }
}

/// x, w `[vocab, hidden]`, bias (None: none), targets, and then the statistics of rows, and the exponentials.
type StatisticsRow = ([Placement; 2], Option<Placement>, Placement, [Placement; 2], &'static [&'static str]);

#[test]
fn vocabulary_statistics() {
    let (none, whole) = (None, Some(Replicated));
    let rows: [StatisticsRow; 14] = [
        ([Replicated, Replicated], whole, Replicated, [Replicated, Replicated], &[]),
        // Rows of the batch, of the sequence.
        ([Shard(0), Replicated], whole, Shard(0), [Shard(0), Shard(0)], &[]),
        ([Shard(1), Replicated], whole, Shard(1), [Shard(0), Shard(0)], &[]),
        // Classes: what a part says of its rows is to be gathered.
        ([Replicated, Shard(0)], none, Replicated, [Shard(0), Shard(1)], &[]),
        ([Replicated, Shard(0)], Some(Shard(0)), Replicated, [Shard(0), Shard(1)], &[]),
        (
            [Replicated, Shard(0)],
            whole,
            Replicated,
            [Shard(0), Shard(1)],
            &["`bias` is replicated, but vocabulary_statistics adds it as `bias`", "cut over `tensor`"],
        ),
        (
            [Replicated, Replicated],
            Some(Shard(0)),
            Replicated,
            [Replicated, Replicated],
            &["`bias` is sharded in dimension 0", "all_gather"],
        ),
        (
            [Shard(2), Shard(1)],
            whole,
            Replicated,
            [Replicated, Replicated],
            &["`x` is sharded in dimension 2", "would be a partial sum"],
        ),
        (
            [Shard(0), Replicated],
            whole,
            Replicated,
            [Shard(0), Shard(0)],
            &["`targets` is replicated", "`x` of the same vocabulary_statistics"],
        ),
        (
            [Replicated, Replicated],
            whole,
            Shard(1),
            [Shard(0), Shard(0)],
            &["`x` is replicated", "`targets` of the same vocabulary_statistics"],
        ),
        (
            [Shard(1), Shard(0)],
            none,
            Shard(1),
            [Shard(0), Shard(0)],
            &["`w` is sharded in dimension 0", "only one can be cut over `tensor`"],
        ),
        (
            [Partial, Replicated],
            whole,
            Replicated,
            [Replicated, Replicated],
            &["`x` is a partial sum that vocabulary_statistics reads as `x`"],
        ),
        (
            [Replicated, Partial],
            none,
            Replicated,
            [Replicated, Replicated],
            &["vocabulary_statistics reads as `w`"],
        ),
        (
            [Replicated, Replicated],
            Some(Partial),
            Replicated,
            [Replicated, Replicated],
            &["`bias` is a partial sum", "missing before"],
        ),
    ];
    for ([x, w], bias, targets, expected, words) in rows {
        for training in [true, false] {
            let device = device();
            let row = format!("x {x}, w {w}, bias {bias:?}, targets {targets}, training {training}");
            let (x, w) = (placed(&device, "x", &[2, 4, 6], x), placed(&device, "w", &[10, 6], w));
            let bias = bias.map(|p| placed(&device, "bias", &[10], p));
            let targets = ids(&device, "targets", &[2, 4], targets);
            let mut exponentials = training.then(|| tensor(&device, "exponentials", &[8, 10]));
            let [mut blocks, mut statistics] = ["blocks", "statistics"].map(|n| tensor(&device, n, &[8, 4]));
            device.run(VocabularyStatistics {
                x: x.view(),
                w: Weight { matrix: w.view(), layout: Layout::OutIn },
                bias: bias.as_ref().map(Tensor::view),
                targets: targets.view(),
                first: 0,
                exponentials: exponentials.as_mut().map(Tensor::view_mut),
                blocks: blocks.view_mut(),
                statistics: statistics.view_mut(),
            });
            assert_eq!([&statistics, &blocks].map(|x| of(&device, x)), expected, "{row}");
            assert_eq!(exponentials.map_or(expected[1], |e| of(&device, &e)), expected[1], "{row}");
            found(&device, words, &row);
        }
    }
}

/// statistics `[parts, rows, 4]`, targets, exponentials, and then the loss and the derivatives.
#[test]
fn vocabulary_loss() {
    for (statistics, targets, exponentials, expected, words) in [
        (Replicated, Replicated, Replicated, [Replicated, Replicated], &[][..]),
        // Derivatives of logits stay where their classes are.
        (Replicated, Replicated, Shard(1), [Replicated, Shard(1)], &[]),
        // Rows: each rank has the losses of its own.
        (Shard(1), Shard(0), Shard(0), [Partial, Shard(0)], &[]),
        (
            Shard(1),
            Replicated,
            Shard(0),
            [Partial, Shard(0)],
            &["`targets` is replicated, while `statistics` of the same vocabulary_loss is sharded"],
        ),
        (Replicated, Shard(0), Replicated, [Partial, Replicated], &["`statistics` is replicated"]),
        // Parts that were not gathered.
        (
            Shard(0),
            Replicated,
            Shard(1),
            [Partial, Shard(1)],
            &["`targets` is replicated, while `statistics` of the same vocabulary_loss is sharded"],
        ),
        (
            Partial,
            Replicated,
            Replicated,
            [Replicated, Replicated],
            &["`statistics` is a partial sum that vocabulary_loss reads as `statistics`"],
        ),
    ] {
        for training in [true, false] {
            let device = device();
            let row = format!("statistics {statistics}, targets {targets}, training {training}");
            let statistics = placed(&device, "statistics", &[2, 8, 4], statistics);
            let targets = ids(&device, "targets", &[8], targets);
            let mut logits = training.then(|| placed(&device, "logits", &[8, 10], exponentials));
            let (blocks, mut loss) = (tensor(&device, "blocks", &[8, 4]), zero_sum(&device));
            // The second slice of rows is added to the first.
            for accumulate in [false, true] {
                device.run(VocabularyLoss {
                    statistics: statistics.view(),
                    blocks: blocks.view(),
                    targets: targets.view(),
                    first: 10,
                    classes: 20,
                    numbers: CrossEntropy::scaled(1.0),
                    exponentials: logits.as_mut().map(Tensor::view_mut),
                    loss: loss.view_mut(),
                    accumulate,
                });
                assert_eq!(of(&device, &loss), expected[0], "{row}");
                found(&device, words, &row);
            }
            assert_eq!(logits.map_or(expected[1], |l| of(&device, &l)), expected[1], "{row}");
        }
    }
}

/// exponentials, and then the derivatives that take their place.
#[test]
fn derivatives_of_logits() {
    for (exponentials, derivatives, words) in [
        (Replicated, Replicated, &[][..]),
        (Shard(0), Shard(0), &[]),
        (Shard(1), Shard(1), &[]),
        (Partial, Replicated, &["`logits` is a partial sum that vocabulary_loss reads as `exponentials`"]),
    ] {
        let device = device();
        let (all, blocks) = (tensor(&device, "all", &[2, 8, 4]), tensor(&device, "blocks", &[8, 4]));
        let targets = ids(&device, "targets", &[8], Replicated);
        let (mut logits, mut loss) = (placed(&device, "logits", &[8, 10], exponentials), zero_sum(&device));
        device.run(VocabularyLoss {
            statistics: all.view(),
            blocks: blocks.view(),
            targets: targets.view(),
            first: 0,
            classes: 20,
            numbers: CrossEntropy::scaled(1.0),
            exponentials: Some(logits.view_mut()),
            loss: loss.view_mut(),
            accumulate: false,
        });
        assert_eq!(of(&device, &logits), derivatives, "{exponentials}");
        found(&device, words, &format!("exponentials {exponentials}"));
    }
}

/// The loss that is added to, the rows that are added.
#[test]
fn losses_are_added_to_their_like() {
    for (old, rows, words) in [
        (Partial, [Shard(1), Shard(0)], &[][..]),
        (Replicated, [Shard(1), Shard(0)], &["`sum` is replicated", "would add it once"]),
        (Partial, [Replicated, Replicated], &["`sum` is a partial sum", "adds it as `loss`"]),
    ] {
        let device = device();
        let statistics = placed(&device, "statistics", &[1, 8, 4], rows[0]);
        let targets = ids(&device, "targets", &[8], rows[1]);
        let (blocks, mut loss) = (tensor(&device, "blocks", &[8, 4]), zero_sum(&device));
        device.place(loss.view(), along(old));
        let (numbers, to) = (CrossEntropy::scaled(1.0), loss.view_mut());
        device.run(VocabularyLoss {
            statistics: statistics.view(),
            blocks: blocks.view(),
            targets: targets.view(),
            first: 0,
            classes: 10,
            numbers,
            exponentials: None,
            loss: to,
            accumulate: true,
        });
        found(&device, words, &format!("loss {old}, rows {rows:?}"));
    }
}

/// Rows over data and classes over the axis, through everything that a head does, in two slices of the rows;
/// the statistics of a part are gathered, or (second) that is forgotten.
#[test]
fn a_head_over_two_axes() {
    for gathers in [true, false] {
        let device = device();
        let rows_over_data = |along_axis| along(along_axis).with(Axis::Data, Shard(0));
        let x = tensor(&device, "x", &[2, 4, 6]);
        device.place(x.view(), rows_over_data(Replicated));
        let targets = ids(&device, "targets", &[2, 4], Replicated);
        device.place(targets.view(), rows_over_data(Replicated));
        let w = placed(&device, "w", &[10, 6], Shard(0));
        let w = Weight { matrix: w.view(), layout: Layout::OutIn };
        let bias = placed(&device, "bias", &[10], Shard(0));
        let [mut logits, mut blocks, mut own, mut dx, mut dw, mut db] =
            [&[4, 10][..], &[4, 4], &[4, 4], &[2, 4, 6], &[10, 6], &[10]].map(|s| tensor(&device, "head", s));
        let mut sum = zero_sum(&device);
        for start in [0, 4] {
            let flat = start * 6..(start + 4) * 6;
            let x = x.view().range(flat.clone()).reshape([4, 6]);
            let targets = targets.view().range(start..start + 4);
            let (to_logits, to_blocks) = (Some(logits.view_mut()), blocks.view_mut());
            let bias = Some(bias.view());
            device.run(VocabularyStatistics {
                x,
                w,
                bias,
                targets,
                first: 0,
                exponentials: to_logits,
                blocks: to_blocks,
                statistics: own.view_mut(),
            });
            assert_eq!(device.placements(own.view()), rows_over_data(Shard(0)));
            let all = tensor(&device, "all", &[2, 4, 4]);
            let gathered = along(Replicated).with(Axis::Data, Shard(1));
            device.place(all.view(), gathered);
            let seen = if gathers { all.view() } else { own.view().reshape([1, 4, 4]) };
            let (numbers, to_logits) = (CrossEntropy::scaled(1.0), Some(logits.view_mut()));
            let (blocks, add) = (blocks.view(), start > 0);
            device.run(VocabularyLoss {
                statistics: seen,
                blocks,
                targets,
                first: 0,
                classes: 20,
                numbers,
                exponentials: to_logits,
                loss: sum.view_mut(),
                accumulate: add,
            });
            let dlogits = logits.view();
            device.linear_input_gradient(dlogits, w, dx.view_mut().range(flat).reshape([4, 6]), false);
            device.linear_weight_gradient(x, dlogits, dw.view_mut(), Layout::OutIn, add);
            device.bias_gradient(dlogits, db.view_mut(), add);
            let forgotten = &["`targets` is replicated", "`statistics` of the same vocabulary_loss"][..];
            found(&device, if gathers { &[] } else { forgotten }, &format!("rows from {start}"));
        }
        let mut loss = tensor(&device, "loss", &[1]);
        device.scaled(sum.view(), 0.5, loss.view_mut());
        let of_loss = along(if gathers { Replicated } else { Partial }).with(Axis::Data, Partial);
        assert_eq!(device.placements(loss.view()), of_loss);
        assert_eq!(device.placements(logits.view()), rows_over_data(Shard(1)));
        assert_eq!(device.placements(dx.view()), rows_over_data(Partial));
        assert_eq!(device.placements(dw.view()), along(Shard(0)).with(Axis::Data, Partial));
        assert_eq!(device.placements(db.view()), along(Shard(0)).with(Axis::Data, Partial));
        found(&device, &[], "head");
    }
}

/// Rows over data and a table of vocabulary rows over the axis, forwards and backwards.
#[test]
fn an_embedding_over_two_axes() {
    let device = device();
    let over_data = |placement| along(placement).with(Axis::Data, Shard(0));
    let tokens = ids(&device, "tokens", &[2, 4], Replicated);
    device.place(tokens.view(), over_data(Replicated));
    let table = placed(&device, "table", &[10, 6], Shard(0));
    let positions = placed(&device, "positions", &[4, 6], Replicated);
    let mut y = tensor(&device, "y", &[2, 4, 6]);
    device.embedding(tokens.view(), LOOKUPS[0], table.view(), None, false, y.view_mut());
    assert_eq!(device.placements(y.view()), over_data(Partial));
    // Reduced over the axis, here or to parts of the sequence.
    for reduced in [Replicated, Shard(1)] {
        device.place(y.view(), over_data(reduced));
        device.add_positions(Positions { table: positions.view(), first_row: 0, seq: 4 }, y.view_mut());
        assert_eq!(device.placements(y.view()), over_data(reduced));
        let mut dpositions = tensor(&device, "dpositions", &[4, 6]);
        device.position_gradient(y.view(), 0, 4, dpositions.view_mut(), false);
        let terms = if reduced == Replicated { Replicated } else { Partial };
        assert_eq!(device.placements(dpositions.view()), along(terms).with(Axis::Data, Partial));
    }
    device.place(y.view(), over_data(Replicated));
    let mut dtable = placed(&device, "dtable", &[10, 6], Shard(0));
    for accumulate in [false, true] {
        device.embedding_backward(tokens.view(), LOOKUPS[0], y.view(), dtable.view_mut(), accumulate);
        assert_eq!(device.placements(dtable.view()), along(Shard(0)).with(Axis::Data, Partial));
    }
    found(&device, &[], "embedding");
}

/// A sum of terms and a multiple of one are terms as well, which the host may not read yet.
#[test]
fn sums_and_multiples() {
    for (x, words) in [(Replicated, &[][..]), (Partial, &["`loss` is a partial sum: an all_reduce"])] {
        let device = device();
        let terms = device.alloc(DType::F64, [4], Category::Workspace, "terms");
        device.place(terms.view(), along(x));
        let (mut sum, mut loss) = (zero_sum(&device), tensor(&device, "loss", &[1]));
        device.tree_sum(terms.view(), sum.view_mut());
        device.scaled(sum.view(), 0.5, loss.view_mut());
        assert_eq!([&sum, &loss].map(|x| of(&device, x)), [x; 2]);
        found(&device, &[], "sum");
        device.fetch([loss.view()]).unwrap()[0];
        found(&device, words, &format!("fetch of {x}"));
    }
}

#[test]
fn sums_of_two() {
    for (from, into, expected, words) in [
        (Some(Partial), Some(Partial), Partial, &[][..]),
        (Some(Shard(1)), Some(Shard(1)), Shard(1), &[]),
        (Some(Partial), None, Partial, &[]),
        (Some(Shard(0)), None, Shard(0), &[]),
        (None, Some(Partial), Partial, &[]),
        (None, None, Replicated, &[]),
        (Some(Replicated), Some(Partial), Partial, &["`from` is replicated, but add adds it", "add it once"]),
        (Some(Partial), Some(Replicated), Replicated, &["`from` is a partial sum", "is missing before"]),
        (Some(Shard(0)), Some(Shard(1)), Shard(1), &["`from` is sharded in dimension 0"]),
    ] {
        let device = device();
        let [mut x, mut y] = ["from", "into"].map(|name| tensor(&device, name, &[4, 6]));
        for (x, placement) in [(&mut x, from), (&mut y, into)] {
            match placement {
                Some(placement) => device.place(x.view(), along(placement)),
                None => device.fill(x.view_mut(), 0.0),
            }
        }
        device.add(x.view(), y.view_mut());
        assert_eq!(of(&device, &y), expected, "{from:?} + {into:?}");
        found(&device, words, &format!("{from:?} + {into:?}"));
    }
}

/// Copies and conversions carry the placements of the pieces of a chunk, also where elements shrink.
#[test]
fn copies_carry_what_pieces_are() {
    let device = device();
    let chunk = tensor(&device, "chunk", &[100]);
    device.place(chunk.view().range(10..40), along(Partial));
    device.place(chunk.view().range(40..80).reshape([4, 10]), along(Shard(1)));
    let mut same = tensor(&device, "same", &[100]);
    let mut half = device.alloc(DType::BF16, [100], Category::Activations, "half");
    device.copy(chunk.view(), same.view_mut());
    device.convert(same.view(), half.view_mut());
    for x in [&same, &half] {
        let at = |element: usize| device.placements(x.view().range(element..100)).get(AXIS);
        assert_eq!([9, 10, 39, 79, 80].map(at), [Replicated, Partial, Partial, Shard(0), Replicated]);
        let whole = x.view().range(40..80).reshape([4, 10]);
        assert_eq!(device.placements(whole), along(Shard(1)));
    }
    found(&device, &[], "copies");
}

#[test]
fn updates_and_norms_want_reduced_gradients() {
    for (g, p, words) in [
        (Replicated, Replicated, &[][..]),
        (Shard(0), Shard(0), &[]),
        (Replicated, Shard(0), &[]),
        (Partial, Replicated, &["`g` is a partial sum", "is missing before"]),
    ] {
        for op in ["adamw", "block_squares"] {
            let device = device();
            let [mut p, g, mut m, mut v] =
                [("p", p), ("g", g), ("m", p), ("v", p)].map(|(n, p)| placed(&device, n, &[8192], p));
            let one = tensor(&device, "factor", &[1]);
            if op == "adamw" {
                let step = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.9, eps: 0.1, weight_decay: 0.0, step: 1 };
                let states = (m.view_mut(), v.view_mut());
                device.run(AdamWUpdate {
                    step,
                    p: p.view_mut(),
                    g: g.view(),
                    moments: [states.0, states.1],
                    gradient_scale: one.view(),
                    rounded: None,
                });
            } else {
                let blocks = 8192 / NORM_BLOCK;
                let mut squares = device.alloc(DType::F64, [blocks], Category::Workspace, "squares");
                device.block_squares(g.view(), squares.view_mut());
                let expected = if of(&device, &g) == Shard(0) { Partial } else { Replicated };
                assert_eq!(of(&device, &squares), expected);
            }
            found(&device, words, op);
        }
    }
}

/// This rank's part of a replicated parameter, updated from its part of the gradient, waits to be gathered.
#[test]
fn a_part_that_was_updated_is_a_part() {
    let device = device();
    let mut p = placed(&device, "p", &[100], Replicated);
    let g = placed(&device, "g", &[50], Shard(0));
    let [mut m, mut v] = ["m", "v"].map(|name| tensor(&device, name, &[50]));
    let one = tensor(&device, "factor", &[1]);
    let step = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.9, eps: 0.1, weight_decay: 0.0, step: 1 };
    let states = (m.view_mut(), v.view_mut());
    device.run(AdamWUpdate {
        step,
        p: p.view_mut().range(50..100),
        g: g.view(),
        moments: [states.0, states.1],
        gradient_scale: one.view(),
        rounded: None,
    });
    assert_eq!(
        [0, 50].map(|at| device.placements(p.view().range(at..100)).get(AXIS)),
        [Replicated, Shard(0)]
    );
    found(&device, &[], "part");
}

#[test]
fn numbers_that_decide_are_reduced() {
    for (x, words) in [
        (Replicated, [&[][..], &[]]),
        (
            Partial,
            [&["`x` is a partial sum: an all_reduce over `tensor`", "norm"], &["before the host reads it"]],
        ),
        (Shard(0), [&["`x` holds this rank's blocks alone", "norm"], &[]]),
    ] {
        let device = device();
        let [mut norm, mut factor] = ["norm", "factor"].map(|name| tensor(&device, name, &[1]));
        let squares = device.alloc(DType::F64, [4], Category::Workspace, "x");
        device.place(squares.view(), along(x));
        device.norm(
            squares.view(),
            Clip { max_norm: 1.0, loss_scale: 1.0 },
            norm.view_mut(),
            factor.view_mut(),
        );
        found(&device, words[0], &format!("norm of {x}"));
        let loss = placed(&device, "x", &[1], x);
        device.fetch([loss.view()]).unwrap()[0];
        found(&device, words[1], &format!("fetch of {x}"));
    }
}

#[test]
fn what_is_expected_is_named() {
    let device = device();
    let x = placed(&device, "x", &[4, 6], Partial);
    device.expect_placement(x.view(), || "h.0.out".to_string(), along(Partial));
    found(&device, &[], "as expected");
    for (found_as, expected, words) in [
        (Partial, Replicated, "`h.0.out` is a partial sum; expected replicated: an all_reduce over `tensor`"),
        (Partial, Shard(0), "a reduce_scatter over `tensor` is missing"),
        (Shard(0), Replicated, "an all_gather over `tensor` is missing"),
        (Shard(0), Shard(1), "is sharded in dimension 0; expected sharded in dimension 1"),
        (Replicated, Partial, "a reduction over `tensor` is too much"),
        (Replicated, Shard(0), "never cut"),
    ] {
        device.place(x.view(), along(found_as));
        device.expect_placement(x.view(), || "h.0.out".to_string(), along(expected));
        found(&device, &[words], "expected");
    }
}

/// Pieces have the names that they were given, others those of their allocations within the scopes, and the
/// phase is known; memory that is taken again starts unnamed.
#[test]
fn faults_name_the_tensor_where_it_is() {
    let device = device();
    let chunk = tensor(&device, "chunk", &[20]);
    device.place_named(chunk.view().range(10..20), along(Partial), || "h.3.mlp.bias".to_string());
    let mut y = tensor(&device, "y", &[10]);
    device.phase(PhaseName::Step, || {
        device.gelu(chunk.view().range(10..20), Gelu::Tanh, y.view_mut());
        let x = placed(&device, "x", &[10], Partial);
        let _block = device.scope("h.3");
        let inner = device.scope("mlp");
        device.gelu(x.view(), Gelu::Tanh, y.view_mut());
        drop(inner);
        device.gelu(x.view(), Gelu::Tanh, y.view_mut());
    });
    drop(chunk);
    let again = tensor(&device, "again", &[20]);
    assert_eq!(of(&device, &again), Replicated);
    let faults = faults(&device);
    let names: Vec<_> = faults.iter().map(|f| (f.phase.unwrap().name(), f.tensor.as_str())).collect();
    assert_eq!(names, [("step", "h.3.mlp.bias"), ("step", "h.3.mlp.x"), ("step", "h.3.x")]);
}

#[test]
fn a_mark_covers_its_piece_and_no_more() {
    let device = device();
    let x = tensor(&device, "x", &[100]);
    let read = |device: &Device| {
        let at = |element: usize| device.placements(x.view().range(element..100)).get(AXIS);
        [0, 19, 20, 39, 40, 59, 60, 99].map(at)
    };
    device.place(x.view().range(20..60), along(Partial));
    let (r, p, s) = (Replicated, Partial, Shard(0));
    assert_eq!(read(&device), [r, r, p, p, p, p, r, r]);
    device.place(x.view().range(40..100), along(s));
    assert_eq!(read(&device), [r, r, p, p, s, s, s, s]);
    device.place(x.view().range(40..60), along(p));
    assert_eq!(read(&device), [r, r, p, p, p, p, s, s]);
    device.place(x.view().range(10..70), along(r));
    assert_eq!(read(&device), [r, r, r, r, r, r, r, s]);
    device.place(x.view(), along(p));
    assert_eq!(read(&device), [p; 8]);
}

#[test]
fn only_the_first_faults_are_kept() {
    let device = device();
    let x = placed(&device, "x", &[10], Partial);
    let mut y = tensor(&device, "y", &[10]);
    (0..50).for_each(|_| device.gelu(x.view(), Gelu::Tanh, y.view_mut()));
    assert_eq!(faults(&device).len(), 20);
}

/// Where nothing was placed, nothing is said; nor along an axis where nothing was.
#[test]
fn what_nobody_placed_is_not_checked() {
    let device = Device::meta(1);
    let x = tensor(&device, "x", &[10]);
    device.place(x.view(), Placements::REPLICATED);
    assert!(!device.recorder().unwrap().is_placing());
    device.place(x.view(), along(Partial));
    let recorder = device.recorder().unwrap();
    assert_eq!(Axis::ALL.map(|axis| recorder.is_checked(axis)), [false, false, true]);
}
