//! A checkpoint of any (mesh, stage, schedule, precision) goes on in any other: the state that is read is the state
//! that was written, and over the same ranks, in the same precision, the rest of the run has the same bits.

use crate::rig;
use crate::rig::{assert_same_state, pairs, same_bits};
use phalanx_testing::sweeps;
use phalanx_train::RunConfig;

/// Mesh (pipeline, data, tensor), ZeRO stage, schedule, sequence parallelism.
type Layout = ([usize; 3], u8, &'static str, bool);

const LAYOUTS: [Layout; 14] = [
    ([1, 1, 1], 0, "1f1b", false),
    ([1, 1, 1], 3, "1f1b", false),
    ([1, 2, 1], 0, "1f1b", false),
    ([1, 2, 1], 3, "1f1b", false),
    ([1, 4, 1], 1, "1f1b", false),
    ([1, 4, 1], 2, "1f1b", false),
    ([1, 1, 2], 0, "1f1b", false),
    ([1, 2, 4], 3, "1f1b", true),
    ([2, 1, 1], 0, "gpipe", false),
    ([2, 1, 1], 2, "zb-v", false),
    ([2, 1, 1], 1, "interleaved", false),
    ([2, 2, 2], 1, "1f1b", true),
    ([2, 2, 2], 3, "zb-h1", true),
    ([4, 2, 1], 2, "1f1b", false),
];

fn config((mesh, stage, schedule, sequence_parallel): Layout) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    let parallel = &mut config.parallel;
    let [pipeline, data, tensor] = mesh;
    (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
    (parallel.zero, parallel.schedule) = (stage, schedule.into());
    parallel.sequence_parallel = sequence_parallel;
    config.batch.micro = (pipeline > 1).then_some(8 / data / 4);
    config
}

#[test]
fn any_layout_resumes_in_any_other() {
    let (model, _) = rig::golden_config();
    let half = if sweeps::are_whole() { 10 } else { 4 };
    let steps = &rig::golden_steps()[..2 * half];
    let folder = tempfile::tempdir().unwrap();
    let whole: Vec<_> = LAYOUTS.iter().map(|l| rig::run(&model, &config(*l), steps)).collect();
    let others: Vec<_> = pairs(&LAYOUTS, &whole).collect();
    for (number, from) in LAYOUTS.into_iter().enumerate() {
        let dir = folder.path().join(number.to_string());
        let save = rig::Checkpoints { save: Some(dir.clone()), ..Default::default() };
        let first = rig::run_between(&model, &config(from), &steps[..half], &save);
        let restore =
            rig::Checkpoints { restore: Some(dir.join(format!("step-{half}"))), ..Default::default() };
        // Each goes on in its neighbour, mostly another stage of the same mesh, and in some others.
        for &(to, whole) in sweeps::share(&others, number + 1, 4) {
            let read = rig::run_between(&model, &config(*to), &[], &restore);
            assert_eq!(read.state, first.state, "{from:?} read as {to:?}");
            let rest = rig::run_between(&model, &config(*to), &steps[half..], &restore);
            if (to.0, to.3) == (from.0, from.3) {
                assert_eq!(rest.losses[..half], whole.losses[half..2 * half], "{from:?} -> {to:?}");
                assert_eq!(rest.state, whole.state, "{from:?} -> {to:?}");
            }
            for (a, b) in pairs(&rest.losses, &whole.losses[half..]) {
                // Sums over 8 sequences, and over parts of layers, in another order, as in goldens.rs.
                assert!((a - b).abs() < 2e-6, "{from:?} -> {to:?}: loss {a} for {b}");
            }
        }
    }
}

/// Stages between which a checkpoint of every precision goes, on two ranks; then one rank reads it.
const STAGES: [(u8, u8); 4] = [(0, 3), (1, 2), (2, 1), (3, 0)];

#[test]
fn every_precision_resumes_to_the_bit_and_in_any_other() {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..8];
    let folder = tempfile::tempdir().unwrap();
    let in_policy = |(data, stage): (usize, u8), (_, change): rig::Policy| {
        let mut config = config(([1, data, 1], stage, "1f1b", false));
        change(&mut config.precision);
        config
    };
    let policies = [&rig::POLICIES[..], &[("f32", |_| {})]].concat();
    for (i, policy) in policies.iter().enumerate() {
        let (from, to) = STAGES[i % STAGES.len()];
        let what = format!("{}, stage {from} to {to}", policy.0);
        let dir = folder.path().join(i.to_string());
        let save = rig::Checkpoints { save: Some(dir.clone()), ..Default::default() };
        let whole = rig::run(&model, &in_policy((2, from), *policy), steps);
        let first = rig::run_between(&model, &in_policy((2, from), *policy), &steps[..4], &save);
        let restore = rig::Checkpoints { restore: Some(dir.join("step-4")), ..Default::default() };
        let rest = rig::run_between(&model, &in_policy((2, to), *policy), &steps[4..], &restore);
        assert_same_state(&what, &whole.state, &rest.state);
        assert!(same_bits(&whole.losses[4..], &rest.losses), "{what}");
        assert_eq!(whole.skipped[4..], rest.skipped, "{what}: the loss scale goes on where it was");
        for other in sweeps::share(&policies, i, 2) {
            let read = rig::run_between(&model, &in_policy((1, to), *other), &[], &restore);
            assert_same_state(&format!("{what}, read as {}", other.0), &first.state, &read.state);
        }
    }
}
