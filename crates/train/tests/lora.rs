//! Low-rank adapters: PEFT's losses; the base keeps its bits; stages, placements, meshes and resumes change what they change elsewhere; and
//! the merged model computes what the adapted one does.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_checkpoint::{AdapterConfig, Checkpoint, HuggingFaceDir, TensorPiece, begin, commit, write_rank};
use phalanx_layers::lora::{adapted_by, is_beside_base};
use phalanx_layers::{Network, ParameterSpec};
use phalanx_models::{Arch, Keys, Model, from_config};
use phalanx_plan::trace::Category;
use phalanx_tensor::{DType, Device};
use phalanx_testing::planted::{FaultKind, Planted, PlantedFault, sites};
use phalanx_testing::sweeps;
use phalanx_train::config::{
    Checkpointing, CheckpointingWord, Float, LoraConfig, LoraInit, Reduce, Targets, Tier,
};
use phalanx_train::state::{Kept, PARAMETERS};
use phalanx_train::weights::Weights;
use phalanx_train::{Groups, Rank, RunConfig, RunError, RunPlan, Spec};
use serde_json::json;

use crate::decoders::{config, decoder};
use crate::mesh::F32;
use crate::rig::{self, Checkpoints, Ran, assert_same_state, pairs, same_bits};

type Change = fn(&mut RunConfig);

/// Which layers have adapters: of the three that one product computes all, or two of them; and magnitudes beside them.
const ADAPTED: [(&str, Change); 4] = [
    ("all linear layers", |c| {
        c.lora = LoraConfig { rank: Some(3), alpha: Some(6.0), ..LoraConfig::default() }
    }),
    ("q, v and down of the last block", |c| {
        let targets = ["q_proj", "v_proj", "model.layers.1.mlp.down_proj"].map(String::from).into();
        c.lora =
            LoraConfig { rank: Some(2), rslora: true, init: LoraInit::Gaussian, ..LoraConfig::default() };
        c.lora.targets = Targets::Several(targets);
    }),
    ("q, v and down with magnitudes", |c| {
        let targets = ["q_proj", "v_proj", "down_proj"].map(String::from).into();
        c.lora = LoraConfig { rank: Some(2), dora: true, ..LoraConfig::default() };
        c.lora.targets = Targets::Several(targets);
    }),
    ("q and down from their principal parts", |c| {
        let targets = ["q_proj", "down_proj"].map(String::from).into();
        c.lora = LoraConfig { rank: Some(2), init: LoraInit::Pissa, ..LoraConfig::default() };
        c.lora.targets = Targets::Several(targets);
    }),
];

/// A decoder with norms of queries and keys, of whose keys several ranks have a head.
fn model() -> Arc<dyn Model> {
    decoder("qwen3", 2)
}

fn adapted(mesh: [usize; 3], zero: u8, change: Change) -> RunConfig {
    let mut config = config(mesh, zero);
    config.optimizer.lr = 1e-2;
    change(&mut config);
    config
}

fn run(config: &RunConfig, steps: usize) -> Ran {
    rig::run_fresh(&model(), config, &rig::golden_steps()[..steps])
}

/// The parameters of a run that are no adapter's.
fn base(ran: &Ran) -> impl Iterator<Item = (&str, &Vec<f32>)> {
    let of = |(key, values)| Some((str::strip_prefix(key, "parameters/")?, values));
    let all = ran.state.iter().filter_map(move |(key, values)| of((key.as_str(), values)));
    all.filter(|(name, _)| adapted_by(name).is_none())
}

