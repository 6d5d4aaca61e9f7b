//! Updates within backward: the same bits as updates behind it, on every mesh, stage, policy and placement; no memory for
//! gradients; gradients that are not finite are never applied and end the run.

use crate::rig;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::rig::{Policy, Ran, assert_same_state, same_bits};
use phalanx_checkpoint::HuggingFaceDir;
use phalanx_layers::{
    Activation, AnyLayer, AnyOwn, AnySaved, Block, Call, Context, Failure, Layer, Network, ParameterSpec,
};
use phalanx_models::Gpt2;
use phalanx_plan::Machine;
use phalanx_plan::trace::{Category, PhaseName};
use phalanx_testing::sweeps;
use phalanx_train::config::{
    Checkpointing, Chunk, ChunkWord, Float, OptimizerKind, PlacementPolicy, PrecisionConfig, Tier, UpdateOn,
    Updates,
};
use phalanx_train::planning::{BudgetError, PlanError};
use phalanx_train::rank::Batch;
use phalanx_train::{Groups, Rank, RunConfig, RunError, RunPlan, Spec};

const MIB: f64 = 1_048_576.0;

type Change = fn(&mut RunConfig);

/// Policies without a loss scale.
const POLICIES: [Policy; 5] = [
    ("f32", |_| {}),
    ("bf16", |p| p.compute = Float::Bf16),
    ("bf16, summed in bf16", |p| (p.compute, p.accumulate) = (Float::Bf16, Float::Bf16)),
    ("bf16, sent in bf16", |p| (p.compute, p.communicate) = (Float::Bf16, Some(Float::Bf16))),
    ("f32, sent in bf16", |p| p.communicate = Some(Float::Bf16)),
];

fn config(world: usize, zero: u8, policy: fn(&mut PrecisionConfig)) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.data, config.parallel.zero) = (Some(world), zero);
    config.memory.chunk = Chunk::Mebibytes(0.05);
    config.optimizer.clip = 0.0;
    policy(&mut config.precision);
    config
}

/// Runs `steps` steps with or without the key, on the processor or on a simulated device.
fn run(config: &RunConfig, steps: usize, within: bool, host_addressable: bool) -> Ran {
    let (model, _) = rig::golden_config();
    let mut config = config.clone();
    config.memory.update_in_backward = within;
    let spec = rig::addressed(rig::spec(&model, &config), host_addressable);
    rig::run_spec(spec, &config, &rig::golden_steps()[..steps], &rig::Checkpoints::default())
}

/// Compares a run with the same run with updates within backward: on the processor where `number` is even, else on a simulated
/// device; in whole sweeps on both.
fn check(what: &str, number: usize, config: &RunConfig, steps: usize) {
    let expected = run(config, steps, false, true);
    for host_addressable in sweeps::share(&[true, false], number, 2) {
        let what = format!("{what}, host addresses device memory: {host_addressable}");
        rig::assert_same_run(&what, &expected, &run(config, steps, true, *host_addressable));
    }
}

#[test]
fn no_stage_or_policy_changes_a_bit() {
    let steps = if sweeps::are_whole() { 20 } else { 6 };
    for (at, (name, policy)) in POLICIES.into_iter().enumerate() {
        let places = [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)];
        for (number, (world, zero)) in (at..).zip(places) {
            let what = format!("{name}, {world} ranks, stage {zero}");
            check(&what, number, &config(world, zero, policy), steps);
        }
    }
}

fn on_disk(config: &mut RunConfig) {
    config.memory.optimizer = Tier::Nvme;
    config.memory.nvme_path = Some(std::env::temp_dir().as_path().into());
}

