//! `[[optimizer.group]]`: each group takes the steps of an optimizer with its numbers, and no stage, placement or joined neighbour
//! changes a bit.

use std::sync::Arc;

use crate::rig::{self, Checkpoints, Ran, assert_same_run, same_bits};
use phalanx_models::{Arch, Bert, Model};
use phalanx_optim::{StateSpec, UpdateRule, UpdateStep, UpdatedParameter};
use phalanx_train::config::{Chunk, Float, OptimizerKind, ParameterGroup, Tier, UpdateOn};
use phalanx_train::{RunConfig, Spec};

type Change = fn(&mut RunConfig);

/// Rates that f32 has exactly, so that a group's rate is rounded nowhere.
const BASE: f64 = 1.0 / 512.0;
const OTHER: f64 = 1.0 / 64.0;

fn group(parameters: &[&str], lr: Option<f64>, weight_decay: Option<f64>) -> ParameterGroup {
    let parameters = parameters.iter().map(|pattern| pattern.to_string()).collect();
    ParameterGroup { parameters, lr, weight_decay }
}

/// GPT-2, and BERT, whose query, key and value lie one behind another. The patterns of one are for the other, too.
fn models() -> [(Arch, Arc<dyn Model>); 2] {
    let (layers, hidden, heads, intermediate, vocab, positions) = (1, 48, 4, 96, 67, 16);
    let bert = Bert { layers, hidden, heads, intermediate, vocab, positions, ..Bert::default() };
    [(Arch::GPT2, Arc::new(rig::golden_config().0)), (Arch::BERT, Arc::new(bert))]
}

/// Number of the group of [`groups`] that has a parameter; None if none has.
fn number(name: &str) -> Option<usize> {
    let first = name.contains(".query.") || name.contains(".mlp.c_fc.") || name.contains("ord_embeddings.");
    let second = name.contains(".value.") || name.ends_with("c_proj.bias") || name.contains("LayerNorm");
    if first { Some(0) } else { second.then_some(1) }
}

/// A group with another rate, and one that does not move.
fn groups(arch: Arch) -> Vec<ParameterGroup> {
    let patterns: [&[&str]; 2] = match arch == Arch::BERT {
        true => [&["*.query.*", "*.word_embeddings.*"], &["*.value.*", "*LayerNorm*"]],
        false => [&["*.mlp.c_fc.*"], &["*c_proj.bias"]],
    };
    vec![group(patterns[0], Some(OTHER), None), group(patterns[1], Some(0.0), Some(0.0))]
}

fn config(arch: Arch, world: usize, zero: u8) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    config.model.arch = arch;
    (config.parallel.data, config.parallel.zero) = (Some(world), zero);
    (config.optimizer.lr, config.optimizer.clip) = (BASE, 0.0);
    config.memory.chunk = Chunk::Mebibytes(0.05);
    config
}

fn run(model: &Arc<dyn Model>, config: &RunConfig, steps: usize) -> Ran {
    rig::run_fresh(model, config, &rig::golden_steps()[..steps])
}