#[test]
fn adapters_alone_are_trained_and_begin_as_nothing() {
    for (what, change) in ADAPTED {
        let (before, plain) =
            (run(&adapted([1, 1, 1], 0, change), 0), run(&adapted([1, 1, 1], 0, |_| {}), 0));
        // b is zero: the evaluation is that of the base, bit for bit; nearly, where magnitudes over norms are roundings of 1, or what
        // adapters have is taken from the base.
        let LoraConfig { dora, init, .. } = adapted([1, 1, 1], 0, change).lora;
        let is_rounded = dora || init == LoraInit::Pissa;
        let near = rig::relative_difference(&before.losses, &plain.losses) < 1e-6;
        assert!(if is_rounded { near } else { same_bits(&before.losses, &plain.losses) }, "{what}");
        let after = run(&adapted([1, 1, 1], 0, change), 4);
        assert_ne!(after.losses.last(), before.losses.last(), "{what}");
        let mut adapters = 0;
        for (key, values) in &after.state {
            let Some(name) = key.strip_prefix("parameters/") else { continue };
            let is_adapter = adapted_by(name).is_some();
            adapters += usize::from(is_adapter);
            assert_eq!(same_bits(values, &before.state[key]), !is_adapter, "{what}: {name}");
            assert_eq!(after.state.contains_key(&format!("exp_avg/{name}")), is_adapter, "{what}: {name}");
            if !is_adapter && init != LoraInit::Pissa {
                assert!(same_bits(values, &plain.state[key]), "{what}: {name}");
            }
        }
        // Two blocks with seven linear layers; two and one; three, each with three parameters; two.
        let expected = [2 * 14, 2 * 5, 2 * 3 * 3, 2 * 2 * 2];
        assert_eq!(
            adapters,
            expected[ADAPTED.iter().position(|(other, _)| *other == what).unwrap()],
            "{what}"
        );
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
        ("selective", |c| c.memory.checkpointing = Checkpointing::Word(CheckpointingWord::Selective)),
        ("no overlap", |c| c.parallel.overlap = false),
        ("updates within backward", |c| c.memory.update_in_backward = true),
    ];
    for (number, (what, change)) in ADAPTED.into_iter().enumerate() {
        for (at, compute) in (number..).zip([Float::F32, Float::Bf16]) {
            let with = |zero, more: Change| {
                let mut config = adapted([1, 2, 1], zero, change);
                (config.precision.compute, config.optimizer.clip, config.lora.dropout) = (compute, 0.0, 0.1);
                config.batch.micro = Some(4);
                more(&mut config);
                run(&config, 3)
            };
            let expected = with(0, |_| {});
            for zero in 1..=3 {
                rig::assert_same_run(
                    &format!("{what}, {compute:?}, stage {zero}"),
                    &expected,
                    &with(zero, |_| {}),
                );
            }
            for (name, more) in sweeps::share(&changes, at, 2) {
                rig::assert_same_run(&format!("{what}, {compute:?}, {name}"), &expected, &with(3, *more));
            }
        }
    }
}

#[test]
fn meshes_follow_one_rank() {
    let meshes: [([usize; 3], Change); 6] = [
        ([2, 1, 1], |_| {}),
        ([2, 1, 1], |c| c.parallel.schedule = "zb-h1".into()),
        ([1, 1, 2], |_| {}),
        ([1, 1, 4], |c| c.parallel.sequence_parallel = true),
        ([1, 2, 2], |c| c.batch.reduce = Reduce::Defer),
        ([2, 2, 2], |c| c.parallel.sequence_parallel = true),
    ];
    for (what, change) in ADAPTED {
        let dropping = |mesh, zero| {
            let mut config = adapted(mesh, zero, change);
            config.lora.dropout = 0.1;
            config
        };
        let one = run(&dropping([1, 1, 1], 0), 4);
        for (number, (mesh, more)) in meshes.into_iter().enumerate() {
            let mut first: Option<Ran> = None;
            for &zero in [&0].into_iter().chain(sweeps::share(&[1, 2, 3], number, 3)) {
                let mut config = dropping(mesh, zero);
                more(&mut config);
                let ran = run(&config, 4);
                let what = format!("{what}, {mesh:?}, {}, stage {zero}", config.parallel.schedule);
                assert_eq!((&ran.peaks, &ran.step_peaks), (&ran.planned, &ran.step_planned), "{what}");
                let apart = |of: fn(&Ran) -> &Vec<f32>| rig::relative_difference(of(&ran), of(&one));
                assert!(apart(|ran| &ran.losses) < F32, "{what}: {:?} for {:?}", ran.losses, one.losses);
                assert!(apart(|ran| &ran.grad_norms) < F32, "{what}: norms");
                for ((name, values), (_, expected)) in base(&ran).zip(base(&one)) {
                    assert!(same_bits(values, expected), "{what}: {name}");
                }
                let first = first.get_or_insert_with(|| ran.clone());
                assert_same_state(&what, &first.state, &ran.state);
            }
        }
    }
}