#[test]
fn no_placement_changes_a_bit() {
    let changes: [(&str, Change); 9] = [
        ("states in host memory", |c| c.memory.optimizer = Tier::Host),
        ("states in host memory, updated by the device", |c| {
            (c.memory.optimizer, c.memory.update) = (Tier::Host, UpdateOn::Device);
        }),
        ("states on disk", on_disk),
        ("states on disk in tiles of one block, updated by the device", |c| {
            on_disk(c);
            (c.memory.update, c.memory.buffer_mb) = (UpdateOn::Device, 1.0 / 64.0);
        }),
        ("everything on disk in tiles of one block", |c| {
            on_disk(c);
            (c.parallel.zero, c.memory.parameters, c.memory.buffer_mb) = (3, Tier::Nvme, 1.0 / 64.0);
        }),
        ("parameters on disk, updated by the device", |c| {
            on_disk(c);
            (c.parallel.zero, c.memory.parameters, c.memory.buffer_mb) = (3, Tier::Nvme, 1.0 / 64.0);
            c.memory.update = UpdateOn::Device;
        }),
        ("parameters in host memory alone", |c| {
            (c.parallel.zero, c.memory.parameters, c.memory.prefetch) = (3, Tier::Host, 2);
        }),
        ("placement on disk", |c| {
            c.memory.placement = Some(PlacementPolicy::Nvme);
            c.memory.nvme_path = Some(std::env::temp_dir().as_path().into());
        }),
        ("some states in host memory", |c| c.memory.offload_optim_frac = Some(0.5)),
    ];
    for (at, (name, change)) in changes.into_iter().enumerate() {
        // Both policies together try every change in every place.
        for (first, (bits, policy)) in (at..).zip(&POLICIES[..2]) {
            let places = sweeps::share(&[(1, 0), (1, 3), (2, 1), (2, 3)], first, 2);
            for (number, (world, zero)) in (at / 2..).zip(places) {
                let mut config = config(*world, *zero, *policy);
                change(&mut config);
                let what = format!("{name}, {bits}, {world} ranks, stage {}", config.parallel.zero);
                check(&what, number, &config, 5);
            }
        }
    }
}

#[test]
fn nothing_else_changes_a_bit() {
    let changes: [(&str, Change); 7] = [
        ("no overlap", |c| c.parallel.overlap = false),
        ("no chunks", |c| c.memory.chunk = Chunk::Word(ChunkWord::None)),
        ("one chunk", |c| c.memory.chunk = Chunk::Mebibytes(64.0)),
        ("small chunks", |c| c.memory.chunk = Chunk::Mebibytes(0.02)),
        ("prefetch 4", |c| c.memory.prefetch = 4),
        ("blocks computed again", |c| c.memory.checkpointing = Checkpointing::Every(1)),
        ("SGD", |c| (c.optimizer.kind, c.optimizer.lr) = (OptimizerKind::Sgd, 0.05)),
    ];
    for (at, (name, change)) in changes.into_iter().enumerate() {
        for (number, (world, zero)) in (at..).zip([(1, 0), (2, 2), (4, 3)]) {
            let mut config = config(world, zero, POLICIES[1].1);
            change(&mut config);
            check(&format!("{name}, {world} ranks, stage {zero}"), number, &config, 5);
        }
    }
}

/// The specification of a run of `model` on the processor or on a simulated device.
fn spec_on(model: &Gpt2, config: &RunConfig, host_addressable: bool) -> Spec {
    let spec = rig::spec(model, config);
    rig::addressed(spec, host_addressable)
}

/// The first plan that fits its budgets, each replaced by the smallest that would do where it is refused; whether one was.
fn plan_within(what: &str, model: &Gpt2, config: &mut RunConfig, host_addressable: bool) -> (RunPlan, bool) {
    for refusals in 0..=2 {
        match RunPlan::new(spec_on(model, config, host_addressable)) {
            Ok(plan) => return (plan, refusals > 0),
            Err(PlanError::Budget(BudgetError::Device { smallest_bytes, .. })) => {
                config.memory.device_budget_mb = Some(smallest_bytes as f64 / MIB);
            }
            Err(PlanError::Budget(BudgetError::Host { smallest_bytes, .. })) => {
                config.memory.host_budget_mb = Some(smallest_bytes as f64 / MIB);
            }
            Err(other) => panic!("{what}: {other}"),
        }
    }
    panic!("{what}: refused more than once for each memory");
}