/// The first step of a run with groups is that of runs with their numbers: the gradients are the same.
#[test]
fn each_group_takes_the_step_of_its_numbers() {
    let optimizers: [Change; 2] =
        [|_| {}, |c| (c.optimizer.kind, c.optimizer.weight_decay) = (OptimizerKind::Sgd, 0.01)];
    for (arch, model) in models() {
        for change in optimizers {
            let mut config = config(arch, 2, 2);
            change(&mut config);
            let [of_base, of_other] = [BASE, OTHER].map(|lr| {
                let mut config = config.clone();
                config.optimizer.lr = lr;
                run(&model, &config, 1).state
            });
            let before = run(&model, &config, 0).state;
            config.optimizer.group = groups(arch);
            let [first, all] = [1, 5].map(|steps| run(&model, &config, steps));
            assert_eq!(first.peaks, first.planned, "peak == plan");
            let mut counts = [0; 3];
            for (key, values) in first.state.iter().filter(|(key, _)| key.starts_with("parameters/")) {
                let expected = match number(key) {
                    Some(0) => &of_other[key],
                    Some(_) => &before[key],
                    None => &of_base[key],
                };
                assert!(same_bits(values, expected), "{arch:?} {key}");
                assert_eq!(
                    same_bits(&all.state[key], &before[key]),
                    number(key) == Some(1),
                    "{arch:?} {key}"
                );
                counts[number(key).unwrap_or(2)] += 1;
            }
            assert!(counts.iter().all(|count| *count > 0), "{arch:?}: {counts:?}");
        }
        let mut config = config(arch, 1, 0);
        (config.optimizer.group, config.parallel.pipeline, config.parallel.tensor) = (groups(arch), 2, 2);
        config.batch.micro = Some(2);
        let [before, ran] = [0, 2].map(|steps| run(&model, &config, steps).state);
        for (key, values) in ran.iter().filter(|(key, _)| key.starts_with("parameters/")) {
            let is_still = same_bits(values, &before[key]);
            assert_eq!(is_still, number(key) == Some(1), "{arch:?} on a mesh: {key}");
        }
    }
}

/// A decay that a group sets is for all of its parameters; else the kind decides.
#[test]
fn the_decay_of_a_group_is_for_biases_too() {
    let [(arch, model), _] = models();
    let with = |groups: &[ParameterGroup]| {
        let mut config = config(arch, 1, 0);
        // Decays are multiples of powers of 2, and a constant learning rate.
        (config.optimizer.weight_decay, config.optimizer.group) = (0.25, groups.to_vec());
        run(&model, &config, 3)
    };
    let plain = with(&[]);
    let alike = [group(&["*.c_*.weight", "*.w?e.*"], None, Some(0.25)), group(&["*"], Some(BASE), None)];
    assert_same_run("a group like the default", &plain, &with(&alike));
    let decayed = with(&[group(&["*.ln_1.weight"], None, Some(0.5))]);
    for (key, values) in decayed.state.iter().filter(|(key, _)| key.starts_with("parameters/")) {
        let sum = |values: &[f32]| values.iter().map(|x| f64::from(*x)).sum::<f64>();
        let (own, other) = (sum(values), sum(&plain.state[key]));
        // Ones that lose lr * 0.5 of themselves three times; the gradients of the others hardly change.
        let lost = if key.ends_with("ln_1.weight") { 3.0 * BASE * 0.5 * values.len() as f64 } else { 0.0 };
        assert!(
            (other - own - lost).abs() < 0.2 * BASE * values.len() as f64,
            "{key}: {other} - {own}, {lost}"
        );
    }
}

#[test]
fn no_stage_or_placement_changes_a_bit() {
    let changes: [(&str, Change); 8] = [
        ("stage 0", |c| c.parallel.zero = 0),
        ("stage 1, one chunk", |c| (c.parallel.zero, c.memory.chunk) = (1, Chunk::Mebibytes(64.0))),
        ("stage 3", |c| c.parallel.zero = 3),
        ("states in host memory", |c| c.memory.optimizer = Tier::Host),
        ("states in host memory, updated by the device", |c| {
            (c.memory.optimizer, c.memory.update, c.memory.buffer_mb) =
                (Tier::Host, UpdateOn::Device, 1.0 / 64.0);
        }),
        ("everything on disk", |c| {
            (c.parallel.zero, c.memory.optimizer, c.memory.parameters) = (3, Tier::Nvme, Tier::Nvme);
            (c.memory.nvme_path, c.memory.buffer_mb) =
                (Some(std::env::temp_dir().as_path().into()), 1.0 / 64.0);
        }),
        ("updates within backward", |c| c.memory.update_in_backward = true),
        ("updates within backward, states in host memory", |c| {
            (c.memory.update_in_backward, c.memory.optimizer) = (true, Tier::Host);
        }),
    ];
    for ((arch, model), compute) in models().into_iter().zip([Float::Bf16, Float::F32]) {
        let mut config = config(arch, 2, 2);
        (config.precision.compute, config.optimizer.group) = (compute, groups(arch));
        let expected = run(&model, &config, 2);
        for (name, change) in changes {
            let mut config = config.clone();
            change(&mut config);
            for host_addressable in [true, false] {
                let spec = rig::spec(&model, &config);
                let spec = rig::addressed(spec, host_addressable);
                let files = Checkpoints { fresh: true, ..Checkpoints::default() };
                let ran = rig::run_spec(spec, &config, &rig::golden_steps()[..2], &files);
                let what = format!("{arch:?}, {name}, host addresses {host_addressable}");
                assert_same_run(&what, &expected, &ran);
            }
        }
    }
}

