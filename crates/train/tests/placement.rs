//! `memory.placement` and the static fractions: the same bits wherever chunks lie, no memory beyond its budget, and a
//! budget that is too small is refused with the smallest that would do.

use crate::rig;
use std::path::Path;

use crate::rig::assert_same_state;
use phalanx_plan::trace::{Category, PhaseName};
use phalanx_tensor::Memory;
use phalanx_train::config::Paths;
use phalanx_train::config::{Chunk, Float, PlacementPolicy};
use phalanx_train::planning::{BudgetError, PlanError};
use phalanx_train::{RunConfig, RunPlan};

const MIB: f64 = 1_048_576.0;

/// Small chunks, so that some of them can leave and others stay.
fn config(world: usize, zero: u8, compute: Float) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.data, config.parallel.zero) = (Some(world), zero);
    (config.precision.compute, config.memory.chunk) = (compute, Chunk::Mebibytes(0.02));
    config
}

fn plan(config: &RunConfig) -> Result<RunPlan, PlanError> {
    let (model, _) = rig::golden_config();
    RunPlan::new(rig::spec(&model, config))
}

fn auto(config: &RunConfig, budget: u64) -> RunConfig {
    let mut config = config.clone();
    config.memory.placement = Some(PlacementPolicy::Auto);
    (config.memory.device_budget_mb, config.memory.headroom) = (Some(budget as f64 / MIB), 0.0);
    config
}

fn in_host(mut config: RunConfig, budget_mb: f64) -> RunConfig {
    config.memory.host_budget_mb = Some(budget_mb);
    config
}

fn on_disk(mut config: RunConfig, folder: &Path) -> RunConfig {
    config.memory.nvme_path = Some(Paths::One(folder.display().to_string()));
    config
}

/// Bytes of states and parameters in each memory, of all ranks, before the first step.
fn stored(plan: &RunPlan) -> [u64; 3] {
    Memory::ALL.map(|memory| {
        let of = |rank: &phalanx_train::RankPlan| {
            let planned = match memory {
                Memory::Device => &rank.memory,
                Memory::Host => &rank.host,
                Memory::Disk => &rank.disk,
            };
            let init = planned.phase(PhaseName::Init).map(|phase| phase.peak.categories);
            init.map_or(0, |init| init.get(Category::Optimizer) + init.get(Category::Parameters))
        };
        plan.ranks.iter().map(of).sum()
    })
}

