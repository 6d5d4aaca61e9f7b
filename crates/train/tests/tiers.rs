//! Optimizer states in host memory or on disk: device memory has none of them, every memory is used as planned,
//! checkpoints are the same and resume into any placement. (`bits.rs` has the bits of whole runs.)

mod rig;

use std::path::Path;

use phalanx_parallel::zero::{ChunkResidence, Residence};
use phalanx_tensor::Memory;
use phalanx_trace::{Category, PhaseName};
use phalanx_train::config::{Chunk, Float, Tier};
use phalanx_train::{RunConfig, RunPlan, on_threads};
use rig::{assert_same_state, devices};

const TIERS: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Nvme];

fn config(tier: Tier, folder: &Path, world: usize, zero: u8) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.data, config.parallel.zero) = (Some(world), zero);
    config.precision.compute = Float::Bf16;
    config.memory.optimizer = tier;
    config.memory.nvme_path = (tier == Tier::Nvme).then(|| folder.display().to_string());
    config
}

fn plan(config: &RunConfig) -> RunPlan {
    let (model, _) = rig::golden_config();
    RunPlan::new(rig::spec(&model, config)).unwrap()
}

#[test]
fn optimizer_states_take_memory_of_their_tier_alone() {
    let folder = tempfile::tempdir().unwrap();
    for (world, zero) in [(1, 0), (2, 1), (2, 3), (4, 2)] {
        let on_device = plan(&config(Tier::Device, folder.path(), world, zero));
        for tier in [Tier::Host, Tier::Nvme] {
            let elsewhere = plan(&config(tier, folder.path(), world, zero));
            for (with, without) in on_device.ranks.iter().zip(&elsewhere.ranks) {
                let init = |memory: &phalanx_plan::MemoryPlan| {
                    memory.phase(PhaseName::Init).unwrap().peak.categories
                };
                let states = init(&with.memory).get(Category::Optimizer);
                // Master weights and two moments, f32, of at least this rank's share of the parameters.
                assert!(states >= 12 * with.parameters / if zero == 0 { 1 } else { world as u64 });
                assert_eq!(init(&without.memory).get(Category::Optimizer), 0, "{tier:?}");
                let tier_memory = match tier.memory() {
                    Memory::Host => &without.host,
                    _ => &without.disk,
                };
                assert_eq!(init(tier_memory).get(Category::Optimizer), states, "{tier:?}");
            }
        }
    }
}

#[test]
fn a_checkpoint_resumes_into_any_tier() {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..6];
    let folder = tempfile::tempdir().unwrap();
    let at = |tier| config(tier, folder.path(), 2, 2);
    let whole = rig::run(&model, &at(Tier::Device), steps);
    for from in TIERS {
        let dir = folder.path().join(format!("{from:?}"));
        let save = rig::Checkpoints { save: Some(dir.clone()), ..Default::default() };
        rig::run_between(&model, &at(from), &steps[..3], &save);
        let restore = rig::Checkpoints { restore: Some(dir.join("step-3")), ..Default::default() };
        for to in TIERS {
            let rest = rig::run_between(&model, &at(to), &steps[3..], &restore);
            assert_same_state(&format!("{from:?} to {to:?}"), &whole.state, &rest.state);
        }
    }
    let names: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), TIERS.len(), "disk memory leaves no file: {names:?}");
}

/// Chunks at home on the device between chunks of which one part or both lie elsewhere.
fn mixed(with_parameters: bool) -> Residence {
    let lies = |parameters, optimizer| ChunkResidence {
        parameters: if with_parameters { parameters } else { Memory::Device },
        optimizer,
    };
    let three = [
        ChunkResidence::DEVICE,
        lies(Memory::Host, Memory::Device),
        lies(Memory::Disk, Memory::Disk),
        ChunkResidence::DEVICE,
        lies(Memory::Device, Memory::Host),
    ];
    Residence::of_chunks(three.repeat(3), lies(Memory::Host, Memory::Host))
}

#[test]
fn each_chunk_may_lie_elsewhere() {
    let (model, _) = rig::golden_config();
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = rig::Checkpoints::default();
    for (compute, world, zero, prefetch) in [
        (Float::F32, 1, 0, 1),
        (Float::Bf16, 2, 1, 1),
        (Float::Bf16, 2, 3, 2),
        (Float::F32, 2, 3, 0),
        (Float::F32, 1, 3, 1),
    ] {
        let mut config = config(Tier::Device, folder.path(), world, zero);
        config.precision.compute = compute;
        (config.memory.chunk, config.memory.prefetch) = (Chunk::Mebibytes(0.02), prefetch);
        let steps = &rig::golden_steps()[..4];
        let expected = rig::run(&model, &config, steps);
        let mut spec = rig::spec(&model, &config);
        assert!(spec.layout.chunk_elements.len() > 6, "chunks of each kind");
        spec.residence = vec![mixed(zero == 3)];
        spec.disk_folder = Some(folder.path().to_path_buf());
        let ran = rig::run_spec(spec, &config, steps, &checkpoints);
        let what = format!("{compute:?}, {world} ranks, stage {zero}");
        assert_eq!(ran.peaks, ran.planned, "{what}: peak == plan");
        assert_same_state(&what, &expected.state, &ran.state);
    }
}

#[test]
fn a_folder_that_cannot_hold_the_states_is_refused_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let plan = plan(&config(Tier::Nvme, &missing, 1, 0));
    let error = on_threads(&*devices::factory(), &plan, |_| ()).unwrap_err().to_string();
    let bytes = plan.of(0).disk.arena_bytes.to_string();
    for words in [&missing.display().to_string(), &bytes, "give a folder that exists"] {
        assert!(error.contains(words), "no {words:?} in: {error}");
    }
}
