//! Inputs of Transformer blocks that wait for backward in host memory, on disk, or in parts on tensor-parallel ranks: the
//! same bits on every mesh and schedule, and as much less device memory as they take.

use crate::rig;
use std::path::Path;

use crate::rig::{assert_same_state, same_bits};
use phalanx_models::Gpt2;
use phalanx_plan::trace::{Category, PhaseName};
use phalanx_testing::sweeps;
use phalanx_train::config::{Checkpointing, Float, Tier};
use phalanx_train::{RunConfig, RunPlan};

const TIERS: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Nvme];

fn config(folder: &Path, [pipeline, data, tensor]: [usize; 3]) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.pipeline, config.parallel.data, config.parallel.tensor) = (pipeline, Some(data), tensor);
    config.precision.compute = Float::Bf16;
    config.memory.nvme_path = Some(folder.into());
    config
}

fn waiting(mut config: RunConfig, tier: Tier, is_partitioned: bool) -> RunConfig {
    config.memory.activations = tier;
    config.memory.partition_activations = is_partitioned;
    if tier != Tier::Nvme {
        config.memory.nvme_path = None;
    }
    config
}

#[test]
fn every_mesh_and_schedule_gives_the_same_bits() {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..3];
    let folder = tempfile::tempdir().unwrap();
    let meshes = [([1, 1, 2], "1f1b"), ([2, 1, 1], "gpipe"), ([2, 1, 2], "1f1b"), ([2, 1, 2], "zb-h1")];
    let places: Vec<_> = TIERS.iter().flat_map(|tier| [(*tier, false), (*tier, true)]).collect();
    for (at, (mesh, schedule)) in meshes.into_iter().enumerate() {
        // Whole or in parts in turn, such that both try every tier.
        for (first, every) in (at..).zip([None, Some(1)]) {
            let mut base = config(folder.path(), mesh);
            if mesh[0] > 1 {
                (base.parallel.schedule, base.batch.micro) = (schedule.parse().unwrap(), Some(1));
            }
            if let Some(every) = every {
                base.memory.checkpointing = Checkpointing::Every(every);
            }
            let expected = rig::run(&model, &waiting(base.clone(), Tier::Device, false), steps);
            let each = if mesh[2] == 1 { 1 } else { 2 };
            for &(tier, is_partitioned) in sweeps::share(&places, first, each) {
                if is_partitioned && mesh[2] == 1 {
                    continue;
                }
                let got = rig::run(&model, &waiting(base.clone(), tier, is_partitioned), steps);
                let what = format!("{mesh:?}, {schedule}, every {every:?}, {tier:?}, {is_partitioned}");
                assert_eq!(got.peaks, got.planned, "{what}: peak == plan");
                assert_same_state(&what, &expected.state, &got.state);
                assert!(same_bits(&expected.losses, &got.losses), "{what}: losses differ");
            }
        }
    }
}

/// Bytes of activations at the peak of the step in device, host and disk memory.
fn activations(config: &RunConfig) -> [u64; 3] {
    let (model, _) = rig::golden_config();
    let model = Gpt2 { layers: LAYERS, ..model };
    let plan = RunPlan::new(rig::spec(&model, config)).unwrap();
    let rank = &plan.ranks[0];
    [&rank.memory, &rank.host, &rank.disk].map(|memory| {
        let step = memory.phase(PhaseName::Step).map(|phase| phase.peak.categories);
        step.map_or(0, |categories| categories.get(Category::Activations))
    })
}

const LAYERS: usize = 12;

#[test]
fn inputs_leave_device_memory() {
    let folder = tempfile::tempdir().unwrap();
    for tensor in [1, 2] {
        let mut base = config(folder.path(), [1, 1, tensor]);
        base.memory.checkpointing = Checkpointing::Every(1);
        let (model, batch) = (rig::golden_config().0, base.batch.global);
        // bf16
        let input = (2 * batch * base.model.seq * model.hidden) as u64;
        let [device, ..] = activations(&waiting(base.clone(), Tier::Device, false));
        for (tier, place) in [(Tier::Host, 1), (Tier::Nvme, 2)] {
            let away = activations(&waiting(base.clone(), tier, false));
            // Up to four are on their way or in use.
            assert!(away[0] + (LAYERS as u64 - 4) * input <= device, "{tier:?}: {away:?} of {device}");
            assert_eq!(away[place], LAYERS as u64 * input, "{tier:?}");
        }
        if tensor == 2 {
            let [parts, ..] = activations(&waiting(base, Tier::Device, true));
            let saved = (LAYERS as u64 - 2) * input / 2;
            assert!(parts + saved <= device, "in parts {parts}, whole {device}");
        }
    }
}