/// The smallest budget that a refusal names; the plan with it.
fn smallest(config: &RunConfig, budget: u64) -> Result<(u64, RunPlan), Box<RunPlan>> {
    match plan(&auto(config, budget)) {
        Ok(plan) => Err(Box::new(plan)),
        Err(PlanError::Budget(BudgetError::Device { smallest_bytes, .. })) => {
            assert!(smallest_bytes > budget, "{smallest_bytes} of {budget}");
            let plan = plan(&auto(config, smallest_bytes)).expect("the smallest budget that would do");
            Ok((smallest_bytes, plan))
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn auto_keeps_every_bit_and_its_budgets() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..6];
    let (mut ran, mut refused) = (0, 0);
    for (world, zero, compute) in
        [(1, 0, Float::F32), (2, 1, Float::Bf16), (2, 2, Float::F32), (2, 3, Float::Bf16), (1, 3, Float::F32)]
    {
        let base = config(world, zero, compute);
        let need = plan(&base).unwrap().arena_bytes_max();
        let expected = rig::run(&model, &base, steps);
        for (percent, tiers) in [(75, "host"), (75, "disk"), (50, "host"), (25, "both")] {
            let elsewhere = match tiers {
                "host" => in_host(base.clone(), 64.0),
                "disk" => on_disk(base.clone(), folder.path()),
                _ => in_host(on_disk(base.clone(), folder.path()), 0.8),
            };
            let what = format!("{world} ranks, stage {zero}, {compute:?}, {percent}% with {tiers}");
            let (budget, plan) = match smallest(&elsewhere, need * percent / 100) {
                Ok((smallest, plan)) => {
                    refused += 1;
                    (smallest, plan)
                }
                Err(plan) => (need * percent / 100, *plan),
            };
            for rank in &plan.ranks {
                assert!(rank.memory.arena_bytes <= budget, "{what}: {} of {budget}", rank.memory.arena_bytes);
                let host = if tiers == "disk" { u64::MAX } else { elsewhere_bytes(&elsewhere) };
                assert!(rank.host.arena_bytes <= host, "{what}: {} of {host}", rank.host.arena_bytes);
            }
            let config = auto(&elsewhere, budget);
            let measured = rig::run(&model, &config, steps);
            assert_eq!(measured.peaks, measured.planned, "{what}: peak == plan");
            assert_same_state(&what, &expected.state, &measured.state);
            assert_eq!(expected.losses, measured.losses, "{what}");
            ran += 1;
        }
        // With room for everything, nothing leaves the device.
        let roomy = plan(&auto(&in_host(base, 64.0), need)).unwrap();
        assert_eq!(stored(&roomy)[1..], [0, 0]);
    }
    assert!(ran == 20 && (1..10).contains(&refused), "{ran} ran, {refused} of them after a refusal");
}

fn elsewhere_bytes(config: &RunConfig) -> u64 {
    (config.memory.host_budget_mb.unwrap() * MIB) as u64
}

#[test]
fn a_byte_less_than_the_smallest_budget_is_refused() {
    for (world, zero) in [(1, 0), (2, 3)] {
        let base = in_host(config(world, zero, Float::Bf16), 64.0);
        let Ok((smallest, _)) = smallest(&base, 4096) else { panic!("a page is a budget") };
        // Planned peaks are multiples of an alignment of some bytes.
        let refused = plan(&auto(&base, smallest - 4096)).err().expect("refused").to_string();
        assert!(refused.contains("the smallest that would do is memory.device_budget_mb"), "{refused}");
    }
}

/// Collectives of a device with a memory of its own pass through host memory, also where no chunk lies there.
#[test]
fn the_buffers_of_collectives_count_where_nothing_leaves_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = rig::golden_config();
    let of = |config: &RunConfig| {
        let spec = rig::spec(&model, config);
        RunPlan::new(rig::addressed(spec, false))
    };
    for (world, zero) in [(2, 0), (2, 2), (4, 3)] {
        let base = config(world, zero, Float::Bf16);
        let need = of(&base).unwrap().arena_bytes_max();
        for disk in [false, true] {
            let base = if disk { on_disk(base.clone(), folder.path()) } else { base.clone() };
            let budget = |host_mb| auto(&in_host(base.clone(), host_mb), need);
            let refused = of(&budget(0.01)).err().expect("10 KiB of host memory are refused");
            let PlanError::Budget(BudgetError::Host { smallest_bytes, .. }) = refused else {
                panic!("{refused}")
            };
            let plan = of(&budget(smallest_bytes as f64 / MIB)).expect("the smallest budget that would do");
            let used = plan.ranks.iter().map(|rank| rank.host.arena_bytes).max().unwrap();
            assert!(used > 10 << 10 && used <= smallest_bytes, "{used} of {smallest_bytes}");
        }
    }
}

#[test]
fn states_leave_before_parameters_and_no_more_than_must() {
    let base = config(2, 3, Float::Bf16);
    let need = plan(&base).unwrap().arena_bytes_max();
    let base = in_host(base, 64.0);
    let mut last = [u64::MAX, 0];
    for percent in [100, 95, 90, 80, 70, 60] {
        let Ok(plan) = plan(&auto(&base, need * percent / 100)) else { break };
        let lies = |of: fn(phalanx_parallel::zero::ChunkResidence) -> Memory| {
            plan.spec.zero.residence[0].described().filter(|chunk| of(*chunk) != Memory::Device).count()
        };
        let (states, parameters) = (lies(|chunk| chunk.optimizer), lies(|chunk| chunk.parameters));
        let chunks = plan.spec.zero.residence[0].described().count() - 1;
        assert!(parameters == 0 || states + 1 >= chunks, "{percent}%: {states}, {parameters} of {chunks}");
        let [device, host, _] = stored(&plan);
        assert!(device <= last[0] && host >= last[1], "{percent}%: less room, less on the device");
        last = [device, host];
    }
    assert!(last[1] > 0, "something left the device");
}

