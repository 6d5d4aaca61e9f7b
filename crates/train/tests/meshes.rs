//! A selection of what `examples/meshes.rs` runs: each axis alone and together, with every ZeRO stage.

use crate::one_rank::{Sizes, hold, tolerance};

/// Mesh (pipeline, data, tensor), sequence parallelism, schedules.
type Case = ([usize; 3], bool, &'static [&'static str]);

const CASES: [Case; 6] = [
    ([1, 3, 1], false, &["1f1b"]),
    ([1, 1, 3], true, &["1f1b"]),
    ([3, 1, 1], false, &["gpipe", "zb-v"]),
    ([2, 2, 1], false, &["interleaved", "zb-h1"]),
    ([2, 1, 2], true, &["1f1b"]),
    ([2, 2, 2], true, &["1f1b", "model"]),
];

#[test]
fn a_selection_of_meshes_follows_one_rank() {
    let mut runs = 0;
    for family in ["gpt2", "bert"] {
        for (mesh, sequence, schedules) in CASES {
            let row = hold(family, mesh, sequence, schedules, 2);
            let (loss, gradient, parameter) = (row.loss, row.gradient, row.parameter);
            let limit = tolerance(Sizes::of(mesh));
            assert!(
                row.holds(limit),
                "{family} {mesh:?}, sequence parallelism {sequence}: loss {loss:e}, gradients {gradient:e}, \
                 parameters {parameter:e}, allowed {limit:e}; same bits {}, peak == plan {}",
                row.bits,
                row.peaks
            );
            assert_eq!(row.runs, 4 * schedules.len(), "{family} {mesh:?}");
            runs += row.runs;
        }
    }
    assert_eq!(runs, 2 * 4 * 9);
}
