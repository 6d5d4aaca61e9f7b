//! Computing again instead of keeping: the same bits, less kept, no product of weights that is not needed.

use crate::rig::{DRAW, HIDDEN, P, SEQ, kernels, left, linear, norm, numbers, plain, rebuilding, trace};
use phalanx_layers::{AnyLayer, LinearGelu, Recompute, Sequence};
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::Gelu;

/// Bytes of a `[1, seq, hidden]`, and of one number per row.
const H: u64 = (4 * SEQ * HIDDEN) as u64;
const ROW: u64 = (4 * SEQ) as u64;

fn check(p: P) {
    let expected = numbers(&plain(p), 3, Some(DRAW));
    assert!(expected.dx.iter().any(|bits| *bits != 0));
    let others: [(&str, Box<dyn AnyLayer>); 4] = [
        ("rebuilding", Box::new(rebuilding(p))),
        ("recomputed", Box::new(Recompute(plain(p)))),
        ("recomputed, rebuilding", Box::new(Recompute(rebuilding(p)))),
        ("recomputed twice", Box::new(Recompute(Sequence::new(vec![Box::new(Recompute(plain(p)))])))),
    ];
    for (name, layer) in others {
        assert_eq!(numbers(&*layer, 3, Some(DRAW)), expected, "{name}, dropout {p:?}");
    }
}

#[test]
fn the_same_bits() {
    check((0.0, 0.0));
}

#[test]
fn the_same_bits_with_dropout() {
    check((0.2, 0.0));
    check((0.0, 0.3));
    check((0.2, 0.3));
}

#[test]
fn what_is_made_again_may_be_made_from_what_is_made_again() {
    let layers = || -> Vec<Box<dyn AnyLayer>> {
        vec![
            Box::new(norm("a")),
            Box::new(norm("b")),
            Box::new(LinearGelu { linear: linear("c", HIDDEN, HIDDEN), gelu: Gelu::Erf }),
            Box::new(norm("d")),
            Box::new(norm("e")),
            Box::new(norm("f")),
        ]
    };
    let kept = Sequence::new(layers());
    let again = Sequence::new(layers()).rebuilding();
    assert_eq!(numbers(&again, 2, None), numbers(&kept, 2, None));
    // Each is recomputed once, although the norms depend on each other.
    let trace = trace(&again, None);
    let count = |name| kernels(&trace, PhaseName::Backward).iter().filter(|k| **k == name).count();
    assert_eq!((count("layer_norm"), count("gelu"), count("linear_gelu")), (4, 1, 0));
}

#[test]
fn what_is_kept() {
    let statistics = [("attention.log_sum_exp", 2 * ROW), ("layer_norm.mean", ROW), ("layer_norm.rstd", ROW)];
    let [rows, mean, rstd] = statistics;
    let block = [("linear.y", 3 * H), ("linear.y", H), ("linear.y", H), ("linear_gelu.pre", 4 * H)];
    let between = [("layer_norm.y", H), ("layer_norm.y", H), ("attention.out", H), ("linear_gelu.y", 4 * H)];
    let few = [&block[..], &[rows, mean, mean, rstd, rstd]].concat();
    let all = [&few[..], &between].concat();
    let sorted = |mut list: Vec<(&'static str, u64)>| {
        list.sort_unstable();
        list
    };
    let p = (0.0, 0.0);
    assert_eq!(left(&trace(&plain(p), None), PhaseName::Forward), sorted(all), "all");
    assert_eq!(
        left(&trace(&rebuilding(p), None), PhaseName::Forward),
        sorted(few),
        "what cannot be made cheaply"
    );
    // The input is the caller's; the output is one of the three of `linear.y` above.
    assert_eq!(left(&trace(&Recompute(plain(p)), None), PhaseName::Forward), [("linear.y", H)], "the output");
    for layer in [&plain(p) as &dyn AnyLayer, &rebuilding(p), &Recompute(plain(p))] {
        assert_eq!(left(&trace(layer, None), PhaseName::Backward), [], "nothing stays but what was there");
    }
}

#[test]
fn what_is_computed_again() {
    let p = (0.1, 0.1);
    let of = |layer: &dyn AnyLayer, phase| {
        let mut kernels = kernels(&trace(layer, Some(DRAW)), phase);
        kernels.sort_unstable();
        kernels
    };
    let and = |more: &[&'static str]| {
        let mut kernels = of(&plain(p), PhaseName::Backward);
        kernels.extend(more);
        kernels.sort_unstable();
        kernels
    };
    assert_eq!(of(&rebuilding(p), PhaseName::Forward), of(&plain(p), PhaseName::Forward));
    assert_eq!(of(&Recompute(plain(p)), PhaseName::Forward), of(&plain(p), PhaseName::Forward));
    let cheap = ["attention", "gelu", "layer_norm", "layer_norm"];
    assert_eq!(of(&rebuilding(p), PhaseName::Backward), and(&cheap));
    // Forward without its last product and dropout, which compute only the output.
    let mut whole = of(&plain(p), PhaseName::Forward);
    for last in ["linear", "dropout"] {
        whole.remove(whole.iter().position(|k| *k == last).unwrap());
    }
    assert_eq!(of(&Recompute(plain(p)), PhaseName::Backward), and(&whole));
}