/// Sums in another order than PyTorch's: as far from its run in f64 as its own run in f32 is, four times over, as for whole models.
const TIMES_PYTORCH: f32 = 4.0;

#[test]
fn twenty_steps_of_adamw_as_in_peft() {
    let meshes =
        [([1, 1, 1], 0), ([1, 2, 1], 2), ([1, 4, 1], 3), ([1, 1, 2], 0), ([1, 2, 2], 3), ([2, 1, 1], 0)];
    for variant in ["llama", "qwen3", "gpt2", "dora-qwen3", "dora-gpt2", "tokens-llama", "tokens-gpt2"] {
        let folder = rig::golden().join("lora").join(variant);
        let of = |name: &str| rig::golden_tensor(&format!("lora/{variant}/adamw.safetensors"), name);
        let (_, adapter) = AdapterConfig::read(&folder).unwrap();
        let base = variant.trim_start_matches("dora-").trim_start_matches("tokens-");
        let init = if base == "gpt2" { base.to_string() } else { format!("decoders/{base}") };
        let mut model =
            from_config(HuggingFaceDir::open(&rig::golden().join(&init)).unwrap().config()).unwrap();
        if let Some(tokens) = &adapter.tokens {
            model = model.with_vocab(tokens.end).unwrap();
        }
        let steps = steps_of(&of("tokens"));
        for (mesh, zero) in meshes {
            let mut config = config(mesh, zero);
            (config.batch.global, config.model.init) = (4, Some(init.clone()));
            config.lora = LoraConfig {
                rank: Some(adapter.rank),
                alpha: Some(adapter.alpha),
                rslora: adapter.rslora,
                dora: adapter.dora,
                new_rows: adapter.tokens.as_ref().map(|tokens| tokens.len()),
                targets: Targets::Several(adapter.targets.clone()),
                adapter: Some(folder.display().to_string()),
                ..LoraConfig::default()
            };
            let ran = rig::run(&model, &config, &steps);
            let what = format!("{variant}, {mesh:?}, stage {zero}");
            let near = |name: &str, got: &[f32]| {
                let allowed = TIMES_PYTORCH * of(&format!("error.{name}"))[0];
                let worst = pairs(got, &of(name)).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                // Also fails for NaN.
                assert!(worst <= allowed, "{what}: {name} off by {worst:e}, allowed {allowed:e}");
            };
            near("losses", &ran.losses[..20]);
            near("grad_norms", &ran.grad_norms);
            for (name, got) in &ran.state {
                let name = name.strip_prefix("parameters/").filter(|name| is_beside_base(name));
                name.into_iter().for_each(|name| near(&format!("final.{name}"), got));
            }
            assert_eq!(ran.peaks, ran.planned, "{what}");
        }
    }
}

/// Adapters that start as the principal parts of weights: PEFT's losses and norms, on every mesh, whatever signs singular vectors have.
#[test]
fn twenty_steps_from_principal_parts_as_in_peft() {
    let of_llama = LoraConfig { rank: Some(4), alpha: Some(8.0), ..LoraConfig::default() };
    let targets = Targets::One("c_attn".into());
    let of_gpt2 = LoraConfig { rank: Some(3), alpha: Some(6.0), targets, ..LoraConfig::default() };
    for (variant, init, lora) in
        [("pissa-llama", "decoders/llama", of_llama), ("pissa-gpt2", "gpt2", of_gpt2)]
    {
        let of = |name: &str| rig::golden_tensor(&format!("lora/{variant}/adamw.safetensors"), name);
        let model = from_config(HuggingFaceDir::open(&rig::golden().join(init)).unwrap().config()).unwrap();
        let steps = steps_of(&of("tokens"));
        for (mesh, zero) in [([1, 1, 1], 0), ([1, 2, 1], 3), ([1, 2, 2], 1), ([2, 1, 1], 0)] {
            let mut config = config(mesh, zero);
            (config.batch.global, config.model.init) = (4, Some(init.to_string()));
            config.lora = LoraConfig { init: LoraInit::Pissa, ..lora.clone() };
            let ran = rig::run(&model, &config, &steps);
            let what = format!("{variant}, {mesh:?}, stage {zero}");
            for (name, got) in [("losses", &ran.losses[..20]), ("grad_norms", &ran.grad_norms)] {
                let allowed = TIMES_PYTORCH * of(&format!("error.{name}"))[0];
                let worst = pairs(got, &of(name)).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                assert!(worst <= allowed, "{what}: {name} off by {worst:e}, allowed {allowed:e}");
            }
            assert_eq!(ran.peaks, ran.planned, "{what}");
        }
    }
}

