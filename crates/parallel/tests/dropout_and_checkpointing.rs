//! Dropout in layers of which each rank has a part drops what one rank drops; what is computed again instead of kept
//! changes no bit on any rank.

use crate::rig::{
    AXES, Build, DRAW, HIDDEN, Numbers, P, PLAIN, ROWS, SEQ, Setting, allowed, block, distance, joined,
    parts, paths, rebuilding_block, same_within, whole,
};
use phalanx_layers::{AnyLayer, Draw, Fork, Recompute, Sequence};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::Layout;

/// Sums on the way to a gradient of a block of two paths: linear layers, norms, attention, rows and ranks.
fn sums() -> Vec<usize> {
    let path = [HIDDEN, 4 * HIDDEN, HIDDEN, 4 * HIDDEN, 2 * ROWS, 4, HIDDEN, 2 * HIDDEN];
    [path, path].as_flattened().iter().copied().chain([HIDDEN, SEQ, SEQ, HIDDEN, SEQ, SEQ]).collect()
}

const DROPPING: Setting = Setting { draw: Some(DRAW), ..PLAIN };

/// Dropout probabilities: of attention, of the residual stream, of both.
const PROBABILITIES: [P; 3] = [(0.3, 0.0), (0.0, 0.4), (0.3, 0.4)];

#[test]
fn ranks_drop_what_one_rank_drops() {
    for p in PROBABILITIES {
        let build = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> { Box::new(block(tensor, p)) };
        let expected = whole(&build, DROPPING);
        let later = Some(Draw { step: DRAW.step + 1, ..DRAW });
        let other = whole(&build, Setting { draw: later, ..PLAIN });
        assert!(
            distance(&other, &expected) > 100.0 * allowed(&sums()),
            "{p:?}: another mask is another result"
        );
        for axis in AXES {
            let got = parts(&build, axis, DROPPING);
            same_within(&joined(&got, axis.1), &expected, allowed(&sums()), &format!("{p:?}, {axis:?}"));
        }
    }
}

/// Without a residual, dropped elements are visible.
#[test]
fn the_same_elements_fall() {
    let build = |tensor: &TensorParallel| -> Box<dyn AnyLayer> {
        let [_, mlp] = paths(tensor, Layout::InOut, (0.0, 0.4));
        Box::new(Sequence::new(mlp))
    };
    let fallen = |n: &Numbers| n.y.concat().iter().map(|y| *y == 0.0).collect::<Vec<_>>();
    let expected = fallen(&whole(&build, DROPPING));
    assert!(expected.contains(&true) && expected.contains(&false));
    for axis in AXES {
        assert!(fallen(&joined(&parts(&build, axis, DROPPING), axis.1)) == expected, "{axis:?}");
    }
}

/// The recomputed tensors of a block: their names, and the layers that are rebuilt.
fn again(p: P) -> Vec<(&'static str, Box<Build>)> {
    vec![
        (
            "rebuilding",
            Box::new(move |t: &TensorParallel| -> Box<dyn AnyLayer> { Box::new(rebuilding_block(t, p)) }),
        ),
        (
            "recomputed",
            Box::new(move |t: &TensorParallel| -> Box<dyn AnyLayer> { Box::new(Recompute(block(t, p))) }),
        ),
        (
            "recomputed, rebuilding",
            Box::new(move |t: &TensorParallel| -> Box<dyn AnyLayer> {
                Box::new(Recompute(rebuilding_block(t, p)))
            }),
        ),
        (
            "recomputed paths",
            Box::new(move |t: &TensorParallel| -> Box<dyn AnyLayer> {
                let path = |path| Box::new(Fork::residual(Recompute(Sequence::new(path).rebuilding())));
                let [a, b] = paths(t, Layout::InOut, p);
                Box::new(Sequence::new(vec![path(a), path(b)]))
            }),
        ),
    ]
}

#[test]
fn what_is_computed_again_has_the_same_bits() {
    for p in [(0.0, 0.0), (0.3, 0.4)] {
        let kept = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> { Box::new(block(tensor, p)) };
        for axis in AXES {
            for residual in [false, true] {
                let setting = Setting { residual, ..DROPPING };
                let expected = parts(&kept, axis, setting);
                for (name, build) in again(p) {
                    for split in [false, true] {
                        let got = parts(&*build, axis, Setting { split, ..setting });
                        assert!(
                            got == expected,
                            "{name}, {p:?}, {axis:?}, residual {residual}, split {split}"
                        );
                    }
                }
            }
        }
    }
}

/// A sequence that ends with columns, so that a recomputed layer begins or ends in the middle of a path.
#[test]
fn columns_and_rows_recomputed_alone() {
    let layers = |tensor: &TensorParallel, recomputed: bool| -> Box<dyn AnyLayer> {
        let [_, mlp] = paths(tensor, Layout::OutIn, (0.0, 0.4));
        let again = |layer| -> Box<dyn AnyLayer> {
            if recomputed { Box::new(Recompute(Sequence::new(vec![layer]))) } else { layer }
        };
        Box::new(Sequence::new(mlp.into_iter().map(again).collect()))
    };
    for axis in AXES {
        let kept = parts(&move |tensor: &TensorParallel| layers(tensor, false), axis, DROPPING);
        for split in [false, true] {
            let setting = Setting { split, ..DROPPING };
            let got = parts(&move |tensor: &TensorParallel| layers(tensor, true), axis, setting);
            assert!(got == kept, "{axis:?}, split {split}");
        }
    }
}
