//! Matrix products: how operands placed along an axis place the result, forwards and backwards.

use phalanx_plan::trace::Axis;
use phalanx_plan::trace::Placement::{self, Partial, Replicated, Shard};
use phalanx_tensor::{Epilogue, Gelu, Layout, Tensor, Weight};

use super::{along, device, found, of, placed, tensor};

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
        device.linear_gelu(x.view(), w, Some(bias.view()), Gelu::Tanh, pre.view_mut(), y.view_mut());
        assert_eq!([of(&device, &pre), of(&device, &y)], [expected; 2], "{row}");
        found(&device, words, &row);
    }
}

/// A partial sum that is read before it is summed: products are linear in it and pass it on, once, where that was said of it.
#[test]
fn a_sum_that_is_made_later() {
    let rows: [([Placement; 2], Placement, &[&str]); 5] = [
        ([Partial, Replicated], Partial, &[]),
        ([Replicated, Replicated], Replicated, &[]),
        ([Shard(0), Replicated], Shard(0), &[]),
        ([Partial, Partial], Partial, &["partial sum", "before it is reduced"]),
        ([Partial, Shard(1)], Partial, &["is sharded in dimension 1", "of the same linear"]),
    ];
    for ([x, w], expected, words) in rows {
        let row = format!("x {x}, w {w}");
        let device = device();
        let (x, w) = (placed(&device, "x", &[2, 4, 6], x), placed(&device, "w", &[6, 8], w));
        let mut y = tensor(&device, "y", &[2, 4, 8]);
        device.sum_later(x.view());
        let w = Weight { matrix: w.view(), layout: Layout::InOut };
        device.linear(x.view(), w, Epilogue { bias: None, residual: None }, y.view_mut());
        assert_eq!(of(&device, &y), expected, "{row}");
        found(&device, words, &row);
    }
    for (name, is_product) in [("dx", true), ("dw of x", true), ("dw of dy", true), ("gelu", false)] {
        let device = device();
        let (term, whole) = (placed(&device, "x", &[2, 4, 6], Partial), tensor(&device, "whole", &[2, 4, 6]));
        let w = placed(&device, "w", &[6, 6], Replicated);
        device.place(whole.view(), along(Replicated));
        device.sum_later(term.view());
        let mut y = tensor(&device, "y", if name.starts_with("dw") { &[6, 6] } else { &[2, 4, 6] });
        let (t, r, layout) = (term.view(), whole.view(), Layout::InOut);
        match name {
            "dx" => {
                let w = Weight { matrix: w.view(), layout };
                device.linear_input_gradient(t, w, y.view_mut(), false);
            }
            "dw of x" => device.linear_weight_gradient(t, r, y.view_mut(), layout, false),
            "dw of dy" => device.linear_weight_gradient(r, t, y.view_mut(), layout, false),
            _ => device.gelu(t, Gelu::Tanh, y.view_mut()),
        }
        if is_product {
            assert_eq!(of(&device, &y), Partial, "{name}");
        }
        // What is computed from it is a partial sum like any other.
        let mut after = tensor(&device, "after", y.shape().as_slice());
        device.gelu(y.view(), Gelu::Tanh, after.view_mut());
        found(&device, &["gelu reads as `x`"], name);
    }
}