/// With budgets of 75, 50 and 25 % of what everything on the device needs, or the smallest that would do: the same bits, and no memory
/// beyond its budget. Simulated devices have host memory below them, the processor a part of its own, and both the disk.
#[test]
fn auto_keeps_every_bit_and_its_budgets() {
    let folder = tempfile::tempdir().unwrap();
    // States are most of the memory, and some chunks can leave while others stay.
    let model = Gpt2 { layers: 8, ..rig::golden_config().0 };
    let steps = &rig::golden_steps()[..4];
    let fresh = rig::Checkpoints { fresh: true, ..Default::default() };
    let run = |config: &RunConfig, host_addressable| {
        rig::run_spec(spec_on(&model, config, host_addressable), config, steps, &fresh)
    };
    let (mut ran, mut refused, mut away) = (0, 0, [0; 2]);
    for (first, (bits, policy)) in [POLICIES[0], POLICIES[2]].into_iter().enumerate() {
        for (world, zero) in sweeps::share(&[(1, 0), (1, 3), (2, 1), (2, 3)], first, 2) {
            let (world, zero) = (*world, *zero);
            let mut base = config(world, zero, policy);
            base.batch.global = 2 * world;
            (base.memory.chunk, base.memory.buffer_mb) = (Chunk::Mebibytes(0.02), 1.0 / 64.0);
            base.memory.prefetch = 2;
            let expected = run(&base, true);
            base.memory.update_in_backward = true;
            for host_addressable in [true, false] {
                let plan = RunPlan::new(spec_on(&model, &base, host_addressable)).unwrap();
                let need = plan.arena_bytes_max();
                for (percent, host_mb, on_disk) in
                    [(75, Some(64.0), false), (50, None, true), (50, Some(1.0), true), (25, Some(64.0), true)]
                {
                    let what = format!(
                        "{bits}, {world} ranks, stage {zero}, {percent} %, {host_mb:?} MiB of host memory, \
                         host addresses device memory: {host_addressable}"
                    );
                    let mut config = base.clone();
                    let memory = &mut config.memory;
                    (memory.placement, memory.headroom) = (Some(PlacementPolicy::Auto), 0.0);
                    let budget = (need * percent / 100) as f64 / MIB;
                    (memory.device_budget_mb, memory.host_budget_mb) = (Some(budget), host_mb);
                    memory.nvme_path = on_disk.then(|| folder.path().into());
                    let (plan, was_refused) = plan_within(&what, &model, &mut config, host_addressable);
                    let memory = &config.memory;
                    let bytes = |mib: Option<f64>| mib.map_or(u64::MAX, |mib| (mib * MIB) as u64);
                    for rank in &plan.ranks {
                        let [device, host] = [&rank.memory, &rank.host].map(|memory| memory.arena_bytes);
                        assert!(device <= bytes(memory.device_budget_mb), "{what}: {device}");
                        assert!(host <= bytes(memory.host_budget_mb), "{what}: {host}");
                    }
                    rig::assert_same_run(&what, &expected, &run(&config, host_addressable));
                    (ran, refused) = (ran + 1, refused + usize::from(was_refused));
                    for (count, memory) in away.iter_mut().zip([&plan.ranks[0].host, &plan.ranks[0].disk]) {
                        let kept = memory.phase(PhaseName::Init).map(|init| init.peak.categories);
                        *count += usize::from(kept.is_some_and(|kept| kept.get(Category::Optimizer) > 0));
                    }
                }
            }
        }
    }
    assert!(
        ran == if sweeps::are_whole() { 64 } else { 32 }
            && refused < ran / 2
            && away.iter().all(|away| *away > ran / 3),
        "{ran} ran, {refused} after a refusal, {away:?} with states in host memory and on disk"
    );
}

/// The table that embedding and head share is summed over two stages behind backward, and updated there.
#[test]
fn tensor_and_pipeline_axes_change_no_bit() {
    for ([pipeline, data, tensor], zero) in
        [([1, 1, 2], 0), ([1, 2, 2], 3), ([2, 1, 1], 0), ([2, 2, 1], 2), ([2, 1, 2], 3)]
    {
        let mut config = config(data, zero, POLICIES[1].1);
        (config.parallel.pipeline, config.parallel.tensor) = (pipeline, tensor);
        // Runs one micro-batch.
        config.parallel.schedule = "model".into();
        for (number, (name, change)) in
            (usize::from(zero)..).zip([("", (|_| {}) as Change), (", states on disk", on_disk)])
        {
            let mut config = config.clone();
            change(&mut config);
            check(&format!("{pipeline} x {data} x {tensor}, stage {zero}{name}"), number, &config, 5);
        }
    }
}

