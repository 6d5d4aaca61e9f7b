//! Runs of a BERT with a class head on rows of unequal length: the loss is the mean over rows, and nothing that may not change a bit
//! changes one.

use std::sync::Arc;

use phalanx_models::{Arch, Keys, Model};
use phalanx_train::RunConfig;
use phalanx_train::config::{Checkpointing, CheckpointingWord, Float, Tier};

use crate::mesh::F32;
use crate::rig::{self, Ran, assert_same_run, assert_same_state};

const LABELS: [&str; 3] = ["bad", "fair", "good"];

fn model() -> Arc<dyn Model> {
    let mut keys = Keys::default();
    for (key, count) in [("layers", 4), ("hidden", 32), ("heads", 4), ("intermediate", 64)] {
        keys.set(key, count);
    }
    keys.set("labels", LABELS.map(String::from).to_vec());
    Arch::BERT.model(&keys, 67, 16).unwrap()
}

/// With dropout, of which each layout must drop the same.
fn config([pipeline, data, tensor]: [usize; 3], zero: u8) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    config.model.arch = Arch::BERT;
    config.model.keys = model().keys();
    config.model.dropout = 0.1;
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
    parallel.zero = zero;
    config.batch.micro = Some(2);
    config
}

fn run(config: &RunConfig) -> Ran {
    let steps = rig::golden_steps();
    rig::run_fresh(&model(), config, &steps[..3])
}

#[test]
fn every_mesh_and_schedule_follows_one_rank_and_no_stage_changes_a_bit() {
    let one = run(&config([1, 1, 1], 0));
    for (mesh, schedule) in [
        ([1, 1, 2], "1f1b"),
        ([1, 4, 1], "1f1b"),
        ([2, 1, 1], "1f1b"),
        ([2, 1, 1], "zb-h1"),
        ([2, 2, 1], "1f1b"),
    ] {
        let mut first: Option<Ran> = None;
        for zero in [0, 1, 2, 3] {
            let mut config = config(mesh, zero);
            config.parallel.schedule = schedule.into();
            let what = format!("on {mesh:?} by {schedule}, stage {zero}");
            let ran = run(&config);
            assert_eq!((&ran.peaks, &ran.step_peaks), (&ran.planned, &ran.step_planned), "{what}");
            let apart = |of: fn(&Ran) -> &Vec<f32>| rig::relative_difference(of(&ran), of(&one));
            assert!(apart(|ran| &ran.losses) < F32, "{what}: {:?} for {:?}", ran.losses, one.losses);
            assert!(apart(|ran| &ran.grad_norms) < F32, "{what}: norms");
            let first = first.get_or_insert_with(|| ran.clone());
            assert_same_run(&what, first, &ran);
        }
    }
}

#[test]
fn what_may_not_change_a_bit_changes_none() {
    type Change = fn(&mut RunConfig);
    let changes: [(&str, Change); 5] = [
        ("two threads", |config| config.train.threads = Some(2)),
        ("computed again", |config| {
            config.memory.checkpointing = Checkpointing::Word(CheckpointingWord::Selective);
        }),
        ("blocks computed again", |config| config.memory.checkpointing = Checkpointing::Every(1)),
        ("block inputs in host memory", |config| config.memory.activations = Tier::Host),
        ("states in host memory", |config| config.memory.optimizer = Tier::Host),
    ];
    for compute in [Float::F32, Float::Bf16] {
        let mut base = config([1, 2, 1], 1);
        base.precision.compute = compute;
        let expected = run(&base);
        for (what, change) in changes {
            let mut config = base.clone();
            change(&mut config);
            let what = format!("in {compute:?}, {what}");
            let ran = run(&config);
            assert_eq!(ran.peaks, ran.planned, "{what}: peak == plan");
            assert_same_state(&what, &expected.state, &ran.state);
        }
    }
}

/// The mean over all rows, however they are divided into micro-batches.
#[test]
fn accumulation_follows_one_micro_batch() {
    let parts = run(&config([1, 1, 1], 0));
    let mut whole = config([1, 1, 1], 0);
    whole.batch.micro = Some(whole.batch.global);
    let whole = run(&whole);
    assert!(rig::relative_difference(&parts.losses, &whole.losses) < F32);
    assert!(rig::relative_difference(&parts.grad_norms, &whole.grad_norms) < F32);
}