/// Steps of four sequences of 17 tokens.
fn steps_of(tokens: &[f32]) -> rig::Steps {
    let sequence = |tokens: &[f32]| tokens.iter().map(|token| *token as u32).collect::<Vec<u32>>();
    tokens.chunks(4 * 17).map(|step| step.chunks(17).map(sequence).collect()).collect()
}

/// Tokens that the folder has no rows for: theirs begin near the mean of the others, and are trained beside the base, alone or on any mesh, with a
/// table of its own or one that the output projection shares; a stage changes no bit, and the merged tables hold them.
#[test]
fn rows_of_new_tokens_are_trained_beside_the_base() {
    let folder = tempfile::tempdir().unwrap();
    for (init, table) in [("decoders/llama", "model.embed_tokens"), ("gpt2", "transformer.wte")] {
        let read = from_config(HuggingFaceDir::open(&rig::golden().join(init)).unwrap().config()).unwrap();
        let (rows, added) = (read.vocab(), format!("parameters/{table}.added.weight"));
        let model = read.with_vocab(rows + 3).unwrap();
        let mut steps = rig::golden_steps()[..4].to_vec();
        let all = steps.iter_mut().flatten().flatten().enumerate();
        all.for_each(|(at, token)| {
            *token = if at % 7 == 3 { (rows + at % 3) as u32 } else { *token % rows as u32 }
        });
        let with = |mesh, zero| {
            let mut config = adapted(mesh, zero, ADAPTED[0].1);
            let path = rig::golden().join(init).display().to_string();
            (config.model.init, config.lora.new_rows) = (Some(path), Some(3));
            config
        };
        let run = |config: &RunConfig, steps: &[Vec<Vec<u32>>]| rig::run(&model, config, steps);
        let one = run(&with([1, 1, 1], 0), &steps);
        let (before, after) = (run(&with([1, 1, 1], 0), &[]).state, &one.state);
        let (old, new) = (&before[&format!("parameters/{table}.weight")], &before[&added]);
        let columns = old.len() / rows;
        assert_eq!(new.len(), 3 * columns);
        for column in 0..columns {
            let mean = old.iter().skip(column).step_by(columns).sum::<f32>() / rows as f32;
            let drawn: Vec<f32> = new.iter().skip(column).step_by(columns).copied().collect();
            // A deviation of 3e-5 of that of the old rows, which is below 1.
            assert!(drawn.iter().all(|x| (x - mean).abs() < 3e-4), "{init}: {drawn:?} for {mean}");
            assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2], "{init}: {drawn:?}");
        }
        assert!(same_bits(&after[&format!("parameters/{table}.weight")], old), "{init}");
        assert!(!same_bits(&after[&added], new), "{init}");
        for (mesh, more) in [
            ([1, 2, 1], (|_| {}) as Change),
            ([1, 1, 2], |_| {}),
            ([1, 1, 2], |c| c.parallel.sequence_parallel = true),
            ([2, 1, 1], |_| {}),
            ([2, 2, 2], |_| {}),
        ] {
            let mut first: Option<Ran> = None;
            for zero in [0, 2, 3] {
                let mut config = with(mesh, zero);
                more(&mut config);
                let ran = run(&config, &steps);
                let what = format!("{init}, {mesh:?}, stage {zero}");
                assert_eq!((&ran.peaks, &ran.step_peaks), (&ran.planned, &ran.step_planned), "{what}");
                let apart = |of: fn(&Ran) -> &Vec<f32>| rig::relative_difference(of(&ran), of(&one));
                assert!(apart(|ran| &ran.losses) < F32, "{what}: {:?} for {:?}", ran.losses, one.losses);
                assert!(apart(|ran| &ran.grad_norms) < F32, "{what}: norms");
                let first = first.get_or_insert_with(|| ran.clone());
                assert_same_state(&what, &first.state, &ran.state);
            }
        }
        let dir = folder.path().join(table);
        let save = Checkpoints { save: Some(dir.clone()), ..Checkpoints::default() };
        let ran = rig::run_between(&model, &with([1, 1, 2], 1), &steps, &save);
        let checkpoint = Checkpoint::open(&dir.join("step-4")).unwrap();
        assert!(checkpoint.tensors().iter().all(|tensor| is_beside_base(&tensor.name)), "{init}");
        let merged = evaluated(&model, &with([1, 1, 2], 1), &dir.join("step-4"));
        let adapted = *ran.losses.last().unwrap();
        assert!((merged - adapted).abs() < 1e-5 * adapted, "{init}: {merged} for {adapted}");
        // All of a table that has the rows is trained like any other.
        let mut whole = with([1, 2, 1], 3);
        whole.lora = LoraConfig::default();
        let begun = run(&whole, &[]).state;
        let table = &begun[&format!("parameters/{table}.weight")];
        assert!(same_bits(&table[..old.len()], old) && same_bits(&table[old.len()..], new), "{init}");
    }
}