/// Gradients take no memory of their own; what remains are buffers of chunks on their way to their update.
#[test]
fn gradients_take_no_memory() {
    let (model, _) = rig::golden_config();
    for (world, zero) in [(1, 0), (2, 1), (2, 3)] {
        let plan = |within| {
            let mut config = config(world, zero, POLICIES[0].1);
            config.memory.chunk = Chunk::Mebibytes(0.02);
            config.memory.update_in_backward = within;
            RunPlan::new(rig::spec(&model, &config)).unwrap()
        };
        let [without, with] = [false, true].map(plan);
        let of = |plan: &RunPlan, phase, category| {
            plan.of(0).memory.phase(phase).unwrap().peak.categories.get(category)
        };
        let gradients = of(&without, PhaseName::Init, Category::Gradients);
        assert!(gradients > 0);
        assert_eq!(of(&with, PhaseName::Init, Category::Gradients), 0);
        assert_eq!(with.textbook.state.gradients, 0);
        let [without, with] = [&without, &with].map(|plan| plan.of(0).peak().bytes);
        assert!(with + gradients / 3 < without, "{world} ranks, stage {zero}: {with} and {without}");
    }
}

/// On a machine whose copies take longer than its kernels, an update waits for its states; within backward, they come beside
/// the kernels of the next block.
#[test]
fn the_states_of_the_next_chunk_come_while_backward_computes() {
    let (model, _) = rig::golden_config();
    let mut config = config(1, 3, POLICIES[1].1);
    (config.memory.optimizer, config.memory.update) = (Tier::Host, UpdateOn::Device);
    // Several tiles in each chunk.
    config.memory.buffer_mb = 1.0 / 64.0;
    let machine: Machine = serde_json::from_value(serde_json::json!({
        "name": "test", "memory_bytes": 1, "host_bytes": 1, "memory_gb_per_s": 1.0, "host_gb_per_s": 1.0,
        "copy": { "latency_us": 0.0, "gb_per_s": 1.0 }, "tflops": { "f32": 0.01, "bf16": 0.01 },
    }))
    .unwrap();
    let mut time = |within| {
        config.memory.update_in_backward = within;
        let spec = rig::addressed(rig::spec(&model, &config), false);
        RunPlan::new(spec).unwrap().step_times(&machine).unwrap()[0]
    };
    let [behind, within] = [false, true].map(&mut time);
    let (waits, waited) = (within.exposed_copy_s, behind.exposed_copy_s);
    assert!(waits < 0.7 * waited, "waits for copies: {waits} s within backward, {waited} s behind it");
}

#[test]
fn a_checkpoint_resumes_with_and_without() {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..6];
    let folder = tempfile::tempdir().unwrap();
    let of = |within| {
        let mut config = config(2, 2, POLICIES[1].1);
        on_disk(&mut config);
        config.memory.update_in_backward = within;
        config
    };
    let whole = rig::run(&model, &of(false), steps);
    for from in [false, true] {
        let dir = folder.path().join(from.to_string());
        let save = rig::Checkpoints { save: Some(dir.clone()), ..Default::default() };
        rig::run_between(&model, &of(from), &steps[..3], &save);
        let restore = rig::Checkpoints { restore: Some(dir.join("step-3")), ..Default::default() };
        for to in [false, true] {
            let rest = rig::run_between(&model, &of(to), &steps[3..], &restore);
            assert_same_state(&format!("{from} to {to}"), &whole.state, &rest.state);
        }
    }
}

