//! Every phase of a run behind every other, with each option that leaves gathers, copies or work of the host in flight between phases:
//! nothing panics or hangs, and every phase has the bits of a run with nothing in flight.

use crate::rig;
use crate::rig::State;
use phalanx_tensor::IGNORED;
use phalanx_testing::sweeps;
use phalanx_train::config::{Chunk, Float, Tier};
use phalanx_train::rank::Rank;
use phalanx_train::{RunConfig, RunPlan};

/// A phase of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Phase {
    Step,
    /// A step without any target, which is not applied.
    Skipped,
    Evaluate,
    Save,
    /// Initial values in place of the state.
    Load,
    Diagnose,
}

const PHASES: [Phase; 6] =
    [Phase::Step, Phase::Skipped, Phase::Evaluate, Phase::Save, Phase::Load, Phase::Diagnose];

/// A walk on which each phase follows each other one, and itself: a de Bruijn sequence of order 2.
fn walk() -> Vec<Phase> {
    let mut walk = Vec::new();
    for (i, phase) in PHASES.into_iter().enumerate() {
        walk.push(phase);
        PHASES[i + 1..].iter().for_each(|later| walk.extend([phase, *later]));
    }
    walk.push(PHASES[0]);
    walk
}

/// Results of a phase on one rank: numbers, and after a save the rank's part of the state.
pub type Shown = (Vec<u32>, rig::Pieces);

/// Runs a phase.
pub fn shown(engine: &mut Rank, config: &RunConfig, phase: Phase, number: &mut u64) -> Shown {
    let steps = rig::golden_steps();
    let mut batch = rig::batch(engine, config, &steps[*number as usize % steps.len()]);
    let numbers = match phase {
        Phase::Step | Phase::Skipped => {
            *number += 1;
            if phase == Phase::Skipped {
                batch.targets.fill(IGNORED);
            }
            let outcome = engine.step(*number, &batch, false).unwrap();
            assert!(phase == Phase::Step || outcome.skipped);
            vec![outcome.loss.to_bits(), outcome.grad_norm.to_bits(), u32::from(outcome.skipped)]
        }
        Phase::Evaluate => vec![engine.evaluate(&batch).unwrap().loss.to_bits()],
        Phase::Save => engine.save(|_, _| Ok(())).map(|()| Vec::new()).unwrap(),
        Phase::Load => engine.initialise(1).map(|()| Vec::new()).unwrap(),
        Phase::Diagnose => {
            let found = engine.diagnose(*number, &batch, batch.counted_targets(), 1.0).unwrap();
            vec![u32::from(found.is_some())]
        }
    };
    (numbers, if phase == Phase::Save { rig::pieces(engine) } else { Vec::new() })
}

/// Numbers and state that each phase of the walk has shown.
fn walked(config: &RunConfig) -> Vec<(Vec<u32>, State)> {
    let (model, _) = rig::golden_config();
    let plan = RunPlan::new(rig::spec(&model, config).counting_targets()).unwrap();
    let ranks = rig::on_planned_ranks(&plan, &|spec, groups| spec.network(&groups.tensor), &|engine, _| {
        engine.initialise(1).unwrap();
        let mut number = 0;
        let shown = |phase| shown(engine, config, phase, &mut number);
        walk().into_iter().map(shown).collect::<Vec<_>>()
    });
    let of_all = |at: usize| {
        let numbers = ranks[0][at].0.clone();
        assert!(ranks.iter().all(|rank| rank[at].0 == numbers), "all ranks report the same numbers");
        (numbers, rig::merge(&plan, ranks.iter().map(|rank| rank[at].1.clone())))
    };
    (0..walk().len()).map(of_all).collect()
}

type Change = (&'static str, fn(&mut RunConfig));

/// Options that leave something in flight when a phase is over.
const IN_FLIGHT: [Change; 9] = [
    ("overlap", |_| {}),
    ("states in host memory", |c| (c.memory.optimizer, c.memory.gradients) = (Tier::Host, Tier::Host)),
    ("delayed_update", |c| {
        (c.memory.optimizer, c.memory.gradients) = (Tier::Host, Tier::Host);
        c.memory.delayed_update = true;
    }),
    ("update_in_backward", |c| (c.memory.update_in_backward, c.optimizer.clip) = (true, 0.0)),
    ("update_in_backward, states in host memory", |c| {
        (c.memory.update_in_backward, c.optimizer.clip) = (true, 0.0);
        c.memory.optimizer = Tier::Host;
    }),
    ("gradients_in_place", |c| {
        (c.memory.gradients_in_place, c.precision.accumulate) = (true, Float::Bf16);
    }),
    ("activations in host memory", |c| c.memory.activations = Tier::Host),
    ("f16 with overflows", |c| {
        (c.precision.compute, c.precision.initial_scale_power) = (Float::F16, 24);
        (c.precision.hysteresis, c.precision.loss_scale_window) = (1, 2);
    }),
    ("two micro-batches", |c| c.batch.micro = Some(c.batch.global / 2 / c.data())),
];

/// A configuration with several chunks, whose tiles are smaller than they are.
pub fn in_chunks(world: usize, zero: u8) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.data, config.parallel.zero) = (Some(world), zero);
    config.precision.compute = Float::Bf16;
    config.memory.chunk = Chunk::Mebibytes(0.3);
    config.memory.buffer_mb = 3.0 / 64.0;
    config
}

/// The same arithmetic with nothing in flight, and all in device memory where that has the same bits.
fn at_rest(mut config: RunConfig) -> RunConfig {
    (config.parallel.zero, config.parallel.overlap) = (0, false);
    if !config.memory.delayed_update {
        (config.memory.optimizer, config.memory.gradients) = (Tier::Device, Tier::Device);
    }
    config.memory.activations = Tier::Device;
    (config.memory.update_in_backward, config.memory.gradients_in_place) = (false, false);
    config
}

#[test]
fn every_phase_behind_every_other() {
    let ranks = [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)];
    for (at, (name, change)) in IN_FLIGHT.into_iter().enumerate() {
        for &(world, zero) in sweeps::share(&ranks, at, 2) {
            let mut config = in_chunks(world, zero);
            change(&mut config);
            let (expected, got) = (walked(&at_rest(config.clone())), walked(&config));
            for (at, (expected, got)) in expected.into_iter().zip(got).enumerate() {
                let behind = &walk()[at.saturating_sub(2)..=at];
                let what = format!("{name}, {world} ranks, stage {zero}, phase {at}: {behind:?}");
                assert_eq!(expected.0, got.0, "{what}: numbers");
                for (tensor, values) in &expected.1 {
                    assert!(rig::same_bits(values, &got.1[tensor]), "{what}: {tensor} differs");
                }
            }
        }
    }
}

#[test]
fn the_walk_has_every_pair() {
    let walk = walk();
    let pairs = PHASES.iter().flat_map(|a| PHASES.map(|b| [*a, b]));
    assert!(pairs.into_iter().all(|pair| walk.windows(2).any(|two| two == pair)));
    assert_eq!(walk.len(), PHASES.len() * PHASES.len() + 1);
}
