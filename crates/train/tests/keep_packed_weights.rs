//! Weights that stay packed between their products: the same bits as products that pack by themselves, the planned peak, and
//! refusals where they cannot stay.

use crate::rig;
use crate::rig::{POLICIES, Ran, assert_same_state, same_bits};
use phalanx_train::config::{
    Checkpointing, Float, KeepPacked, OptimizerKind, PrecisionConfig, Reduce, Tier, Updates,
};
use phalanx_train::rank::Batch;
use phalanx_train::{RunConfig, RunPlan, Spec};

type Change = fn(&mut RunConfig);

/// Eight sequences a step, in micro-batches of one.
fn config(world: usize, zero: u8, policy: fn(&mut PrecisionConfig)) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.data, config.parallel.zero) = (Some(world), zero);
    config.batch.micro = Some(1);
    policy(&mut config.precision);
    config
}

fn run(config: &RunConfig, keep: KeepPacked, host_addressable: bool) -> Ran {
    let (model, _) = rig::golden_config();
    let mut config = config.clone();
    config.memory.keep_packed_weights = keep;
    let spec = rig::spec(&model, &config);
    let spec = Spec { host_addressable: spec.host_addressable && host_addressable, ..spec };
    rig::run_spec(spec, &config, &rig::golden_steps()[..5], &rig::Checkpoints::default())
}

fn compare(what: &str, expected: &Ran, got: &Ran) {
    assert!(same_bits(&got.losses, &expected.losses), "{what}: {:?} != {:?}", got.losses, expected.losses);
    assert!(same_bits(&got.grad_norms, &expected.grad_norms), "{what}: gradient norms");
    assert_eq!(got.skipped, expected.skipped, "{what}: skipped steps");
    assert_same_state(what, &expected.state, &got.state);
    assert_eq!(got.peaks, got.planned, "{what}: peak == plan");
    assert_eq!(got.step_peaks, got.step_planned, "{what}: peak == plan in a step");
}

/// Compares a run with the same run whose weights stay packed, on both kinds of devices.
fn check(what: &str, config: &RunConfig) {
    let expected = run(config, KeepPacked::Off, true);
    for host_addressable in [true, false] {
        let what = format!("{what}, host addresses device memory: {host_addressable}");
        compare(&what, &expected, &run(config, KeepPacked::On, host_addressable));
    }
}

/// Bytes of packed weights of rank 0.
fn packed_bytes(config: &RunConfig, keep: KeepPacked) -> u64 {
    let (model, _) = rig::golden_config();
    let mut config = config.clone();
    config.memory.keep_packed_weights = keep;
    RunPlan::new(rig::spec(&model, &config)).unwrap().of(0).packed_bytes
}

#[test]
fn no_stage_or_policy_changes_a_bit() {
    for (name, policy) in POLICIES.into_iter().chain([("f32", (|_| {}) as fn(&mut PrecisionConfig))]) {
        for (world, zero) in [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)] {
            check(&format!("{name}, {world} ranks, stage {zero}"), &config(world, zero, policy));
        }
    }
}

#[test]
fn nothing_else_changes_a_bit() {
    let changes: [(&str, Change); 10] = [
        ("one micro-batch", |c| c.batch.micro = None),
        ("blocks computed again", |c| c.memory.checkpointing = Checkpointing::Every(1)),
        ("one micro-batch, some blocks computed again", |c| {
            (c.batch.micro, c.memory.checkpointing) = (None, Checkpointing::Every(2));
        }),
        ("updates within backward", |c| {
            (c.batch.micro, c.optimizer.clip, c.memory.update_in_backward) = (None, 0.0, true);
            c.memory.checkpointing = Checkpointing::Every(1);
        }),
        ("gradients in the place of parameters", |c| {
            (c.batch.micro, c.memory.gradients_in_place) = (None, true);
            (c.precision.compute, c.precision.accumulate) = (Float::Bf16, Float::Bf16);
        }),
        ("delayed updates", |c| {
            (c.memory.gradients, c.memory.optimizer, c.memory.delayed_update) =
                (Tier::Host, Tier::Host, true);
            c.precision.compute = Float::Bf16;
        }),
        ("reduced at the end", |c| c.batch.reduce = Reduce::Defer),
        ("no overlap", |c| c.parallel.overlap = false),
        ("SGD, states in host memory", |c| {
            (c.optimizer.kind, c.optimizer.lr, c.memory.optimizer) = (OptimizerKind::Sgd, 0.05, Tier::Host);
        }),
        ("two threads", |c| c.train.threads = Some(2)),
    ];
    for (name, change) in changes {
        for (world, zero) in [(1, 0), (2, 2)] {
            let mut config = config(world, zero, |_| {});
            change(&mut config);
            check(&format!("{name}, {world} ranks, stage {zero}"), &config);
        }
    }
}

#[test]
fn tensor_and_pipeline_axes_change_no_bit() {
    for ([pipeline, data, tensor], zero, schedule) in [
        ([1, 1, 2], 0, "1f1b"),
        ([1, 2, 2], 1, "1f1b"),
        ([2, 1, 1], 2, "zb-v"),
        ([2, 2, 1], 1, "zb-h1"),
        ([2, 1, 2], 0, "interleaved"),
    ] {
        let mut config = config(data, zero, |_| {});
        (config.parallel.pipeline, config.parallel.tensor) = (pipeline, tensor);
        config.parallel.schedule = schedule.into();
        config.parallel.sequence_parallel = tensor > 1;
        check(&format!("{pipeline} x {data} x {tensor}, {schedule}, stage {zero}"), &config);
    }
}