#[test]
fn what_it_needs_is_said() {
    let cases: [(Change, &str); 9] = [
        (|c| c.optimizer.clip = 1.0, "optimizer.clip = 0 (it is 1)"),
        (|c| c.precision.compute = Float::F16, "loss scale"),
        (|c| c.batch.micro = Some(2), "one micro-batch per step, but each rank has 2"),
        (|c| (c.parallel.zero, c.parallel.updates) = (0, Updates::Asynchronous), "parallel.updates"),
        (|c| (c.parallel.tensor, c.parallel.sequence_parallel) = (2, true), "parallel.sequence_parallel"),
        (|c| c.memory.gradients = Tier::Host, "needs memory.gradients = \"device\""),
        (
            |c| {
                c.precision.accumulate = Float::Bf16;
                c.memory.gradients_in_place = true;
            },
            "needs memory.gradients_in_place = false",
        ),
        (
            |c| {
                (c.memory.gradients, c.memory.optimizer) = (Tier::Host, Tier::Host);
                c.memory.delayed_update = true;
            },
            "memory.delayed_update",
        ),
        (|c| c.batch.global = 16, "one micro-batch"),
    ];
    for (change, words) in cases {
        let mut config = config(2, 2, POLICIES[1].1);
        config.memory.update_in_backward = true;
        config.check().unwrap();
        change(&mut config);
        if words == "one micro-batch" {
            config.batch.micro = Some(4);
        }
        let refusal = config.check().unwrap_err().to_string();
        assert!(refusal.contains("memory.update_in_backward = true"), "{refusal}");
        assert!(refusal.contains(words), "no {words:?} in: {refusal}");
    }
}

/// Writes a number over the first element of the gradient of one of its parameters, while armed.
struct Faulty {
    layer: Box<dyn AnyLayer>,
    parameter: usize,
    value: f32,
    armed: Arc<AtomicBool>,
}

impl Layer for Faulty {
    type Own = AnyOwn;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.layer.parameters()
    }

    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, AnySaved), Failure> {
        self.layer.forward(cx, call)
    }

    fn backward(&self, cx: &Context, saved: AnySaved, call: Call) -> Result<Option<Activation>, Failure> {
        let parameters = call.parameters;
        let dx = self.layer.backward(cx, saved, call)?;
        if self.armed.load(Ordering::Relaxed) {
            let mut gradient = parameters.gradient(self.parameter).expect("all parameters are trained");
            let (gradient, _) = gradient.write();
            cx.device.fill(gradient.range(0..1), self.value);
        }
        Ok(dx)
    }
}

/// The model's network, on the last rank with a fault in block `h.0`.
fn faulty(spec: &Spec, groups: &Groups, parameter: usize, value: f32, armed: &Arc<AtomicBool>) -> Network {
    let mut network = spec.network(&groups.tensor);
    if groups.world.rank() + 1 == groups.world.world_size() {
        let block = network.blocks.remove(1);
        let layer = Box::new(Faulty { layer: block.layer, parameter, value, armed: Arc::clone(armed) });
        network.blocks.insert(1, Block { layer, ..block });
    }
    network
}

/// The place of `mlp.c_fc.weight` among the parameters of a block.
const FC: usize = 8;

/// End of a rank: its error, whether its state is finite, the refusal of a save, and the evaluation loss before and after the
/// faulty step.
struct Ended {
    text: String,
    is_finite: bool,
    refusal: String,
    evaluated: [f32; 2],
}

/// Steps 1 and 2, the second with a fault on the last rank, on the processor or on a simulated device.
fn with_fault(config: &RunConfig, value: f32, host_addressable: bool, folder: &Path) -> Vec<Ended> {
    let (model, _) = rig::golden_config();
    let (steps, armed) = (rig::golden_steps(), Arc::new(AtomicBool::new(false)));
    let network = |spec: &Spec, groups: &Groups| faulty(spec, groups, FC, value, &armed);
    let body = |engine: &mut Rank, _: usize| {
        engine.import(&HuggingFaceDir::open(&rig::golden().join("gpt2")).unwrap()).unwrap();
        let mut windows = Batch::with_rows(config.batch.global / config.data(), config.model.seq);
        windows.tokens.fill(1);
        let mut before = 0.0;
        for number in [1, 2] {
            before = if number == 2 { engine.evaluate(&windows).unwrap().loss } else { before };
            engine.group().barrier().wait().unwrap();
            armed.store(number == 2, Ordering::Relaxed);
            engine.group().barrier().wait().unwrap();
            let batch = rig::batch(engine, config, &steps[number - 1]);
            match engine.step(number as u64, &batch, false) {
                Ok(_) => assert_eq!(number, 1),
                Err(error) => {
                    assert!(number == 2 && matches!(error, RunError::NonFinite(_)), "{error}");
                    engine.report(|_| Ok(())).unwrap();
                    let state = serde_json::json!({ "step": 2 });
                    let refusal = engine.save_checkpoint(folder, 2, &state).unwrap_err().to_string();
                    engine.save(|_, _| Ok(())).unwrap();
                    let is_finite = rig::pieces(engine).iter().all(|p| p.3.iter().all(|x| x.is_finite()));
                    let evaluated = [before, engine.evaluate(&windows).unwrap().loss];
                    return Ended { text: error.to_string(), is_finite, refusal, evaluated };
                }
            }
        }
        panic!("the fault was not noticed");
    };
    let spec = rig::spec(&model, config);
    let plan = RunPlan::new(rig::addressed(spec, host_addressable)).unwrap();
    rig::on_planned_ranks(&plan, &network, &body)
}

