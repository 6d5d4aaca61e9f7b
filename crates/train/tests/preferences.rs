//! Losses of preferences: TRL's; the same whatever the mesh, the micro-batches and the placement; and with adapters over a quantised base.

use std::sync::Arc;

use phalanx_checkpoint::HuggingFaceDir;
use phalanx_models::{Model, from_config};
use phalanx_testing::sweeps;
use phalanx_train::config::{
    Checkpointing, Float, LoraBase, LoraConfig, Paths, PreferenceConfig, PreferenceWord, Reduce, Sum, Tier,
};
use phalanx_train::rank::Rewards;
use phalanx_train::{Rank, RunConfig};

use crate::decoders::config;
use crate::mesh::F32;
use crate::rig::{
    self, Checkpoints, LEFT_OUT, Ran, Steps, assert_same_run, assert_same_state, pairs, same_bits,
};

type Change = fn(&mut RunConfig);

const KINDS: [(&str, PreferenceWord); 7] = [
    ("dpo", PreferenceWord::Dpo),
    ("robust", PreferenceWord::Robust),
    ("dpo-norm", PreferenceWord::DpoNorm),
    ("ipo", PreferenceWord::Ipo),
    ("orpo", PreferenceWord::Orpo),
    ("simpo", PreferenceWord::Simpo),
    ("kto", PreferenceWord::Kto),
];

/// Pairs of a step, and tokens of a sequence.
const PAIRS: usize = 4;
const SEQ: usize = 16;

fn golden(file: &str, name: &str) -> Vec<f32> {
    rig::golden_tensor(&format!("preferences/{file}.safetensors"), name)
}

fn model() -> Arc<dyn Model> {
    from_config(HuggingFaceDir::open(&rig::golden().join("decoders/llama")).unwrap().config()).unwrap()
}

/// The steps of `tools/golden_preferences.py`.
fn steps(kind: PreferenceWord) -> Steps {
    let [tokens, labels, references] = ["tokens", "labels", "references"].map(|name| golden("data", name));
    let token = |token: &f32| match *token as i64 {
        left_out if left_out < 0 => (-1 - left_out) as u32 | LEFT_OUT,
        token => token as u32,
    };
    let mut answers: Vec<Vec<u32>> =
        tokens.chunks(SEQ + 1).map(|tokens| tokens.iter().map(token).collect()).collect();
    for (at, (answer, reference)) in answers.iter_mut().zip(references).enumerate() {
        let is_chosen = at % 2 == 0 && (kind != PreferenceWord::Kto || labels[at / 2] > 0.0);
        answer.extend([reference.to_bits(), u32::from(is_chosen)]);
    }
    answers.chunks(2 * PAIRS).map(<[_]>::to_vec).collect()
}

/// The configuration of the golden runs, on a mesh.
fn preferring(kind: PreferenceWord, mesh: [usize; 3], zero: u8) -> RunConfig {
    let mut config = config(mesh, zero);
    (config.batch.global, config.batch.micro) = (2 * PAIRS, Some(2));
    config.model.init = Some("decoders/llama".into());
    config.data.pairs = Some(Paths::One("pairs.jsonl".into()));
    config.preference = PreferenceConfig { kind, beta: 0.3, ..PreferenceConfig::default() };
    match kind {
        PreferenceWord::Robust => config.preference.label_smoothing = 0.1,
        PreferenceWord::Simpo => {
            (config.preference.label_smoothing, config.preference.gamma) = (0.1, 0.4);
        }
        PreferenceWord::Kto => config.preference.undesirable_weight = 0.6,
        _ => {}
    }
    config
}

fn run(config: &RunConfig, count: usize) -> Ran {
    rig::run(&model(), config, &steps(config.preference.kind)[..count])
}

/// Sums in another order than PyTorch's: as far from its run in f64 as its own run in f32 is, four times over, as for whole models.
const TIMES_PYTORCH: f32 = 4.0;

