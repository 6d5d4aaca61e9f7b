//! Recomputation changes no bit, whatever memory tensors lie in, dropout included; and dropout does not depend on the division of
//! the global batch.

use crate::rig;
use crate::rig::Ran;
use phalanx_train::RunConfig;
use phalanx_train::config::{Checkpointing, CheckpointingWord};

const SELECTIVE: Checkpointing = Checkpointing::Word(CheckpointingWord::Selective);
const BLOCK: Checkpointing = Checkpointing::Word(CheckpointingWord::Block);

/// 5 steps of `global` sequences.
fn run(config: &RunConfig) -> Ran {
    let (model, _) = rig::golden_config();
    let outcome = rig::run(&model, config, &rig::golden_steps()[..5]);
    assert!(outcome.losses.iter().all(|l| l.is_finite()));
    assert_eq!(outcome.peaks, outcome.planned, "peak == plan");
    outcome
}

fn base(world: usize, dropout: f64) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    config.parallel.data = Some(world);
    config.model.dropout = dropout;
    config
}

fn assert_same_bits(expected: &Ran, got: &Ran, what: &str) {
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    // The state first: a difference there names the tensor.
    assert!(!expected.state.is_empty() && expected.state.len() == got.state.len(), "{what}: tensors");
    for (tensor, values) in &expected.state {
        assert!(bits(values) == bits(&got.state[tensor]), "{what}: {tensor} differs");
    }
    assert_eq!(bits(&expected.losses), bits(&got.losses), "{what}: losses");
    assert_eq!(bits(&expected.grad_norms), bits(&got.grad_norms), "{what}: norms");
}

/// Compares every policy, stage and number of ranks with stage 0 without recomputation.
fn check(dropout: f64) {
    for world in [1, 2] {
        let expected = run(&base(world, dropout));
        for stage in 0..=3 {
            for checkpointing in [SELECTIVE, BLOCK, Checkpointing::Every(2)] {
                let mut config = base(world, dropout);
                config.parallel.zero = stage;
                config.memory.checkpointing = checkpointing;
                let what = format!("{world} ranks, stage {stage}, {checkpointing:?}, dropout {dropout}");
                assert_same_bits(&expected, &run(&config), &what);
            }
        }
    }
}

#[test]
fn every_policy_gives_the_same_bits() {
    check(0.0);
}

#[test]
fn every_policy_gives_the_same_bits_with_dropout() {
    check(0.1);
}

#[test]
fn every_policy_gives_the_same_bits_when_micro_batches_accumulate() {
    let mut config = base(2, 0.1);
    config.batch.micro = Some(2);
    let expected = run(&config);
    for checkpointing in [SELECTIVE, BLOCK] {
        config.memory.checkpointing = checkpointing;
        assert_same_bits(&expected, &run(&config), &format!("{checkpointing:?}"));
    }
}

#[test]
fn less_is_kept() {
    let activations = |checkpointing| {
        let mut config = base(1, 0.1);
        config.memory.checkpointing = checkpointing;
        let (model, _) = rig::golden_config();
        let spec = phalanx_train::Spec::new(&config, model, 0, 1).unwrap();
        let plan = phalanx_train::RunPlan::new(spec).unwrap();
        plan.ranks[0].memory.peak.categories.activations
    };
    let none = Checkpointing::Word(CheckpointingWord::None);
    let kept = [none, SELECTIVE, BLOCK].map(activations);
    assert!(kept.is_sorted_by(|more, less| more > less), "{kept:?}");
    assert_eq!(activations(Checkpointing::Every(1)), kept[2], "every block");
}

/// The same global batch on other ranks and in other micro-batches has the same dropout masks, so only the order of
/// sums differs.
#[test]
fn dropout_does_not_depend_on_how_the_batch_is_cut() {
    // As in goldens.rs: f32 sums in another order, on values near 4 and 1.
    const LOSS_TOLERANCE: f32 = 2e-6;
    const NORM_TOLERANCE: f32 = 1.2e-6;
    let mut config = base(1, 0.1);
    config.batch.global = 4;
    let expected = run(&config);
    for (world, micro_batch_size) in [(1, 2), (1, 1), (2, 2), (2, 1), (4, 1)] {
        config.parallel.data = Some(world);
        config.batch.micro = Some(micro_batch_size);
        let got = run(&config);
        for (name, tolerance, got, expected) in [
            ("loss", LOSS_TOLERANCE, &got.losses, &expected.losses),
            ("norm", NORM_TOLERANCE, &got.grad_norms, &expected.grad_norms),
        ] {
            for (i, (got, expected)) in rig::pairs(got, expected).enumerate() {
                let off = (got - expected).abs();
                assert!(
                    off < tolerance,
                    "{world} ranks of {micro_batch_size}: {name} {i}: {got} for {expected}"
                );
            }
        }
    }
    // Different masks would exceed the tolerance by far.
    config.train.seed += 1;
    let other = run(&config);
    assert!((other.losses[0] - expected.losses[0]).abs() > 100.0 * LOSS_TOLERANCE);
}

#[test]
fn evaluation_drops_nothing_and_reports_the_plain_loss() {
    let evaluated = |config: &RunConfig| {
        let (model, _) = rig::golden_config();
        *rig::run(&model, config, &[]).losses.last().unwrap()
    };
    let expected = evaluated(&base(1, 0.0));
    let mut config = base(1, 0.5);
    config.loss.label_smoothing = 0.1;
    config.loss.z_loss = 1e-2;
    assert_eq!(evaluated(&config).to_bits(), expected.to_bits());
}