#[test]
fn a_run_goes_on_with_or_without_them() {
    let (model, _) = rig::golden_config();
    let (steps, folder) = (rig::golden_steps(), tempfile::tempdir().unwrap());
    let with = |keep| {
        let mut config = config(2, 1, |_| {});
        config.memory.keep_packed_weights = keep;
        config
    };
    let whole = rig::run(&model, &with(KeepPacked::Off), &steps);
    for (first, second) in [(KeepPacked::Off, KeepPacked::On), (KeepPacked::On, KeepPacked::Off)] {
        let dir = folder.path().join(format!("{first:?}"));
        let save = rig::Checkpoints { save: Some(dir.clone()), ..Default::default() };
        rig::run_between(&model, &with(first), &steps[..10], &save);
        let restore = rig::Checkpoints { restore: Some(dir.join("step-10")), ..Default::default() };
        let rest = rig::run_between(&model, &with(second), &steps[10..], &restore);
        assert_eq!(rest.state, whole.state, "{first:?}, then {second:?}");
    }
}

/// In an evaluation, all batches share the packed weights, which it frees.
#[test]
fn evaluations_change_no_bit() {
    let (model, _) = rig::golden_config();
    let losses = |keep| {
        let mut config = config(1, 0, |_| {});
        config.memory.keep_packed_weights = keep;
        let spec = Spec::new(&config, model.clone(), 4, 1).unwrap();
        let plan = RunPlan::new(spec).unwrap();
        let factory = phalanx_cpu::CpuFactory::new();
        let ran = phalanx_train::on_threads(&factory, &plan, |engine| {
            engine.load(|_, _, _, _, _| Ok(())).unwrap();
            let spec = plan.spec.clone();
            let batch = |count| Batch::with_rows(spec.micro_batch_size * count, spec.seq);
            let (windows, step) = (batch(spec.evaluation_batches), batch(spec.micro_batches));
            (1..=2)
                .flat_map(|number| {
                    let loss = engine.evaluate(&windows).unwrap().loss;
                    [loss.to_bits(), engine.step(number, &step, false).unwrap().loss.to_bits()]
                })
                .collect::<Vec<_>>()
        });
        ran.unwrap()
    };
    assert_eq!(losses(KeepPacked::Off), losses(KeepPacked::On));
}

/// A dry run that leaves micro-batches out plans what one of all micro-batches does.
#[test]
fn repeated_micro_batches_need_not_run_dry() {
    let (model, _) = rig::golden_config();
    for (pipeline, schedule) in [(1, "1f1b"), (2, "1f1b"), (2, "zb-h1")] {
        let mut config = config(1, 0, |_| {});
        (config.parallel.pipeline, config.parallel.schedule) = (pipeline, schedule.into());
        (config.batch.global, config.memory.keep_packed_weights) = (24, KeepPacked::On);
        let spec = rig::spec(&model, &config);
        let [short, long] = [RunPlan::new(spec.clone()), RunPlan::unabridged(spec)].map(Result::unwrap);
        for (short, long) in short.ranks.iter().zip(&long.ranks) {
            assert_eq!((short.peak(), short.packed_bytes), (long.peak(), long.packed_bytes), "{schedule}");
            assert!(short.packed_bytes > 0, "{schedule}");
        }
    }
}

/// A weight is packed for a product that a step has more than once.
#[test]
fn only_weights_with_several_products_stay_packed() {
    let mut several = config(1, 0, |_| {});
    let mut single = several.clone();
    single.batch.micro = None;
    let mut again = single.clone();
    again.memory.checkpointing = Checkpointing::Every(1);
    let [several, single, again] =
        [&mut several, &mut single, &mut again].map(|c| packed_bytes(c, KeepPacked::On));
    // The head has several slices of rows in each micro-batch.
    assert!(0 < single && single < again && again < several, "{single}, {again}, {several}");
}

#[test]
fn what_cannot_keep_them_is_refused_or_does_without() {
    let refused: [(&str, Change); 2] = [
        ("parallel.zero", |c| c.parallel.zero = 3),
        ("synchronous", |c| c.parallel.updates = Updates::Asynchronous),
    ];
    for (word, change) in refused {
        let mut config = config(2, 0, |_| {});
        change(&mut config);
        config.memory.keep_packed_weights = KeepPacked::On;
        let error = config.check().unwrap_err();
        assert_eq!(error.key, "memory.keep_packed_weights");
        assert!(error.to_string().contains(word), "{error}");
    }
    assert_eq!(packed_bytes(&config(2, 3, |_| {}), KeepPacked::Auto), 0);
    let mut limited = config(2, 1, |_| {});
    assert!(packed_bytes(&limited, KeepPacked::Auto) > 0);
    limited.memory.limit_mb = Some(0.5);
    assert_eq!(packed_bytes(&limited, KeepPacked::Auto), 0);
    assert!(packed_bytes(&limited, KeepPacked::On) > 0);
}