#[test]
fn twenty_steps_of_adamw_as_in_trl() {
    let meshes = [([1, 1, 1], 0), ([1, 2, 1], 2), ([1, 1, 2], 0), ([2, 1, 1], 1)];
    for (number, (name, kind)) in KINDS.into_iter().enumerate() {
        for (mesh, zero) in [meshes[0], meshes[1 + number % 3]] {
            let mut config = preferring(kind, mesh, zero);
            // The distance of KTO is the mean over the whole batch, as of TRL with one micro-batch.
            let mesh = if kind == PreferenceWord::Kto { [1, 1, mesh[2]] } else { mesh };
            config = RunConfig { parallel: preferring(kind, mesh, zero).parallel, ..config };
            config.batch.micro = Some(8 / mesh[0] / mesh[1]);
            let ran = run(&config, 20);
            let what = format!("{name}, {mesh:?}, stage {zero}");
            let near = |tensor: &str, got: &[f32]| {
                let allowed = TIMES_PYTORCH * golden(name, &format!("error.{tensor}"))[0];
                let worst =
                    pairs(got, &golden(name, tensor)).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                // Also fails for NaN.
                assert!(worst <= allowed, "{what}: {tensor} off by {worst:e}, allowed {allowed:e}");
            };
            near("losses", &ran.losses[..20]);
            near("grad_norms", &ran.grad_norms);
            for tensor in ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"] {
                near(&format!("final.{tensor}"), &ran.state[&format!("parameters/{tensor}")]);
            }
            assert_eq!((&ran.peaks, &ran.step_peaks), (&ran.planned, &ran.step_planned), "{what}");
        }
    }
}

/// Runs `steps` on ranks of a mesh; the rewards of each, and the log-probabilities of the first step's answers before it.
fn rewards(config: &RunConfig, steps: &Steps) -> (Vec<Rewards>, Vec<f32>) {
    let network = |spec: &phalanx_train::Spec, groups: &phalanx_train::Groups| spec.network(&groups.tensor);
    let body = |engine: &mut Rank, _| {
        engine.import(&HuggingFaceDir::open(&rig::golden().join("decoders/llama")).unwrap()).unwrap();
        let answers = rig::batch(engine, config, &steps[0]);
        let before = engine.log_probabilities(&answers).unwrap();
        let of_step = |(number, sequences): (usize, &Vec<Vec<u32>>)| {
            let batch = rig::batch(engine, config, sequences);
            engine.step(number as u64 + 1, &batch, false).unwrap().rewards.unwrap()
        };
        (steps.iter().enumerate().map(of_step).collect::<Vec<_>>(), before)
    };
    let (_, mut ran) = rig::on_ranks(&model(), config, &network, &body);
    ran.remove(0)
}

#[test]
fn rewards_and_references_are_those_of_trl() {
    for (number, (name, kind)) in KINDS.into_iter().enumerate() {
        let mesh = [[1, 1, 1], [1, 2, 1], [2, 1, 1], [1, 1, 2]][number % 4];
        let steps = steps(kind)[..6].to_vec();
        let mesh = if kind == PreferenceWord::Kto { [1, 1, 1] } else { mesh };
        let mut config = preferring(kind, mesh, 0);
        config.batch.micro = Some(8 / mesh[0] / mesh[1]);
        let (rewards, before) = rewards(&config, &steps);
        // A sum of up to 16 logarithms of about 4, in f32.
        let references = golden("data", "references");
        for (got, expected) in before.iter().zip(&references[..8]) {
            assert!((got - expected).abs() < 2e-5 * expected.abs().max(1.0), "{name}: {got} for {expected}");
        }
        let expected = golden(name, "rewards");
        let allowed = TIMES_PYTORCH * golden(name, "error.rewards")[0].min(1e-4);
        for (step, (got, expected)) in rewards.iter().zip(expected.chunks(3)).enumerate() {
            let near = |a: f32, b: f32| (a - b).abs() <= allowed.max(2e-6);
            assert!(near(got.chosen, expected[0]), "{name}, step {step}: {got:?}, {expected:?}");
            assert!(near(got.rejected, expected[1]), "{name}, step {step}: {got:?}, {expected:?}");
            // Before the first update nothing has been gained, and rounding decides.
            assert!(step == 0 || got.accuracy == expected[2], "{name}, step {step}: {got:?}, {expected:?}");
        }
    }
}

#[test]
fn micro_batches_replicas_and_stages_of_a_pipeline_give_the_same_loss() {
    let layouts: [([usize; 3], usize, Change); 7] = [
        ([1, 1, 1], 4, |_| {}),
        ([1, 1, 1], 2, |c| c.batch.reduce = Reduce::Defer),
        ([1, 2, 1], 2, |_| {}),
        ([1, 4, 1], 2, |c| c.batch.reduce = Reduce::Defer),
        ([2, 1, 1], 2, |_| {}),
        ([2, 2, 1], 2, |c| c.parallel.schedule = "zb-h1".into()),
        ([1, 2, 2], 4, |c| c.parallel.sequence_parallel = true),
    ];
    for (number, (name, kind)) in KINDS.into_iter().enumerate() {
        let with = |mesh, micro, zero, change: Change| {
            let mut config = preferring(kind, mesh, zero);
            config.batch.micro = Some(micro);
            config.preference.kl_answers = (kind == PreferenceWord::Kto).then_some(1);
            change(&mut config);
            run(&config, 2)
        };
        let one = with([1, 1, 1], 8, 0, |_| {});
        for &(mesh, micro, change) in sweeps::share(&layouts, number, 2) {
            let ran = with(mesh, micro, (number % 4) as u8, change);
            let what = format!("{name}, {mesh:?}, micro-batches of {micro}");
            let apart = (ran.losses[0] - one.losses[0]).abs() / one.losses[0].abs();
            // One rounding of a sum in f32.
            assert!(apart < 2e-7, "{what}: {:?} for {:?}", ran.losses, one.losses);
            assert!(rig::relative_difference(&ran.grad_norms, &one.grad_norms) < F32, "{what}");
            assert_eq!((&ran.peaks, &ran.step_peaks), (&ran.planned, &ran.step_planned), "{what}");
        }
    }
}

