//! Meshes against one rank, and what may not change a bit on one mesh. `examples/meshes.rs` runs all of them with SGD;
//! here is one of each kind with AdamW, and everything that may be combined with it.

use crate::rig;
use crate::rig::{Ran, assert_same_state, same_bits};
use phalanx_testing::sweeps;
use phalanx_train::RunConfig;
use phalanx_train::config::{Checkpointing, CheckpointingWord, Chunk, ChunkWord, CutBy, Float, Reduce};

fn config([pipeline, data, tensor]: [usize; 3]) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
    config.batch.micro = Some(1);
    config
}

/// Largest difference of losses and gradient norms, relative.
fn apart(a: &Ran, b: &Ran) -> f32 {
    let of = |of: fn(&Ran) -> &Vec<f32>| rig::relative_difference(of(a), of(b));
    of(|ran| &ran.losses).max(of(|ran| &ran.grad_norms))
}

/// A sum of n numbers in another order differs by n roundings at most; the longest way to a gradient of the golden
/// model (2 blocks of width 32, 8 x 16 tokens) has about 2000, and AdamW divides it by its own size.
pub const F32: f32 = 2000.0 / 16_777_216.0;

#[track_caller]
fn check_same(what: &str, a: &Ran, b: &Ran) {
    assert_same_state(what, &a.state, &b.state);
    assert!(same_bits(&a.losses, &b.losses), "{what}: losses");
    assert!(same_bits(&a.grad_norms, &b.grad_norms), "{what}: norms");
}

#[test]
fn every_axis_follows_one_rank() {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..6];
    let one = rig::run(&model, &config([1, 1, 1]), steps);
    let mut number = 0;
    for mesh in [[1, 1, 2], [1, 1, 4], [2, 1, 1], [4, 1, 1], [1, 2, 2], [2, 2, 1], [2, 1, 2], [2, 2, 2]] {
        for sequence in [false, true] {
            if sequence && mesh[2] == 1 {
                continue;
            }
            number += 1;
            let mut first: Option<Ran> = None;
            // Stage 0 and one of the others, in turn.
            let others = sweeps::share(&[1, 2, 3], number, 3);
            for zero in [&0].into_iter().chain(others) {
                let mut config = config(mesh);
                config.parallel.zero = *zero;
                config.parallel.sequence_parallel = sequence;
                let what = format!("{mesh:?}, stage {zero}, sequence parallelism {sequence}");
                let ran = rig::run(&model, &config, steps);
                assert_eq!(ran.peaks, ran.planned, "{what}: peak == plan");
                assert!(apart(&ran, &one) < F32, "{what}: {:?} for {:?}", ran.losses, one.losses);
                check_same(&what, first.get_or_insert_with(|| ran.clone()), &ran);
            }
        }
    }
}

#[test]
fn no_schedule_changes_a_bit() {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..4];
    let schedules = ["1f1b", "model", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v"];
    for (number, mesh) in [[2, 1, 1], [2, 2, 2]].into_iter().enumerate() {
        let mut first: Option<Ran> = None;
        for (at, schedule) in schedules.into_iter().enumerate() {
            // Both meshes together try every stage with every schedule.
            for zero in sweeps::share(&[0, 1, 2, 3], number + at, 2) {
                let mut config = config(mesh);
                (config.parallel.zero, config.parallel.schedule) = (*zero, schedule.into());
                config.parallel.sequence_parallel = mesh[2] > 1;
                let what = format!("{mesh:?}, {schedule}, stage {zero}");
                let ran = rig::run(&model, &config, steps);
                assert_eq!(ran.peaks, ran.planned, "{what}: peak == plan");
                check_same(&what, first.get_or_insert_with(|| ran.clone()), &ran);
            }
        }
    }
}

type Change = fn(&mut RunConfig);

