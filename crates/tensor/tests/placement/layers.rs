//! Element-wise operations, layer norm and attention.

use phalanx_plan::trace::Placement::{Partial, Replicated, Shard};
use phalanx_tensor::operations::{Fold, MaxPool, MaxPoolBackward, Relu, Unfold};
use phalanx_tensor::{
    Dropout, Gate, Gelu, Heads, LayerNorm, LayerNormBackward, NormSums, Patches, Rotary, RowNorm,
    RowPositions, WholeSums,
};

use super::{device, found, of, placed, tensor};

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
            ("tanh", Gelu::Tanh),
            ("tanh_backward", Gelu::Tanh),
        ] {
            let device = device();
            let row = format!("{op} {gelu:?} of {x}");
            let x = placed(&device, "x", &[2, 4, 6], x);
            let mut y = placed(&device, "y", &[2, 4, 6], expected);
            let mut db = tensor(&device, "db", &[6]);
            match op {
                "gelu" => device.gelu(x.view(), gelu, y.view_mut()),
                "tanh" => device.tanh(x.view(), y.view_mut()),
                "tanh_backward" => device.tanh_backward(x.view(), y.view_mut()),
                "dropout" => {
                    let residual = placed(&device, "residual", &[2, 4, 6], expected);
                    let dropout = Dropout { p: 0.5, key: 0, first: 0, sample: 0 };
                    device.dropout(x.view(), dropout, Some(residual.view()), y.view_mut());
                }
                _ => {
                    device.gelu_backward(x.view(), gelu, y.view_mut(), Some(db.view_mut()), false);
                    assert_eq!(of(&device, &db), db_expected, "{row}");
                }
            }
            assert_eq!(of(&device, &y), expected, "{row}");
            found(&device, words, &row);
        }
    }
}

/// Patches of images and back, and pooling; ReLU works on each element.
#[test]
fn images() {
    for (x, words) in [
        (Replicated, &[][..]),
        (Shard(0), &[]),
        // Channels: the columns of rows of patches are those of each channel in turn.
        (Shard(2), &[]),
        (Shard(1), &["needs it whole (patches reach over pixels)"]),
        (Partial, &["reads as `x`"]),
    ] {
        let (expected, is_partial) = (if x == Partial { Replicated } else { x }, x == Partial);
        let patches = Patches::square([2, 2], 2, 2, 1);
        for op in ["unfold", "fold", "max_pool", "max_pool_backward"] {
            let device = device();
            let row = format!("{op} of {x}");
            let (from, to) = if op == "fold" { ([2, 4, 24], [2, 4, 6]) } else { ([2, 4, 6], [2, 4, 24]) };
            let (x, mut y) = (placed(&device, "x", &from, x), tensor(&device, "y", &to));
            let mut pooled = tensor(&device, "pooled", &[2, 4, 6]);
            let view = x.view();
            match op {
                "unfold" => device.run(Unfold { x: view, patches, y: y.view_mut() }),
                "fold" => device.run(Fold { x: view, patches, y: y.view_mut() }),
                "max_pool" => device.run(MaxPool { x: view, patches, y: pooled.view_mut() }),
                _ => device.run(MaxPoolBackward { x: view, patches, dy: view, dx: pooled.view_mut() }),
            }
            let result = if op.starts_with("max_pool") { &pooled } else { &y };
            assert_eq!(of(&device, result), expected, "{row}");
            // Its operands are one tensor: each of them is read before it is reduced.
            if !(is_partial && op == "max_pool_backward") {
                found(&device, words, &row);
            }
        }
        let device = device();
        let mut y = placed(&device, "y", &[2, 4, 6], x);
        device.run(Relu { x: y.view_mut() });
        assert_eq!(of(&device, &y), expected, "ReLU of {x}");
    }
}

/// x, and then y and dx; the halves of a row are sharded alike.
#[test]
fn gated() {
    for (x, words) in [
        (Replicated, &[][..]),
        (Shard(0), &[]),
        (Shard(1), &[]),
        (Shard(2), &[]),
        (Partial, &["gated reads as `x`", "all_reduce or reduce_scatter over `tensor`"]),
    ] {
        let device = device();
        let (expected, row) = (if x == Partial { Replicated } else { x }, format!("{x}"));
        let mut x = placed(&device, "x", &[2, 4, 12], x);
        let mut y = tensor(&device, "y", &[2, 4, 6]);
        device.gated(x.view(), Gate::Silu, y.view_mut());
        assert_eq!(of(&device, &y), expected, "{row}");
        if words.is_empty() {
            device.gated_backward(x.view_mut(), Gate::Silu, y.view());
            assert_eq!(of(&device, &x), expected, "{row}");
        }
        found(&device, words, &row);
    }
}

