//! Training on a card, or on the emulator of its driver: losses as on the processor, the same bits for every ZeRO stage and every
//! placement, meshes, checkpoints between the two devices, and no allocation within a step.
//!
//! Needs a driver (`libcuda.so`, which may be the emulator's) and NVRTC in the folder `PHALANX_NVRTC`; without them the tests say so
//! and check nothing. `PHALANX_TEST_DEVICE=cuda` runs the other tests of this folder on cards, which takes an emulator longer.
#![allow(clippy::print_stderr, reason = "a test that checks nothing says so")]

use crate::rig;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::rig::{Checkpoints, Ran, Steps, assert_same_state, devices, pairs, same_bits};
use phalanx_cuda::checks::graphs::fail_captures;
use phalanx_cuda::compiler::Compiler;
use phalanx_cuda::{Folders, Launches, Options, scratch_needed};
use phalanx_models::Gpt2;
use phalanx_train::config::{Checkpointing, Chunk, Float, PlacementPolicy, Products, Tier, UpdateOn};
use phalanx_train::{RunConfig, RunPlan, on_threads};

/// The process has one driver, which a failure makes unusable: tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// None, with a line that says why, where there is no driver or no compiler.
fn turn(test: &str) -> Option<MutexGuard<'static, ()>> {
    let nvrtc = std::env::var_os("PHALANX_NVRTC");
    let usable = phalanx_cuda::driver::load()
        .and_then(|()| Compiler::load(nvrtc.as_deref().map(Path::new), &Folders::default()));
    match usable {
        Ok(_) => Some(TURN.lock().unwrap_or_else(PoisonError::into_inner)),
        Err(error) => {
            eprintln!("{test}: skipped: {error}");
            None
        }
    }
}

/// The golden model, on 4 sequences of 8 tokens a step.
fn small(compute: Float) -> (Gpt2, RunConfig, Steps) {
    let (model, mut config) = rig::golden_config();
    (config.model.seq, config.batch.global) = (8, 4);
    config.precision.compute = compute;
    // No step is skipped.
    config.precision.initial_scale_power = 10;
    let short = |step: &Vec<Vec<u32>>| step[..4].iter().map(|tokens| tokens[..9].to_vec()).collect();
    (model, config, rig::golden_steps()[..3].iter().map(short).collect())
}

fn on_cards(model: &Gpt2, config: &RunConfig, steps: &Steps) -> Ran {
    let ran = devices::on_cards(|| rig::run(model, config, steps));
    assert_eq!(ran.peaks, ran.planned, "peak == plan");
    ran
}

#[track_caller]
fn check_same(what: &str, a: &Ran, b: &Ran) {
    assert!(same_bits(&a.losses, &b.losses), "{what}: losses {:?} and {:?}", a.losses, b.losses);
    assert!(same_bits(&a.grad_norms, &b.grad_norms), "{what}: norms");
    assert_same_state(what, &a.state, &b.state);
}

/// As `goldens.rs` has it for f32 and for runs that compute in 16 bits: losses near 4, in another order of sums.
fn tolerance(compute: Float) -> f32 {
    match compute {
        Float::F32 => 2e-6,
        Float::Bf16 => 16.0 / 512.0,
        Float::F16 => 16.0 / 4096.0,
    }
}

#[track_caller]
fn check_near(what: &str, found: &Ran, expected: &Ran, tolerance: f32) {
    for (i, (found, expected)) in pairs(&found.losses, &expected.losses).enumerate() {
        assert!((found - expected).abs() < tolerance, "{what}: loss {i}: {found} for {expected}");
    }
}

#[test]
fn losses_are_the_processors_and_zero_stages_have_the_same_bits() {
    let Some(_turn) = turn("losses and ZeRO stages") else { return };
    for compute in [Float::F32, Float::Bf16, Float::F16] {
        let (model, mut config, steps) = small(compute);
        (config.parallel.data, config.batch.micro) = (Some(2), Some(1));
        let expected = rig::run(&model, &config, &steps);
        let first = on_cards(&model, &config, &steps);
        check_near(&format!("{compute:?}"), &first, &expected, tolerance(compute));
        for zero in 1..=3 {
            config.parallel.zero = zero;
            config.memory.chunk = Chunk::Mebibytes(0.02);
            let ran = on_cards(&model, &config, &steps);
            check_same(&format!("{compute:?}, stage {zero}"), &first, &ran);
        }
    }
}