/// Options that do not change a bit on one mesh.
const SAME: &[(&str, Change)] = &[
    ("no overlap", |c| c.parallel.overlap = false),
    ("no chunks", |c| c.memory.chunk = Chunk::Word(ChunkWord::None)),
    ("small chunks", |c| c.memory.chunk = Chunk::Mebibytes(0.02)),
    ("no prefetch", |c| c.memory.prefetch = 0),
    ("made again", |c| c.memory.checkpointing = Checkpointing::Word(CheckpointingWord::Selective)),
    ("blocks computed again", |c| c.memory.checkpointing = Checkpointing::Every(1)),
    ("2 threads", |c| c.train.threads = Some(2)),
    ("cut by parameters", |c| c.parallel.cut = CutBy::Parameters),
    ("a schedule in text", |c| {
        c.parallel.schedule = "0F0,0F1,,0B0,0F2,0B1,0F3,0B2,,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n".into();
    }),
];

#[test]
fn what_may_be_combined_with_a_mesh_changes_no_bit_of_it() {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..3];
    let base = |schedule: &str, zero: u8| {
        let mut config = config([2, 2, 2]);
        (config.parallel.schedule, config.parallel.zero) = (schedule.into(), zero);
        config.parallel.sequence_parallel = true;
        config.model.dropout = 0.1;
        config
    };
    let expected = rig::run(&model, &base("1f1b", 0), steps);
    for (number, (name, change)) in SAME.iter().enumerate() {
        for (schedule, zero) in sweeps::share(&[("1f1b", 3), ("zb-h1", 2)], number, 2) {
            let mut config = base(schedule, *zero);
            change(&mut config);
            let what = format!("{name}, {schedule}, stage {zero}");
            let ran = rig::run(&model, &config, steps);
            assert_eq!(ran.peaks, ran.planned, "{what}: peak == plan");
            check_same(&what, &expected, &ran);
        }
    }
}

/// Dropout masks are the same on every mesh, so one rank with dropout is the oracle.
#[test]
fn dropout_and_deferred_sums_follow_one_rank() {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..4];
    for (name, change) in
        [("dropout", (|c| c.model.dropout = 0.2) as Change), ("deferred", |c| c.batch.reduce = Reduce::Defer)]
    {
        let mut one = config([1, 1, 1]);
        change(&mut one);
        let one = rig::run(&model, &one, steps);
        for (mesh, sequence) in [([1, 1, 4], false), ([1, 1, 4], true), ([2, 2, 2], true), ([2, 2, 1], false)]
        {
            let mut config = config(mesh);
            change(&mut config);
            config.parallel.sequence_parallel = sequence;
            let ran = rig::run(&model, &config, steps);
            let what = format!("{name}, {mesh:?}, sequence parallelism {sequence}");
            assert!(apart(&ran, &one) < F32, "{what}: {:?} for {:?}", ran.losses, one.losses);
        }
    }
}

/// Every activation that crosses ranks is rounded to the type of computation: 2^-9 of bf16, 2^-12 of f16, in each of
/// the model's dozen of layers.
#[test]
fn sixteen_bits_follow_one_rank() {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..4];
    for (compute, rounding) in [(Float::Bf16, 1.0 / 512.0), (Float::F16, 1.0 / 4096.0)] {
        let policy = |config: &mut RunConfig| {
            config.precision.compute = compute;
            config.precision.initial_scale_power = 8;
        };
        let mut one = config([1, 1, 1]);
        policy(&mut one);
        let one = rig::run(&model, &one, steps);
        let mut first: Option<Ran> = None;
        for (schedule, zero) in [("1f1b", 0), ("zb-h1", 1), ("zb-v", 2), ("gpipe", 3)] {
            let mut config = config([2, 2, 2]);
            policy(&mut config);
            (config.parallel.schedule, config.parallel.zero) = (schedule.into(), zero);
            config.parallel.sequence_parallel = true;
            let ran = rig::run(&model, &config, steps);
            let what = format!("{compute:?}, {schedule}, stage {zero}");
            assert!(apart(&ran, &one) < 12.0 * rounding, "{what}: {:?} for {:?}", ran.losses, one.losses);
            assert_eq!(ran.peaks, ran.planned, "{what}: peak == plan");
            check_same(&what, first.get_or_insert_with(|| ran.clone()), &ran);
        }
    }
}