/// q, k and v before and after they turn, and back.
#[test]
fn rotary() {
    for (x, words) in [
        (Replicated, &[][..]),
        (Shard(0), &[]),
        // By heads.
        (Shard(2), &[]),
        (Shard(1), &["needs it whole (positions are counted from its first row)"]),
        (Partial, &["rotary reads as `x`"]),
    ] {
        let device = device();
        let (expected, row) = (if x == Partial { Replicated } else { x }, format!("{x}"));
        let right = words.is_empty();
        let mut x = placed(&device, "x", &[2, 4, 24], x);
        let rotary = Rotary::of(2, 1.0, vec![1.0]);
        device.rotary(x.view_mut(), &rotary, 8, RowPositions::From(0));
        assert_eq!(of(&device, &x), expected, "{row}");
        if right {
            device.rotary_backward(x.view_mut(), &rotary, 8, RowPositions::From(0));
            assert_eq!(of(&device, &x), expected, "{row}");
        }
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
        let rows = (Some(mean.view_mut()), rstd.view_mut());
        device.layer_norm(x.view(), (gamma.view(), Some(beta.view())), 1e-5, y.view_mut(), rows);
        assert_eq!([&mean, &rstd].map(|s| of(&device, s)), [statistics; 2], "{row}");
        if right {
            assert_eq!(of(&device, &y), of(&device, &x), "{row}");
            let mut dx = tensor(&device, "dx", &[2, 4, 6]);
            let [mut dgamma, mut dbeta] = ["dgamma", "dbeta"].map(|name| tensor(&device, name, &[6]));
            for accumulate in [false, true] {
                let parameters = [dgamma.view_mut(), dbeta.view_mut()].map(Some);
                let into = dx.view_mut();
                let (x, dy) = (x.view(), y.view());
                device.run(LayerNormBackward {
                    x,
                    gamma: gamma.view(),
                    norm: 1e-5.into(),
                    products: None,
                    mean: Some(mean.view()),
                    rstd: rstd.view(),
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

/// Parts of a row, whose squares are summed over the ranks, or are not.
#[test]
fn rms_norm_of_parts() {
    for (is_summed, words) in [(true, &[][..]), (false, &["partial sum that rms_norm reads as `squares`"])] {
        let device = device();
        let x = placed(&device, "x", &[2, 4, 6], Shard(2));
        let gamma = placed(&device, "gamma", &[6], Shard(0));
        let mut y = tensor(&device, "y", &[2, 4, 6]);
        let [mut sums, mut rstd] = ["sums", "rstd"].map(|name| tensor(&device, name, &[8]));
        let (norm, dy) = (RowNorm::from(1e-5), None);
        device.run(NormSums { x: x.view(), gamma: gamma.view(), norm, dy, sums: sums.view_mut() });
        assert_eq!(of(&device, &sums), Partial);
        if is_summed {
            sums = placed(&device, "summed", &[8], Replicated);
        }
        device.run(LayerNorm {
            x: x.view(),
            gamma: gamma.view(),
            beta: None,
            norm,
            squares: Some(WholeSums { sums: sums.view(), elements: 12 }),
            y: y.view_mut(),
            mean: None,
            rstd: rstd.view_mut(),
        });
        assert_eq!(of(&device, &y), Shard(2));
        if is_summed {
            assert_eq!(of(&device, &rstd), Replicated);
        }
        found(&device, words, "parts of a row");
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
        let heads = Heads::equal(4, 2, true);
        device.attention(qkv.view(), heads, None, None, y.view_mut(), sums.view_mut());
        assert_eq!([of(&device, &y), of(&device, &sums)], [out, statistics], "{row}");
        if right {
            let mut dqkv = tensor(&device, "dqkv", &[2, 4, 24]);
            let kept = [y.view(), sums.view(), y.view()];
            device.attention_backward(qkv.view(), kept, heads, None, None, dqkv.view_mut());
            assert_eq!(of(&device, &dqkv), of(&device, &qkv), "{row}");
            let (mut again, mut cache) =
                (tensor(&device, "out", &[2, 4, 8]), tensor(&device, "cache", &[2, 6, 16]));
            device.attention_cached(qkv.view(), heads, 0, cache.view_mut(), again.view_mut());
            assert_eq!([of(&device, &again), of(&device, &cache)], [out, out], "{row}");
        }
        found(&device, words, &row);
    }
}