#[test]
fn a_checkpoint_resumes_on_another_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let steps = &rig::golden_steps()[..6];
    for (number, (what, change)) in ADAPTED.into_iter().enumerate() {
        let dir = folder.path().join(number.to_string());
        let save = Checkpoints { fresh: true, save: Some(dir.clone()), ..Checkpoints::default() };
        let whole = run(&adapted([1, 2, 1], 1, change), 6);
        rig::run_between(&model(), &adapted([1, 2, 1], 3, change), &steps[..3], &save);
        let restore = Checkpoints { restore: Some(dir.join("step-3")), ..Checkpoints::default() };
        let rest = rig::run_between(&model(), &adapted([1, 2, 1], 2, change), &steps[3..], &restore);
        assert_same_state(what, &whole.state, &rest.state);
        let checkpoint = Checkpoint::open(&dir.join("step-3")).unwrap();
        assert!(checkpoint.tensors().iter().all(|tensor| adapted_by(&tensor.name).is_some()), "{what}");
        let elsewhere = rig::run_between(&model(), &adapted([2, 1, 2], 0, change), &[], &restore);
        let saved = run(&adapted([1, 2, 1], 1, change), 3);
        assert_same_state(what, &saved.state, &elsewhere.state);
    }
}

/// Checkpoints of earlier versions have the base, too: a run goes on from them without its folder, and saves as much.
#[test]
fn a_checkpoint_with_its_base_is_gone_on_from() {
    let (folder, steps, change) = (tempfile::tempdir().unwrap(), &rig::golden_steps()[..4], ADAPTED[0].1);
    let mut config = adapted([1, 2, 1], 2, change);
    let before = run(&config, 2).state;
    let dir = whole_checkpoint(folder.path(), 2, &before, &rig::spec(&model(), &config).model.whole());
    config.model.init = Some("not there".into());
    let save = Some(folder.path().to_path_buf());
    let again = Checkpoints { restore: Some(dir), save, ..Checkpoints::default() };
    let rest = rig::run_between(&model(), &config, &steps[2..], &again);
    assert_same_state("from a whole checkpoint", &run(&adapted([1, 2, 1], 0, change), 4).state, &rest.state);
    let saved = Checkpoint::open(&folder.path().join("step-4")).unwrap();
    assert_eq!(saved.tensors().len(), before.len());
}

