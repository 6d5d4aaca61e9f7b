//! Gradients in the place of parameters (14 bytes per parameter instead of 16): the same bits on every mesh, stage and policy,
//! also around skipped steps, and as much less memory as gradients took.

use crate::rig;
use crate::rig::{Policy, assert_same_state, same_bits};
use phalanx_plan::trace::{Category, PhaseName};
use phalanx_testing::sweeps;
use phalanx_train::config::{
    Checkpointing, Chunk, Float, OptimizerKind, PlacementPolicy, PrecisionConfig, Reduce, Tier, Updates,
};
use phalanx_train::{RunConfig, RunPlan};

type Change = fn(&mut RunConfig);

/// Policies whose gradients have the type of parameters.
const POLICIES: [Policy; 4] = [
    ("bf16", |p| (p.compute, p.accumulate) = (Float::Bf16, Float::Bf16)),
    ("bf16, sent in f32", |p| {
        (p.compute, p.accumulate, p.communicate) = (Float::Bf16, Float::Bf16, Some(Float::F32));
    }),
    ("f16, first scales overflow", |p| {
        (p.compute, p.accumulate) = (Float::F16, Float::F16);
        (p.initial_scale_power, p.hysteresis, p.loss_scale_window) = (20, 1, 2);
    }),
    ("f16, sent in bf16", |p| {
        (p.compute, p.accumulate, p.communicate) = (Float::F16, Float::F16, Some(Float::Bf16));
        (p.initial_scale_power, p.hysteresis, p.loss_scale_window) = (20, 1, 2);
    }),
];

fn config(world: usize, zero: u8, policy: fn(&mut PrecisionConfig)) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.data, config.parallel.zero) = (Some(world), zero);
    config.memory.chunk = Chunk::Mebibytes(0.05);
    policy(&mut config.precision);
    config
}

/// Compares a run with the same run with gradients in place.
fn check(what: &str, config: &RunConfig) {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..5];
    let expected = rig::run(&model, config, steps);
    let mut in_place = config.clone();
    in_place.memory.gradients_in_place = true;
    let got = rig::run(&model, &in_place, steps);
    assert!(same_bits(&got.losses, &expected.losses), "{what}: {:?} != {:?}", got.losses, expected.losses);
    assert!(same_bits(&got.grad_norms, &expected.grad_norms), "{what}: gradient norms");
    assert_eq!(got.skipped, expected.skipped, "{what}");
    assert_eq!(got.skipped[0], config.precision.compute == Float::F16, "{what}: the first step overflows");
    assert_same_state(what, &expected.state, &got.state);
    assert_eq!(got.peaks, got.planned, "{what}: peak == plan");
}

#[test]
fn no_stage_or_policy_changes_a_bit() {
    let ranks = [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3)];
    for (number, (name, policy)) in POLICIES.into_iter().enumerate() {
        for &(world, zero) in sweeps::share(&ranks, number, 2) {
            check(&format!("{name}, {world} ranks, stage {zero}"), &config(world, zero, policy));
        }
    }
}

#[test]
fn nothing_else_changes_a_bit() {
    let changes: [(&str, Change); 7] = [
        ("no overlap", |c| c.parallel.overlap = false),
        ("tiles of one block", |c| c.memory.buffer_mb = 1.0 / 64.0),
        ("prefetch 4", |c| c.memory.prefetch = 4),
        ("blocks computed again", |c| c.memory.checkpointing = Checkpointing::Every(1)),
        ("SGD", |c| (c.optimizer.kind, c.optimizer.lr) = (OptimizerKind::Sgd, 0.05)),
        ("some parameters whole, some states in host memory", |c| {
            (c.memory.shard_param_frac, c.memory.offload_optim_frac) = (Some(0.5), Some(0.5));
        }),
        ("reduced at the end", |c| c.batch.reduce = Reduce::Defer),
    ];
    for (name, change) in changes {
        let mut config = config(2, 3, POLICIES[0].1);
        change(&mut config);
        check(name, &config);
    }
}