#[test]
fn a_gradient_that_is_not_finite_is_never_applied_and_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    for (at, (bits, policy)) in POLICIES[..2].iter().enumerate() {
        let ranks = [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (3, 3)];
        for (number, (world, zero)) in (at..).zip(ranks) {
            let placements = [
                (Tier::Device, true, f32::NAN),
                (Tier::Host, true, f32::INFINITY),
                (Tier::Host, false, f32::NAN),
                (Tier::Nvme, false, f32::INFINITY),
            ];
            let mut left = None;
            for &(tier, host_addressable, value) in sweeps::share(&placements, number, 2) {
                let mut config = config(world, zero, *policy);
                config.batch.global = 2 * world;
                (config.memory.update_in_backward, config.memory.optimizer) = (true, tier);
                if tier == Tier::Nvme {
                    on_disk(&mut config);
                    config.memory.parameters = if zero == 3 { tier } else { Tier::Device };
                    // Updated by the host's processor, and on the device.
                    config.memory.update = if world == 1 { UpdateOn::Device } else { UpdateOn::Auto };
                }
                let what = format!(
                    "{bits}, {world} ranks, stage {zero}, {tier:?}, host addresses device memory: {host_addressable}"
                );
                let ended = with_fault(&config, value, host_addressable, folder.path());
                for Ended { text, is_finite, refusal, evaluated: [before, after] } in &ended {
                    assert!(*is_finite, "{what}: a number that is not finite was applied");
                    // The same chunks were updated wherever they lie, and the others have not changed.
                    let [first, then] = *left.get_or_insert([*before, *after]);
                    assert!(same_bits(&[first, then], &[*before, *after]), "{what}: {then} and {after}");
                    assert_eq!(text, &ended[0].text, "{what}: all ranks say the same");
                    let start = "step 2: gradient of transformer.h.0.mlp.c_fc.weight on rank";
                    assert!(
                        text.starts_with(start) && text.contains("is not finite (1 of"),
                        "{what}: {text}"
                    );
                    assert!(
                        text.contains("nothing is saved, and the last checkpoint stands"),
                        "{what}: {text}"
                    );
                    assert!(refusal.contains("memory.update_in_backward"), "{what}: {refusal}");
                }
            }
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing was saved");
}

/// The copy of a norm's weight that only another tensor-parallel rank counts: the norm stays finite, and the rank that has found it
/// ends the job.
#[test]
fn a_rank_that_alone_sees_a_gradient_that_is_not_finite_ends_the_job() {
    let (model, _) = rig::golden_config();
    let mut config = config(1, 0, POLICIES[0].1);
    (config.parallel.tensor, config.memory.update_in_backward) = (2, true);
    let armed = Arc::new(AtomicBool::new(true));
    let network = |spec: &Spec, groups: &Groups| faulty(spec, groups, 0, f32::NAN, &armed);
    let body = |engine: &mut Rank, _: usize| {
        engine.initialise(1).unwrap();
        let batch = rig::batch(engine, &config, &rig::golden_steps()[0]);
        (1..=3).find_map(|number| engine.step(number, &batch, false).err()).unwrap().to_string()
    };
    let (_, errors) = rig::on_ranks(&model, &config, &network, &body);
    for error in errors {
        let words = "the gradient of transformer.h.0.ln_1.weight is not finite on this rank alone";
        assert!(error.contains("because of rank 1") && error.contains(words), "{error}");
    }
}