#[test]
fn fractions_move_their_share_of_the_bytes() {
    let (model, _) = rig::golden_config();
    let folder = tempfile::tempdir().unwrap();
    let steps = &rig::golden_steps()[..4];
    let base = config(2, 3, Float::Bf16);
    let expected = rig::run(&model, &base, steps);
    let all = stored(&plan(&base).unwrap())[0];
    for (optimizer, parameters, nvme) in
        [(0.0, 0.0, false), (0.3, 0.0, false), (0.5, 0.0, true), (1.0, 0.4, false), (1.0, 1.0, true)]
    {
        let mut config = base.clone();
        let memory = &mut config.memory;
        (memory.shard_param_frac, memory.offload_optim_frac, memory.offload_param_frac) =
            (Some(1.0), Some(optimizer), Some(parameters));
        if nvme {
            memory.placement = Some(PlacementPolicy::Nvme);
            config = on_disk(config, folder.path());
        }
        let plan = plan(&config).unwrap();
        let [device, host, disk] = stored(&plan);
        // States and master weights take 12 bytes of 14.
        let moved = all as f64 * (12.0 * optimizer + 2.0 * parameters) / 14.0;
        let largest = 14 * plan.spec.mesh.layout.largest_chunk();
        let away = if nvme { disk } else { host };
        assert!(
            (away as f64 - moved).abs() <= largest as f64,
            "{optimizer}, {parameters}: {away}, not {moved}"
        );
        assert_eq!(device + host + disk, all);
        let measured = rig::run(&model, &config, steps);
        assert_same_state(&format!("{optimizer}, {parameters}"), &expected.state, &measured.state);
    }
}

/// Parameters that are whole on every rank are gathered once after the update, and not in forward or backward.
#[test]
fn a_fraction_of_the_parameters_may_stay_whole() {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..6];
    for (world, compute) in [(2, Float::Bf16), (4, Float::F32)] {
        let base = config(world, 3, compute);
        let expected = rig::run(&model, &base, steps);
        let parameters = |config: &RunConfig| {
            let init = plan(config).unwrap().of(0).memory.phase(PhaseName::Init).unwrap().peak.categories;
            init.get(Category::Parameters)
        };
        let gathered = |config: &RunConfig| plan(config).unwrap().of(0).step.sent_bytes;
        let (shards, sent) = (parameters(&base), gathered(&base));
        let mut stage_two = base.clone();
        stage_two.parallel.zero = 2;
        let (whole, sent_whole) = (parameters(&stage_two), gathered(&stage_two));
        let (mut last, mut last_sent) = (whole, sent_whole);
        for fraction in [0.0, 0.25, 0.5, 1.0] {
            let mut config = base.clone();
            config.memory.shard_param_frac = Some(fraction);
            let measured = rig::run(&model, &config, steps);
            let what = format!("{world} ranks, {compute:?}, {fraction}");
            assert_eq!(measured.peaks, measured.planned, "{what}: peak == plan");
            assert_same_state(&what, &expected.state, &measured.state);
            let (here, moved) = (parameters(&config), gathered(&config));
            assert!(
                here <= last && moved >= last_sent,
                "{what}: {here} after {last}, {moved} after {last_sent}"
            );
            (last, last_sent) = (here, moved);
            assert!(fraction != 0.0 || (here, moved) == (whole, sent_whole), "{what}: {here}, {moved}");
        }
        assert_eq!((last, last_sent), (shards, sent));
    }
}

/// The table lists the bytes that the dry run copies: copies of a step that a run with everything on the device does not make.
#[test]
fn the_table_lists_every_byte_that_moves() {
    let folder = tempfile::tempdir().unwrap();
    for (world, zero, compute, percent) in
        [(1, 0, Float::F32, 80), (2, 2, Float::Bf16, 85), (2, 3, Float::Bf16, 60), (1, 3, Float::F32, 50)]
    {
        for disk in [false, true] {
            let base = config(world, zero, compute);
            let copied =
                |plan: &RunPlan| -> u64 { plan.of(0).step.copies.iter().map(|copy| copy.bytes).sum() };
            let home = plan(&base).unwrap();
            let budget = home.arena_bytes_max() * percent / 100;
            let elsewhere = if disk { on_disk(base, folder.path()) } else { in_host(base, 64.0) };
            let placed = match smallest(&elsewhere, budget) {
                Ok((_, plan)) => plan,
                Err(plan) => *plan,
            };
            let table = placed.placed_chunks(0);
            let moved: u64 = table.iter().map(|chunk| chunk.moved_bytes).sum();
            // On the processor, kernels work on host memory where it is.
            assert!(moved > 0 || !disk, "{world} ranks, stage {zero}");
            // An update on the host brings one factor for all chunks.
            let all = copied(&placed) - copied(&home);
            assert!(
                (moved..moved + 64).contains(&all),
                "{world}, stage {zero}, {compute:?}: {moved}, not {all}"
            );
            assert_eq!(table.len(), placed.spec.zero.residence[0].described().count() - 1);
            assert!(table[0].first.starts_with("wte") || table[0].first.contains("wte"), "{:?}", table[0]);
        }
    }
}
