//! Quantised bases of adapters: what a run computes is what it computes beside the numbers that its blocks stand for, on every stage and
//! placement; its memory has the blocks, and its merged model their numbers.

use std::sync::Arc;

use phalanx_checkpoint::Checkpoint;
use phalanx_layers::lora::adapted_by;
use phalanx_models::{Arch, Keys, Model};
use phalanx_plan::trace::Category;
use phalanx_tensor::{DType, blocks};
use phalanx_train::config::{Checkpointing, Chunk, ChunkWord, Float, LoraBase, LoraConfig, Tier};
use phalanx_train::planning::min_device_states;
use phalanx_train::{RunConfig, RunPlan};

use crate::decoders::config;
use crate::lora::{evaluated, whole_checkpoint};
use crate::rig::{self, Checkpoints, Ran, assert_same_run, same_bits};

type Change<'a> = &'a dyn Fn(&mut RunConfig);

const BASES: [(LoraBase, DType); 2] = [(LoraBase::Q8_0, DType::Q8_0), (LoraBase::Nf4, DType::Nf4)];

/// A decoder whose weights are whole blocks on two tensor-parallel ranks.
pub fn model() -> Arc<dyn Model> {
    let mut keys = Keys::default();
    let sizes = [("layers", 2), ("hidden", 128), ("heads", 8), ("kv_heads", 4), ("intermediate", 192)];
    sizes.into_iter().for_each(|(key, count)| keys.set(key, count));
    Arch::named("llama").unwrap().model(&keys, 67, 16).unwrap()
}

fn adapted(mesh: [usize; 3], zero: u8, base: LoraBase) -> RunConfig {
    let mut config = config(mesh, zero);
    config.optimizer.lr = 1e-2;
    config.memory.chunk = Chunk::Mebibytes(0.2);
    config.lora = LoraConfig { rank: Some(3), alpha: Some(6.0), base, ..LoraConfig::default() };
    config
}

fn run(config: &RunConfig, steps: usize) -> Ran {
    rig::run_fresh(&model(), config, &rig::golden_steps()[..steps])
}

/// The base of the second run is the dequantised one, in the type of computing.
#[test]
fn blocks_compute_what_their_numbers_do() {
    let folder = tempfile::tempdir().unwrap();
    let steps = &rig::golden_steps()[..3];
    for (number, (base, dtype)) in BASES.into_iter().enumerate() {
        for compute in [Float::F32, Float::Bf16] {
            let with = |base| {
                let mut config = adapted([1, 2, 1], 1, base);
                (config.precision.compute, config.batch.micro) = (compute, Some(4));
                config
            };
            let what = format!("{base:?}, {compute:?}");
            let (before, plain) = (run(&with(base), 0), run(&with(LoraBase::Compute), 0));
            let is_linear = |name: &str| name.ends_with("_proj.weight");
            for (key, values) in &plain.state {
                let Some(name) = key.strip_prefix("parameters/").filter(|name| adapted_by(name).is_none())
                else {
                    continue;
                };
                let kept = &before.state[key];
                assert_eq!(same_bits(kept, values), !is_linear(name), "{what}: {name}");
                if is_linear(name) && compute == Float::F32 {
                    let numbers = blocks::dequantised(dtype, &blocks::quantised(dtype, values));
                    assert!(same_bits(kept, &numbers), "{what}: {name}");
                }
            }
            let dir = folder.path().join(format!("{number}{compute:?}"));
            let network = rig::spec(&model(), &with(base)).model.whole();
            let restore = Some(whole_checkpoint(&dir, 0, &before.state, &network));
            let from = Checkpoints { restore, ..Checkpoints::default() };
            let expected = rig::run_between(&model(), &with(LoraBase::Compute), steps, &from);
            let got = run(&with(base), 3);
            assert!(
                same_bits(&got.losses, &expected.losses),
                "{what}: {:?}",
                [&got.losses, &expected.losses]
            );
            assert!(same_bits(&got.grad_norms, &expected.grad_norms), "{what}");
            for (key, values) in got.state.iter().filter(|(key, _)| key.contains(".lora_")) {
                assert!(same_bits(values, &expected.state[key]), "{what}: {key}");
            }
        }
    }
}

