//! Runs whose documents do not see each other: the loss is the mean over the targets that count, positions reach every stage, and
//! nothing that may not change a bit changes one.

use std::sync::Arc;

use phalanx_models::{Arch, Keys, Model};
use phalanx_train::RunConfig;
use phalanx_train::config::{Checkpointing, CheckpointingWord, Documents, Float, Tier};

use crate::mesh::F32;
use crate::rig::{self, Ran, assert_same_run, assert_same_state};

/// A decoder of four blocks with rotary positions, and heads that share keys and values.
fn decoder() -> Arc<dyn Model> {
    let sizes = [("layers", 4), ("hidden", 32), ("heads", 4), ("kv_heads", 2), ("intermediate", 64)];
    let mut keys = Keys::default();
    sizes.into_iter().for_each(|(key, count)| keys.set(key, count));
    Arch::named("llama").unwrap().model(&keys, 67, 16).unwrap()
}

/// The id that ends a document: there are several in most sequences.
const END: u32 = 7;

/// The sequences of the golden run, of which every fifth token ends a document, or another one.
fn steps() -> rig::Steps {
    let mut steps = rig::golden_steps();
    steps.truncate(3);
    for (number, sequence) in steps.iter_mut().flatten().enumerate() {
        let ends = sequence.iter_mut().skip(number % 7).step_by(4 + number % 3);
        ends.for_each(|token| *token = END);
    }
    steps
}

fn config([pipeline, data, tensor]: [usize; 3], zero: u8) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
    parallel.zero = zero;
    config.batch.micro = Some(2);
    (config.data.documents, config.data.end_token) = (Documents::Apart, Some(END));
    config
}

fn run(model: &Arc<dyn Model>, config: &RunConfig) -> Ran {
    rig::run_fresh(model, config, &steps())
}

fn models() -> [(&'static str, Arc<dyn Model>); 2] {
    [("llama", decoder()), ("gpt2", rig::golden_config().0.into())]
}

#[test]
fn every_mesh_and_schedule_follows_one_rank_and_no_stage_changes_a_bit() {
    for (name, model) in models() {
        let one = run(&model, &config([1, 1, 1], 0));
        for (mesh, sequence, schedule) in [
            ([1, 1, 2], false, "1f1b"),
            ([1, 1, 2], true, "1f1b"),
            ([1, 4, 1], false, "1f1b"),
            ([2, 1, 1], false, "1f1b"),
            ([2, 1, 1], false, "zb-h1"),
            ([2, 2, 1], false, "1f1b"),
        ] {
            let mut first: Option<Ran> = None;
            for zero in [0, 2, 3] {
                let mut config = config(mesh, zero);
                config.parallel.sequence_parallel = sequence;
                config.parallel.schedule = schedule.into();
                let what = format!("{name} on {mesh:?} by {schedule}, sequence {sequence}, stage {zero}");
                let ran = run(&model, &config);
                assert_eq!((&ran.peaks, &ran.step_peaks), (&ran.planned, &ran.step_planned), "{what}");
                let apart = |of: fn(&Ran) -> &Vec<f32>| rig::relative_difference(of(&ran), of(&one));
                assert!(apart(|ran| &ran.losses) < F32, "{what}: {:?} for {:?}", ran.losses, one.losses);
                assert!(apart(|ran| &ran.grad_norms) < F32, "{what}: norms");
                let first = first.get_or_insert_with(|| ran.clone());
                assert_same_run(&what, first, &ran);
            }
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
    for (name, model) in models() {
        for compute in [Float::F32, Float::Bf16] {
            let mut base = config([1, 2, 1], 1);
            base.precision.compute = compute;
            let expected = run(&model, &base);
            for (what, change) in changes {
                let mut config = base.clone();
                change(&mut config);
                let what = format!("{name} in {compute:?}, {what}");
                let ran = run(&model, &config);
                assert_eq!(ran.peaks, ran.planned, "{what}: peak == plan");
                assert_same_state(&what, &expected.state, &ran.state);
            }
        }
    }
}

/// Documents apart are others than joined ones, and without an end they are the same: the plan alone has the positions.
#[test]
fn a_sequence_without_an_end_is_one_document() {
    for (name, model) in models() {
        let never = |documents, end_token| {
            let mut config = config([1, 1, 1], 0);
            (config.data.documents, config.data.end_token) = (documents, end_token);
            config
        };
        let joined = run(&model, &never(Documents::Joined, None));
        let apart = run(&model, &never(Documents::Apart, Some(1000)));
        assert_same_state(name, &joined.state, &apart.state);
        assert_ne!(run(&model, &config([1, 1, 1], 0)).losses, joined.losses, "{name}");
        // 2 sequences of 16 positions of 4 bytes, of a micro-batch; where nothing else is larger then.
        let more = apart.planned[0].bytes as i64 - joined.planned[0].bytes as i64;
        assert!((0..=256).contains(&more), "{name}: {more} bytes more");
    }
}
