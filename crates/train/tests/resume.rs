//! A checkpoint of any (ranks, stage, precision) goes on in any other: the state that is read is the state that
//! was written, and over the same ranks, in the same precision, the rest of the run has the same bits.

mod rig;

use phalanx_train::RunConfig;
use rig::{assert_same_state, same_bits};

const LAYOUTS: [(usize, u8); 7] = [(1, 0), (1, 3), (2, 0), (2, 2), (2, 3), (4, 1), (4, 3)];

fn config((world, stage): (usize, u8)) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    config.parallel.data = world;
    config.parallel.zero = stage;
    config
}

#[test]
fn any_layout_resumes_in_any_other() {
    let (model, _) = rig::golden_config();
    let steps = rig::golden_steps();
    let folder = tempfile::tempdir().unwrap();
    let whole: Vec<_> = LAYOUTS.iter().map(|l| rig::run(&model, &config(*l), &steps)).collect();
    for from in LAYOUTS {
        let dir = folder.path().join(format!("{}-{}", from.0, from.1));
        let save = rig::Checkpoints { restore: None, save: Some(dir.clone()) };
        let first = rig::run_between(&model, &config(from), &steps[..10], &save);
        let restore = rig::Checkpoints { restore: Some(dir.join("step-10")), save: None };
        for (to, whole) in LAYOUTS.iter().zip(&whole) {
            let read = rig::run_between(&model, &config(*to), &[], &restore);
            assert_eq!(read.state, first.state, "{from:?} read as {to:?}");
            let rest = rig::run_between(&model, &config(*to), &steps[10..], &restore);
            if to.0 == from.0 {
                assert_eq!(rest.losses[..10], whole.losses[10..20], "{from:?} -> {to:?}");
                assert_eq!(rest.state, whole.state, "{from:?} -> {to:?}");
            }
            for (a, b) in rest.losses.iter().zip(&whole.losses[10..]) {
                // Sums over 8 sequences in another order, as in goldens.rs.
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
    let in_policy = |layout, (_, change): rig::Policy| {
        let mut config = config(layout);
        change(&mut config.precision);
        config
    };
    let policies = [&rig::POLICIES[..], &[("f32", |_| {})]].concat();
    for (i, policy) in policies.iter().enumerate() {
        let (from, to) = STAGES[i % STAGES.len()];
        let what = format!("{}, stage {from} to {to}", policy.0);
        let dir = folder.path().join(i.to_string());
        let save = rig::Checkpoints { restore: None, save: Some(dir.clone()) };
        let whole = rig::run(&model, &in_policy((2, from), *policy), steps);
        let first = rig::run_between(&model, &in_policy((2, from), *policy), &steps[..4], &save);
        let restore = rig::Checkpoints { restore: Some(dir.join("step-4")), save: None };
        let rest = rig::run_between(&model, &in_policy((2, to), *policy), &steps[4..], &restore);
        assert_same_state(&what, &whole.state, &rest.state);
        assert!(same_bits(&whole.losses[4..], &rest.losses), "{what}");
        assert_eq!(whole.skipped[4..], rest.skipped, "{what}: the loss scale goes on where it was");
        for other in &policies {
            let read = rig::run_between(&model, &in_policy((1, to), *other), &[], &restore);
            assert_same_state(&format!("{what}, read as {}", other.0), &first.state, &read.state);
        }
    }
}