#[test]
fn no_stage_or_placement_changes_a_bit() {
    let disk = tempfile::tempdir().unwrap();
    let changes: [(&str, Change); 5] = [
        ("parameters in host memory", &|c| c.memory.parameters = Tier::Host),
        ("parameters on disk", &|c| {
            (c.memory.parameters, c.memory.nvme_path) = (Tier::Nvme, Some(disk.path().into()));
        }),
        ("blocks computed again", &|c| c.memory.checkpointing = Checkpointing::Every(1)),
        ("no overlap", &|c| c.parallel.overlap = false),
        ("everything in one chunk", &|c| c.memory.chunk = Chunk::Mebibytes(64.0)),
    ];
    for (base, compute) in [(LoraBase::Nf4, Float::Bf16), (LoraBase::Q8_0, Float::F32)] {
        let with = |zero, more: Change| {
            let mut config = adapted([1, 2, 1], zero, base);
            (config.precision.compute, config.batch.micro) = (compute, Some(4));
            more(&mut config);
            run(&config, 3)
        };
        let expected = with(0, &|_| {});
        for zero in 1..=3 {
            assert_same_run(&format!("{base:?}, stage {zero}"), &expected, &with(zero, &|_| {}));
        }
        for (what, more) in changes {
            assert_same_run(&format!("{base:?}, {what}"), &expected, &with(3, more));
        }
    }
}

/// Blocks of a part of a layer's inputs are other ones than those of the whole: losses are near, and not the same.
#[test]
fn meshes_follow_one_rank_nearly() {
    for (base, _) in BASES {
        let one = run(&adapted([1, 1, 1], 0, base), 4);
        for (mesh, zero) in [([2, 1, 1], 0), ([1, 1, 2], 1), ([2, 2, 2], 3)] {
            let ran = run(&adapted(mesh, zero, base), 4);
            let what = format!("{base:?}, {mesh:?}");
            assert_eq!((&ran.peaks, &ran.step_peaks), (&ran.planned, &ran.step_planned), "{what}");
            // Of NF4 the second half of a scale's digits is another in a part, and steps take that further.
            for (steps, allowed) in [(1, 5e-4), (5, 1e-2)] {
                let apart = rig::relative_difference(&ran.losses[..steps], &one.losses[..steps]);
                assert!(apart < allowed, "{what}: {:?} for {:?}", ran.losses, one.losses);
            }
        }
    }
}

#[test]
fn a_resume_and_a_merge_quantise_again() {
    let folder = tempfile::tempdir().unwrap();
    let steps = &rig::golden_steps()[..6];
    for (number, (base, _)) in BASES.into_iter().enumerate() {
        let dir = folder.path().join(number.to_string());
        let save = Checkpoints { fresh: true, save: Some(dir.clone()), ..Checkpoints::default() };
        let whole = run(&adapted([1, 2, 1], 1, base), 6);
        rig::run_between(&model(), &adapted([1, 2, 1], 3, base), &steps[..3], &save);
        let restore = Checkpoints {
            restore: Some(dir.join("step-3")),
            save: Some(dir.clone()),
            ..Checkpoints::default()
        };
        let rest = rig::run_between(&model(), &adapted([1, 2, 1], 2, base), &steps[3..], &restore);
        rig::assert_same_state(&format!("{base:?}"), &whole.state, &rest.state);
        let saved = Checkpoint::open(&dir.join("step-6")).unwrap();
        assert!(saved.tensors().iter().all(|tensor| adapted_by(&tensor.name).is_some()));
        let merged = evaluated(&model(), &adapted([1, 2, 1], 1, base), &dir.join("step-6"));
        let adapted = *rest.losses.last().unwrap();
        assert!((merged - adapted).abs() < 1e-5 * adapted, "{base:?}: {merged} for {adapted}");
    }
}

#[test]
fn memory_has_the_blocks() {
    let plan = |base| {
        let mut config = adapted([1, 1, 1], 0, base);
        config.memory.chunk = Chunk::Word(ChunkWord::None);
        RunPlan::new(rig::spec(&model(), &config)).unwrap()
    };
    let bytes = |base| {
        let plan = plan(base);
        let planned = plan.ranks[0].peak().categories.get(Category::Parameters);
        [planned, plan.textbook.state.parameters, min_device_states(&plan.spec)]
    };
    // Queries, keys, values, output; gate, up and down; of two layers.
    let linear = 2 * (128 * 128 * 2 + 64 * 128 * 2 + 3 * 128 * 192);
    for (base, dtype) in BASES {
        let saved = (4 * linear - dtype.bytes_of(linear)) as u64;
        let (plain, kept) = (bytes(LoraBase::Compute), bytes(base));
        // So have the formulas of the papers, by which plans that cannot fit are left out.
        for (plain, kept) in plain.into_iter().zip(kept) {
            assert_eq!(plain - kept, saved, "{base:?}: {plain} and {kept}");
        }
    }
}