/// A checkpoint of all of a state, as a run without adapters saves it.
pub fn whole_checkpoint(folder: &Path, step: u64, state: &rig::State, network: &Network) -> PathBuf {
    let shape = |name: &str| network.members().find(|spec| spec.name == name).unwrap().shape.clone();
    let piece = |key: &String| {
        let (state, name) = key.split_once('/').unwrap();
        let state = ["parameters", "exp_avg", "exp_avg_sq"].into_iter().find(|known| *known == state);
        let (state, shape) = (state.unwrap(), shape(name));
        let range = 0..shape.iter().product::<usize>() as u64;
        TensorPiece { state, name: name.into(), shape, dtype: DType::F32, stripe: None, range }
    };
    let pieces: Vec<TensorPiece> = state.keys().map(piece).collect();
    let all: Vec<&Vec<f32>> = state.values().collect();
    let tmp = begin(folder, step).unwrap();
    write_rank(&tmp, 0, &pieces, 1 << 16, &mut |piece, range, bytes| {
        let numbers = &all[piece][range.start as usize..range.end as usize];
        bytes.copy_from_slice(bytemuck::cast_slice(numbers));
    })
    .unwrap();
    commit(&tmp, json!({ "step": step }), 1).unwrap()
}

/// The loss of the merged weights is that of the adapted model, but for the rounding of the sums.
#[test]
fn merged_weights_compute_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let gpt2 = from_config(HuggingFaceDir::open(&rig::golden().join("gpt2")).unwrap().config()).unwrap();
    let everything: Change = ADAPTED[0].1;
    for (number, (model, change)) in [
        (model(), everything),
        (model(), ADAPTED[1].1),
        (model(), ADAPTED[2].1),
        (model(), ADAPTED[3].1),
        (Arc::clone(&gpt2), everything),
        (gpt2, |c| {
            c.lora = LoraConfig { rank: Some(2), dora: true, ..LoraConfig::default() };
        }),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = folder.path().join(number.to_string());
        let save = Checkpoints { fresh: true, save: Some(dir.clone()), ..Checkpoints::default() };
        let config = adapted([1, 1, 2], 1, change);
        let ran = rig::run_between(&model, &config, &rig::golden_steps()[..6], &save);
        let merged = evaluated(&model, &config, &dir.join("step-6"));
        let adapted = *ran.losses.last().unwrap();
        assert!((merged - adapted).abs() < 1e-5 * adapted, "{number}: {merged} for {adapted}");
        // Without what the adapters add it is another.
        let mut plain = config.clone();
        plain.lora = LoraConfig::default();
        let base = *rig::run_fresh(&model, &plain, &[]).losses.last().unwrap();
        assert!((base - adapted).abs() > 1e-4 * adapted, "{number}: {base} and {adapted}");
    }
}

/// The loss of the evaluation of a checkpoint's merged weights, by a model without adapters.
pub fn evaluated(model: &Arc<dyn Model>, config: &RunConfig, checkpoint: &Path) -> f32 {
    let mut plain = config.clone();
    plain.lora = LoraConfig::default();
    let tensors = rig::on_ranks(model, &plain, &|spec, groups| spec.network(&groups.tensor), &|engine, _| {
        let from = Checkpoint::open(checkpoint).unwrap();
        let weights = Weights::of(&from, &**model).unwrap();
        let whole = model.whole();
        let mut read: Option<(String, Vec<f32>)> = None;
        engine
            .load(
                |kept: &Kept,
                 spec: &ParameterSpec,
                 elements: Range<u64>,
                 out: &mut [f32]|
                 -> Result<(), RunError> {
                    if kept.state != PARAMETERS {
                        out.fill(0.0);
                        return Ok(());
                    }
                    if read.as_ref().is_none_or(|(name, _)| *name != spec.name) {
                        let spec = whole.members().find(|other| other.name == spec.name).unwrap();
                        let mut values = vec![0.0; spec.elements()];
                        // In windows that end within rows.
                        for start in (0..values.len()).step_by(100) {
                            let end = values.len().min(start + 100);
                            weights.read(spec, start as u64..end as u64, &mut values[start..end])?;
                        }
                        read = Some((spec.name.clone(), values));
                    }
                    let (_, values) = read.as_ref().unwrap();
                    for (here, there) in spec.stripe().runs(elements.clone()) {
                        let at = (here.start - elements.start) as usize;
                        let values = &values[there.start as usize..there.end as usize];
                        out[at..at + values.len()].copy_from_slice(values);
                    }
                    Ok(())
                },
            )
            .unwrap();
        rig::evaluate(engine, &plain)
    });
    tensors.1[0]
}

