//! A selection of what `examples/meshes.rs` runs: each axis alone and together, with every ZeRO stage.

use crate::one_rank::{Sizes, hold, tolerance};
use phalanx_testing::sweeps;

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
    for (first, family) in ["gpt2", "bert"].into_iter().enumerate() {
        // Both families together try every stage.
        let stages: Vec<u8> = sweeps::share(&[0, 1, 2, 3], first, 2).copied().collect();
        for (mesh, sequence, schedules) in CASES {
            let row = hold(family, mesh, sequence, (schedules, &stages), 2);
            let (loss, gradient, parameter) = (row.loss, row.gradient, row.parameter);
            let limit = tolerance(Sizes::of(mesh));
            assert!(
                row.holds(limit),
                "{family} {mesh:?}, sequence parallelism {sequence}: loss {loss:e}, gradients {gradient:e}, \
                 parameters {parameter:e}, allowed {limit:e}; same bits {}, peak == plan {}",
                row.bits,
                row.peaks
            );
            assert_eq!(row.runs, stages.len() * schedules.len(), "{family} {mesh:?}");
            runs += row.runs;
        }
    }
    assert_eq!(runs, if sweeps::are_whole() { 2 * 4 * 9 } else { 4 * 9 });
}
