//! Optimizer states in host memory or on disk: device memory has none of them, every memory is used as planned,
//! checkpoints are the same and resume into any placement. (`bits.rs` has the bits of whole runs.)

mod rig;

use std::path::Path;

use phalanx_tensor::Memory;
use phalanx_trace::{Category, PhaseName};
use phalanx_train::config::{Float, Tier};
use phalanx_train::{RunConfig, RunPlan, on_threads};
use rig::{assert_same_state, devices};

const TIERS: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Nvme];

fn config(tier: Tier, folder: &Path, world: usize, zero: u8) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.data, config.parallel.zero) = (Some(world), zero);
    config.precision.compute = Float::Bf16;
    config.memory.optimizer = tier;
    config.memory.nvme_path = (tier == Tier::Nvme).then(|| folder.into());
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