/// Each rank has a term of the gradient of a in a layer that is cut by outputs, and of b in one that is cut by inputs.
#[test]
fn a_sum_of_terms_that_is_left_out_is_named() {
    for (targets, named) in [("v_proj", "v_proj.lora_A"), ("o_proj", "o_proj.lora_B")] {
        let mut config = config([1, 1, 2], 1);
        config.lora =
            LoraConfig { rank: Some(2), targets: Targets::One(targets.into()), ..LoraConfig::default() };
        let make = |device: Device, groups: Groups, spec: &Spec| {
            let fault = PlantedFault { site: sites::PARTIAL_SUM, kind: FaultKind::Dropped };
            let tensor = Planted::around(Arc::clone(&groups.tensor), fault, &device, &groups.data);
            let groups = Groups { tensor, ..groups };
            let network = spec.network(&groups.tensor);
            Rank::with_network(device, groups, spec, network)
        };
        let error = RunPlan::with_ranks(rig::spec(&decoder("llama", 4), &config), &make).map(drop);
        let error = error.unwrap_err().to_string();
        let words = ["`tensor`", "partial sum", named];
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

/// The model's adapters fill whole blocks of a chunk: those of a narrower one would be less than their padding.
#[test]
fn memory_has_gradients_and_states_of_adapters_alone() {
    let mut keys = Keys::default();
    let sizes = [("layers", 2), ("hidden", 512), ("heads", 8), ("kv_heads", 8), ("intermediate", 1024)];
    sizes.into_iter().for_each(|(key, count)| keys.set(key, count));
    let model = Arch::named("llama").unwrap().model(&keys, 67, 16).unwrap();
    let plan = |change: Change| {
        let mut config = adapted([1, 1, 1], 0, change);
        config.lora.rank = config.lora.rank.map(|_| 8);
        RunPlan::new(rig::spec(&model, &config)).unwrap()
    };
    let (all, adapters) = (plan(|_| {}), plan(ADAPTED[0].1));
    let trained = adapters.trained_parameters();
    assert_eq!(adapters.parameters(), all.parameters() + trained);
    // Seven layers of each block: 8 numbers for each of their inputs and outputs.
    assert_eq!(trained, 2 * 8 * (4 * 1024 + 3 * 1536));
    let bytes = |category| adapters.ranks[0].peak().categories.get(category);
    assert!(bytes(Category::Gradients) <= 5 * trained && bytes(Category::Optimizer) <= 10 * trained);
    // Four numbers of 4 bytes for each parameter, and one.
    assert!(2 * adapters.arena_bytes_max() < all.arena_bytes_max());
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |change: Change| {
        let mut config = config([1, 1, 1], 0);
        config.lora.rank = Some(2);
        change(&mut config);
        let spec = config.check_with(&*model()).map_err(|error| error.to_string());
        spec.expect_err("it cannot be")
    };
    let cases: [(Change, &[&str]); 5] = [
        (
            |c| c.lora.targets = Targets::Several(vec!["q_proj".into(), "c_attn".into()]),
            &["lora.targets = \"c_attn\"", "matches no linear layer", "down_proj, gate_proj, k_proj"],
        ),
        (|c| c.lora.targets = Targets::Several(Vec::new()), &["lora.targets = []", "all-linear"]),
        (|c| c.model.trainable = vec!["*norm*".into()], &["lora.rank", "model.trainable"]),
        (|c| (c.lora.rank, c.lora.alpha) = (None, Some(4.0)), &["lora.alpha", "is for lora.rank"]),
        (|c| c.lora.adapter = Some("x".into()), &["lora.adapter", "model.init"]),
    ];
    for (change, words) in cases {
        let refusal = refused(change);
        assert!(words.iter().all(|word| refusal.contains(word)), "{refusal}");
    }
    let mut config = config([1, 1, 1], 0);
    (config.lora.rank, config.model.arch) = (Some(2), Arch::BERT);
    let refusal = config.check().unwrap_err().to_string();
    assert!(refusal.contains("lora.rank = 2: adapts models that continue text"), "{refusal}");
}