#[test]
fn meshes_of_two_and_four_ranks_follow_one_rank() {
    let Some(_turn) = turn("meshes") else { return };
    let (model, mut config, steps) = small(Float::F32);
    config.batch.micro = Some(1);
    let one = rig::run(&model, &config, &steps);
    for [pipeline, data, tensor] in [[1, 1, 2], [2, 1, 1], [2, 1, 2], [1, 2, 2], [2, 2, 1]] {
        let mut config = config.clone();
        let parallel = &mut config.parallel;
        (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
        (parallel.zero, parallel.sequence_parallel) = (2, tensor > 1);
        let what = format!("{pipeline} x {data} x {tensor}");
        check_near(&what, &on_cards(&model, &config, &steps), &one, tolerance(Float::F32));
    }
}

#[test]
fn products_of_tf32_are_near_those_of_f32_and_others() {
    let Some(_turn) = turn("products of TF32") else { return };
    let (model, mut config, steps) = small(Float::F32);
    let expected = on_cards(&model, &config, &steps);
    config.precision.products = Products::Tf32;
    let found = on_cards(&model, &config, &steps);
    assert!(!same_bits(&found.losses, &expected.losses), "the key changes nothing");
    // TF32 has the 11 bits of f16.
    check_near("TF32", &found, &expected, tolerance(Float::F16));
}

/// A change of a configuration that changes no bit.
type Change = fn(&mut RunConfig);

const PLACEMENTS: [(&str, Change); 6] = [
    ("optimizer states in host memory", |c| c.memory.optimizer = Tier::Host),
    ("everything in host memory", |c| {
        (c.parallel.zero, c.memory.placement) = (3, Some(PlacementPolicy::Host))
    }),
    ("everything on disk", |c| {
        (c.parallel.zero, c.memory.placement) = (3, Some(PlacementPolicy::Nvme));
        c.memory.nvme_path = Some(std::env::temp_dir().as_path().into());
    }),
    ("the host's processor updates", updated_by_the_host),
    ("blocks computed again", |c| c.memory.checkpointing = Checkpointing::Every(1)),
    ("block inputs in host memory", |c| c.memory.activations = Tier::Host),
];

#[test]
fn where_things_lie_changes_no_bit() {
    let Some(_turn) = turn("placements") else { return };
    for (ranks, compute) in [(1, Float::F32), (2, Float::Bf16)] {
        let (model, mut config, steps) = small(compute);
        config.parallel.data = Some(ranks);
        config.memory.chunk = Chunk::Mebibytes(0.02);
        let expected = on_cards(&model, &config, &steps);
        for (what, change) in PLACEMENTS {
            let mut config = config.clone();
            change(&mut config);
            check_same(&format!("{what}, {compute:?}"), &expected, &on_cards(&model, &config, &steps));
        }
        let whole = devices::on_cards(|| RunPlan::new(rig::spec(&model, &config))).unwrap();
        config.memory.placement = Some(PlacementPolicy::Auto);
        let budget = whole.arena_bytes_max() * 3 / 4;
        config.memory.device_budget_mb = Some(budget as f64 / f64::from(1 << 20));
        config.memory.host_budget_mb = Some(64.0);
        let ran = on_cards(&model, &config, &steps);
        assert!(ran.peaks.iter().all(|peak| peak.bytes <= budget), "{:?} of {budget}", ran.peaks);
        check_same(&format!("auto, {compute:?}"), &expected, &ran);
    }
}

#[test]
fn updates_within_backward_change_no_bit() {
    let Some(_turn) = turn("updates within backward") else { return };
    for (ranks, zero) in [(1, 0), (2, 3)] {
        let (model, mut config, steps) = small(Float::Bf16);
        (config.parallel.data, config.parallel.zero) = (Some(ranks), zero);
        (config.optimizer.clip, config.memory.chunk) = (0.0, Chunk::Mebibytes(0.02));
        let expected = on_cards(&model, &config, &steps);
        config.memory.update_in_backward = true;
        for (what, tier, update) in [
            ("states on the card", Tier::Device, UpdateOn::Auto),
            ("the host updates", Tier::Host, UpdateOn::Host),
            ("states visit the card", Tier::Host, UpdateOn::Device),
        ] {
            (config.memory.optimizer, config.memory.update) = (tier, update);
            let what = format!("{what}, {ranks} ranks, stage {zero}");
            check_same(&what, &expected, &on_cards(&model, &config, &steps));
        }
    }
}

/// The order in which streams run is the driver's; the emulator's has a seed, and `cargo xtask cuda-emulator` tries several.
#[test]
fn the_order_of_streams_changes_no_bit() {
    let Some(_turn) = turn("order of streams") else { return };
    let (model, mut config, steps) = small(Float::Bf16);
    (config.parallel.data, config.batch.micro) = (Some(2), Some(1));
    let expected = on_cards(&model, &config, &steps);
    (config.parallel.zero, config.memory.placement) = (3, Some(PlacementPolicy::Host));
    (config.memory.activations, config.memory.chunk) = (Tier::Host, Chunk::Mebibytes(0.02));
    check_same("in host memory, stage 3", &expected, &on_cards(&model, &config, &steps));
    config.memory.placement = None;
    updated_by_the_host(&mut config);
    for zero in [1, 3] {
        config.parallel.zero = zero;
        let what = format!("updated by the host, stage {zero}");
        check_same(&what, &expected, &on_cards(&model, &config, &steps));
    }
    // The second step has the initial parameters, as if it were the first.
    config.parallel.zero = 2;
    let second = on_cards(&model, &config, &steps[1..2].to_vec());
    config.memory.delayed_update = true;
    let delayed = on_cards(&model, &config, &steps);
    assert!(same_bits(&delayed.losses[..2], &[expected.losses[0], second.losses[0]]), "{:?}", delayed.losses);
    config.parallel.zero = 0;
    check_same("delayed, stages 0 and 2", &delayed, &on_cards(&model, &config, &steps));
}

fn updated_by_the_host(config: &mut RunConfig) {
    (config.memory.optimizer, config.memory.gradients) = (Tier::Host, Tier::Host);
    config.memory.update = UpdateOn::Host;
}

/// Cost of one more step on all ranks: blocked threads of the host, and operations that the host's thread computes.
#[test]
fn the_hosts_updates_are_computed_beside_the_thread_that_issues_them() {
    let Some(_turn) = turn("updates beside the issuing thread") else { return };
    let (model, mut config, steps) = small(Float::Bf16);
    config.memory.chunk = Chunk::Mebibytes(0.02);
    updated_by_the_host(&mut config);
    for is_delayed in [false, true] {
        config.memory.delayed_update = is_delayed;
        let counts = [&steps[..2], &steps[..3]].map(|steps| {
            on_cards(&model, &config, &steps.to_vec());
            [devices::made().waits(), devices::made().host_operations()]
        });
        let [waits, operations] = [0, 1].map(|which| counts[1][which] - counts[0][which]);
        println!(
            "delayed: {is_delayed}: {waits} waits of the host, {operations} operations of the host in a step"
        );
        assert!(operations > 0, "nothing was computed on the host's thread");
    }
}

/// Captures that fail in the middle: their segments are issued step by step, with the same bits.
#[test]
fn captures_that_fail_change_no_bit() {
    let Some(_turn) = turn("captures that fail") else { return };
    let (model, mut config, steps) = small(Float::Bf16);
    config.batch.micro = Some(1);
    let whole = on_cards(&model, &config, &steps);
    let graphs = devices::graphs_launched();
    for nodes in [0, 3] {
        if !fail_captures(usize::MAX, nodes) {
            return;
        }
        let ran = on_cards(&model, &config, &steps);
        assert_eq!(devices::graphs_launched(), 0, "every capture fails at node {nodes}");
        fail_captures(4, nodes);
        let some = on_cards(&model, &config, &steps);
        fail_captures(0, 0);
        check_same(&format!("all fail at node {nodes}"), &whole, &ran);
        check_same(&format!("four fail at node {nodes}"), &whole, &some);
        let launched = devices::graphs_launched();
        assert!(launched > 0 && launched < graphs, "{launched} of {graphs}");
    }
}

/// Runs with graphs and without, which have the same bits; the latter.
fn check_graphs(what: &str, model: &Gpt2, config: &RunConfig, steps: &Steps) -> Ran {
    let with = on_cards(model, config, steps);
    assert!(devices::graphs_launched() > 0, "{what}: no graph was launched");
    let without = devices::on_cards_without_graphs(|| rig::run(model, config, steps));
    assert_eq!(devices::graphs_launched(), 0, "{what}");
    assert_eq!(with.skipped, without.skipped, "{what}");
    check_same(what, &without, &with);
    without
}

/// Five steps, of which the third and later ones are launched as graphs.
#[test]
fn graphs_change_no_bit() {
    let Some(_turn) = turn("graphs") else { return };
    let short = |step: &Vec<Vec<u32>>| step[..4].iter().map(|tokens| tokens[..9].to_vec()).collect();
    let steps: Steps = rig::golden_steps()[..5].iter().map(short).collect();
    let (model, mut config, _) = small(Float::F32);
    (config.batch.micro, config.model.dropout) = (Some(2), 0.1);
    check_graphs("two micro-batches, dropout", &model, &config, &steps);
    (config.batch.micro, config.parallel.data) = (Some(1), Some(2));
    config.precision.compute = Float::Bf16;
    config.memory.chunk = Chunk::Mebibytes(0.02);
    for zero in 0..=3 {
        config.parallel.zero = zero;
        check_graphs(&format!("stage {zero}"), &model, &config, &steps);
    }
    let (model, mut config, _) = small(Float::F16);
    (config.precision.initial_scale_power, config.precision.hysteresis) = (20, 1);
    config.precision.loss_scale_window = 2;
    let ran = check_graphs("f16", &model, &config, &steps);
    assert!(ran.skipped.contains(&true) && ran.skipped.contains(&false), "{:?}", ran.skipped);
}

/// Steps with evaluations between them: losses of both, and what the card was given to launch in the last of them.
fn steps_and_evaluations(graphs: bool) -> (Vec<f32>, [Launches; 2]) {
    let (model, config, steps) = small(Float::Bf16);
    let run = || {
        let factory = devices::cuda();
        let plan = RunPlan::new(devices::on(&factory, rig::spec(&model, &config))).unwrap();
        let ran = on_threads(&factory, &plan, |rank| {
            rank.initialise(1).unwrap();
            let (mut losses, mut launches) = (Vec::new(), Vec::new());
            for step in 1..=6 {
                let batch = rig::batch(rank, &config, &steps[step as usize % 3]);
                let before = factory.made().launches();
                losses.push(rank.step(step, &batch, false).unwrap().loss);
                let after = factory.made().launches();
                launches.push(since(after, before));
                losses.push(rank.evaluate(&batch).unwrap().loss);
            }
            (losses, [launches[0], launches[5]])
        });
        ran.unwrap().swap_remove(0)
    };
    if graphs { run() } else { devices::on_cards_without_graphs(run) }
}

fn since(after: Launches, before: Launches) -> Launches {
    Launches {
        single: after.single - before.single,
        graphs: after.graphs - before.graphs,
        in_graphs: after.in_graphs - before.in_graphs,
    }
}

#[test]
fn a_steady_step_is_some_graphs_and_few_single_launches() {
    let Some(_turn) = turn("launches of a step") else { return };
    let (losses, [first, steady]) = steps_and_evaluations(true);
    let (expected, [plain, last]) = steps_and_evaluations(false);
    assert!(same_bits(&losses, &expected), "{losses:?} and {expected:?}");
    assert_eq!((plain.graphs, last.graphs), (0, 0));
    assert_eq!(first.graphs, 0, "nothing has come before");
    assert_eq!(steady.single + steady.in_graphs, last.single, "{steady:?} and {last:?}");
    assert!(steady.graphs > 0 && 10 * steady.single < steady.in_graphs, "{steady:?}");
}

#[test]
fn checkpoints_go_from_the_processor_to_cards_and_back() {
    let Some(_turn) = turn("checkpoints") else { return };
    let (model, mut config, steps) = small(Float::Bf16);
    (config.parallel.data, config.parallel.zero) = (Some(2), 2);
    let folder = tempfile::tempdir().unwrap();
    let (before, after) = steps.split_at(2);
    let run = |on_card: bool, steps: &[Vec<Vec<u32>>], checkpoints: &Checkpoints| {
        let run = || rig::run_between(&model, &config, steps, checkpoints);
        if on_card { devices::on_cards(run) } else { run() }
    };
    for from_card in [false, true] {
        let whole = run(from_card, &steps, &Checkpoints::default());
        let dir = folder.path().join(format!("from-{from_card}"));
        run(from_card, before, &Checkpoints { save: Some(dir.clone()), ..Default::default() });
        let restore = Checkpoints { restore: Some(dir.join("step-2")), ..Default::default() };
        let there = run(from_card, after, &restore);
        assert_same_state("resumed where it was saved", &whole.state, &there.state);
        let elsewhere = run(!from_card, after, &restore);
        check_near("resumed on the other device", &elsewhere, &there, tolerance(Float::Bf16));
    }
}

#[test]
fn a_step_needs_the_scratch_that_is_planned() {
    let Some(_turn) = turn("scratch") else { return };
    let (model, mut config, _) = small(Float::F32);
    let run = |config: &RunConfig, scratch_bytes| {
        let options = Options { scratch_bytes, library_products: false, ..Options::default() };
        let factory = devices::cuda_with(options);
        let plan = RunPlan::new(devices::on(&factory, rig::spec(&model, config))).unwrap();
        let ran = on_threads(&factory, &plan, |rank| {
            rank.initialise(1).unwrap();
            let batch = phalanx_train::rank::Batch::with_rows(4, 8);
            rank.step(1, &batch, false).map_err(|error| error.to_string())?;
            rank.evaluate(&batch).map(drop).map_err(|error| error.to_string())
        });
        ran.unwrap().swap_remove(0)
    };
    let (tokens, heads) = ([4, 8, model.hidden], model.heads);
    for compute in [Float::F32, Float::F16] {
        config.precision.compute = compute;
        assert_eq!(run(&config, scratch_needed(tokens, heads, 1)), Ok(()), "{compute:?}");
        let of_attention = (4 * 4 * 8 * heads) as u64;
        let refused = run(&config, of_attention - 1).unwrap_err();
        assert!(refused.contains(&format!("needs {of_attention} bytes of scratch")), "{refused}");
    }
}

#[test]
fn a_step_asks_the_driver_for_nothing() {
    let Some(_turn) = turn("no allocation in a step") else { return };
    let (model, mut config, _) = small(Float::Bf16);
    (config.parallel.data, config.parallel.zero) = (Some(2), 2);
    (config.memory.optimizer, config.batch.micro) = (Tier::Host, Some(1));
    let factory = devices::cuda();
    let plan = RunPlan::new(devices::on(&factory, rig::spec(&model, &config))).unwrap();
    let made = || [factory.made().allocations(), factory.made().objects()];
    let counts = on_threads(&factory, &plan, |rank| {
        rank.initialise(1).unwrap();
        let batch = phalanx_train::rank::Batch::with_rows(2, 8);
        // The first steps load kernels and make as many events as are in use at once.
        for step in 1..=3 {
            rank.step(step, &batch, false).unwrap();
        }
        let before = made();
        for step in 4..=6 {
            rank.step(step, &batch, false).unwrap();
        }
        (before, made())
    });
    let counts = counts.unwrap();
    // Ranks are apart by less than a step, so that the last to begin counts what all have done.
    let (before, after) = counts.iter().max_by_key(|(before, _)| before[1]).unwrap();
    assert!(before[0] > 0 && before[1] > 0, "{before:?}");
    assert_eq!(before[0], after[0], "allocations");
    assert_eq!(before[1], after[1], "modules, streams and events");
}