/// An optimizer of the caller's own gets the rate of the group.
#[test]
fn own_optimizers_get_the_rate_of_the_group() {
    struct Descent;
    impl UpdateRule for Descent {
        fn states(&self, _: &UpdatedParameter) -> Vec<StateSpec> {
            Vec::new()
        }
        fn update(&self, step: &UpdateStep, p: &mut [f32], g: &[f32], _: &mut [&mut [f32]]) {
            assert_eq!(
                step.lr,
                [OTHER, 0.0, BASE][number(&step.of.name).unwrap_or(2)] as f32,
                "{}",
                step.of.name
            );
            p.iter_mut().zip(g).for_each(|(p, g)| *p -= step.lr * g);
        }
    }
    for (arch, model) in models() {
        let mut config = config(arch, 2, 1);
        config.optimizer.group = groups(arch);
        let refusal = rig::spec(&model, &config).with_optimizer(Descent).unwrap_err().to_string();
        assert!(refusal.contains("optimizer.group.weight_decay"), "{refusal}");
        config.optimizer.group[1].weight_decay = None;
        let spec = rig::spec(&model, &config).with_optimizer(Descent).unwrap();
        let files = Checkpoints { fresh: true, ..Checkpoints::default() };
        rig::run_spec(spec, &config, &rig::golden_steps()[..1], &files);
    }
}

#[test]
fn groups_that_cannot_be_are_refused() {
    let [(arch, model), _] = models();
    let refused = |groups: &[ParameterGroup], change: Change| {
        let mut config = config(arch, 1, 0);
        config.optimizer.group = groups.to_vec();
        change(&mut config);
        Spec::new(&config, Arc::clone(&model), 8, 1).map(drop).unwrap_err().to_string()
    };
    let fine = group(&["*.bias"], Some(0.1), None);
    let frozen: Change = |c| c.model.frozen = vec!["*.bias".into()];
    let still: Change = |c| c.optimizer.lr = 0.0;
    for (groups, change, words) in [
        (
            vec![group(&["*.bias", "*.atn.*"], Some(0.1), None)],
            (|_| {}) as Change,
            ["*.atn.*", "transformer.h.*.attn.c_attn.weight"],
        ),
        (vec![group(&[], Some(0.1), None)], |_| {}, ["optimizer.group.parameters = []", "no pattern"]),
        (vec![group(&["*.bias"], Some(-1.0), None)], |_| {}, ["optimizer.group.lr = -1", "0 or more"]),
        (
            vec![group(&["*"], None, Some(f64::NAN))],
            |_| {},
            ["optimizer.group.weight_decay = NaN", "0 or more"],
        ),
        (vec![group(&["*.bias"], None, None)], |_| {}, ["*.bias", "sets nothing"]),
        (
            vec![fine.clone(), group(&["*.ln_f.bias"], None, Some(0.0))],
            |_| {},
            ["*.ln_f.bias", "no group before it"],
        ),
        (vec![fine.clone()], frozen, ["*.bias", "no trained parameter"]),
        (vec![fine], still, ["optimizer.group.lr = 0.1", "optimizer.lr = 0"]),
    ] {
        let text = refused(&groups, change);
        assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
    }
}