#[test]
fn tensor_and_pipeline_axes_change_no_bit() {
    for ([pipeline, data, tensor], zero) in [([1, 2, 2], 1), ([2, 2, 1], 3), ([2, 1, 2], 0), ([2, 2, 2], 2)] {
        let mut config = config(data, zero, POLICIES[0].1);
        (config.parallel.pipeline, config.parallel.tensor) = (pipeline, tensor);
        config.parallel.sequence_parallel = tensor > 1;
        // Runs one micro-batch.
        config.parallel.schedule = "model".into();
        check(&format!("{pipeline} x {data} x {tensor}, stage {zero}"), &config);
    }
}

/// With everything else resident, the model states take 14 bytes per parameter of a rank's part.
#[test]
fn model_states_take_14_bytes_per_parameter() {
    let (model, _) = rig::golden_config();
    for (world, zero) in [(1, 0), (2, 1), (4, 3)] {
        let states = |in_place| {
            let mut config = config(world, zero, POLICIES[0].1);
            config.memory.gradients_in_place = in_place;
            let plan = RunPlan::new(rig::spec(&model, &config)).unwrap();
            let kept = plan.of(0).memory.phase(PhaseName::Init).unwrap().peak.categories;
            let of = |category| kept.get(category);
            (of(Category::Parameters), of(Category::Gradients), of(Category::Optimizer), plan.textbook.state)
        };
        let (parameters, gradients, optimizer, textbook) = states(true);
        let (with_buffer, buffered, ..) = states(false);
        assert_eq!((gradients, textbook.gradients), (0, 0));
        assert!(buffered > 0 && with_buffer == parameters);
        if [0, 3].contains(&zero) {
            assert_eq!(optimizer, 6 * parameters, "2 + 12 bytes for each of this rank's elements");
        }
    }
}

#[test]
fn what_it_needs_is_said() {
    let cases: [(Change, &str); 7] = [
        (|c| c.precision = PrecisionConfig::default(), "master weights"),
        (|c| c.precision.accumulate = Float::F32, "precision.accumulate"),
        (|c| c.batch.micro = Some(2), "one micro-batch per step, but each rank has 2"),
        (|c| c.memory.optimizer = Tier::Host, "needs memory.optimizer = \"device\""),
        (|c| c.memory.placement = Some(PlacementPolicy::Host), "in device memory"),
        (|c| c.memory.offload_optim_frac = Some(1.0), "in device memory"),
        (|c| (c.parallel.zero, c.parallel.updates) = (0, Updates::Asynchronous), "parallel.updates"),
    ];
    for (change, words) in cases {
        let mut config = config(2, 2, POLICIES[0].1);
        config.memory.gradients_in_place = true;
        config.check().unwrap();
        change(&mut config);
        let refusal = config.check().unwrap_err().to_string();
        assert!(refusal.contains(words), "no {words:?} in: {refusal}");
    }
}

/// After an overflow at the smallest loss scale the ranks look for the reason with the parameters of the step.
#[test]
fn a_step_that_cannot_be_applied_is_diagnosed_with_its_parameters() {
    let (model, _) = rig::golden_config();
    let mut base = config(2, 2, POLICIES[2].1);
    (base.precision.loss_scale, base.precision.initial_scale_power) = (2f64.powi(32), 16);
    let said = [false, true].map(|in_place| {
        let mut config = base.clone();
        config.memory.gradients_in_place = in_place;
        let network =
            |spec: &phalanx_train::Spec, groups: &phalanx_train::Groups| spec.network(&groups.tensor);
        let (_, errors) = rig::on_ranks(&model, &config, &network, &|engine, _| {
            engine.initialise(1).unwrap();
            let sequences = rig::golden_steps().swap_remove(0);
            let batch = rig::batch(engine, &config, &sequences);
            (1..=200).find_map(|number| engine.step(number, &batch, false).err()).unwrap().to_string()
        });
        errors
    });
    assert_eq!(said[0], said[1]);
}