#[test]
fn no_stage_or_placement_changes_a_bit() {
    let changes: [(&str, Change); 6] = [
        ("states and gradients in host memory", |c| {
            (c.memory.optimizer, c.memory.gradients) = (Tier::Host, Tier::Host);
        }),
        ("parameters in host memory", |c| c.memory.parameters = Tier::Host),
        ("blocks computed again", |c| c.memory.checkpointing = Checkpointing::Every(1)),
        ("no overlap", |c| c.parallel.overlap = false),
        ("updates within backward", |c| c.memory.update_in_backward = true),
        ("activations in host memory", |c| {
            (c.memory.checkpointing, c.memory.activations) = (Checkpointing::Every(1), Tier::Host);
        }),
    ];
    let bases: [(&str, Change); 3] = [
        ("all parameters", |_| {}),
        ("adapters", |c| c.lora = LoraConfig { rank: Some(2), ..LoraConfig::default() }),
        ("adapters over 4 bits", |c| {
            c.lora = LoraConfig { rank: Some(2), base: LoraBase::Nf4, ..LoraConfig::default() };
        }),
    ];
    for (number, (name, kind)) in KINDS.into_iter().enumerate() {
        let (base, change) = bases[number % 3];
        let with = |zero, more: Change| {
            let mut config = preferring(kind, [1, 2, 1], zero);
            (config.batch.micro, config.optimizer.clip) = (Some(4), 0.0);
            config.precision.compute = if number % 2 == 0 { Float::F32 } else { Float::Bf16 };
            change(&mut config);
            more(&mut config);
            run(&config, 3)
        };
        let expected = with(0, |_| {});
        let what = format!("{name}, {base}");
        for zero in 1..=3 {
            assert_same_run(&format!("{what}, stage {zero}"), &expected, &with(zero, |_| {}));
        }
        for (more, change) in sweeps::share(&changes, number, 3) {
            assert_same_run(&format!("{what}, {more}"), &expected, &with(3, *change));
        }
    }
}

#[test]
fn sums_by_a_tree_have_the_bits_of_any_number_of_replicas() {
    for (number, (name, kind)) in KINDS.into_iter().enumerate() {
        let with = |data: usize| {
            let mut config = preferring(kind, [1, data, 1], if data > 1 { (number % 4) as u8 } else { 0 });
            (config.batch.micro, config.batch.sum) = (Some(2), Sum::Tree);
            config.batch.reduce = if number % 2 == 0 { Reduce::Each } else { Reduce::Defer };
            run(&config, 3)
        };
        let one = with(1);
        for data in [2, 4] {
            let ran = with(data);
            assert!(same_bits(&ran.losses, &one.losses), "{name}: {:?} for {:?}", ran.losses, one.losses);
            assert!(same_bits(&ran.grad_norms, &one.grad_norms), "{name}, {data} replicas");
            assert_same_state(&format!("{name}, {data} replicas"), &one.state, &ran.state);
            assert_eq!(ran.peaks, ran.planned, "{name}, {data} replicas");
        }
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_a_whole_one() {
    let folder = tempfile::tempdir().unwrap();
    let config = |zero| preferring(PreferenceWord::Dpo, [1, 2, 1], zero);
    let steps = &steps(PreferenceWord::Dpo)[..6];
    let whole = rig::run(&model(), &config(1), steps);
    let save = Checkpoints { save: Some(folder.path().into()), ..Checkpoints::default() };
    rig::run_between(&model(), &config(3), &steps[..3], &save);
    let restore = Checkpoints { restore: Some(folder.path().join("step-3")), ..Checkpoints::default() };
    let rest = rig::run_between(&model(), &config(2), &steps[3..], &restore);
    assert!(same_bits(&whole.losses[3..], &rest.losses));
    assert_same_state("a resumed run", &whole.state, &rest.state);
}
