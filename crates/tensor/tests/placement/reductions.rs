//! Sums, norms, copies and optimizer updates, which need reduced gradients.

use phalanx_plan::trace::Placement::{Partial, Replicated, Shard};
use phalanx_tensor::{AdamW, AdamWUpdate, Category, Clip, DType, NORM_BLOCK};

use super::{AXIS, along, device, found, of, placed, tensor, zero_sum};

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
        device.fetch([loss.view()]).unwrap();
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
        device.fetch([loss.view()]).unwrap();
        found(&device, words[1], &format!("fetch of {x}"));
    }
}
