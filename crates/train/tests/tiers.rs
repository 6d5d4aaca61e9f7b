//! Optimizer states in host memory or on disk: device memory has none of them, every memory is used as planned,
//! checkpoints are the same and resume into any placement. (`bits.rs` has the bits of whole runs.)

use crate::rig;
use std::path::Path;

use crate::rig::{Ran, assert_same_state, devices, same_bits};
use phalanx_parallel::zero::{ChunkResidence, Residence};
use phalanx_plan::Machine;
use phalanx_plan::trace::{Category, PhaseName};
use phalanx_tensor::{Memory, NORM_BLOCK};
use phalanx_testing::sweeps;
use phalanx_train::config::{Chunk, Float, OptimizerKind, Reduce, Tier, UpdateOn};
use phalanx_train::{RunConfig, RunPlan, Spec, on_threads};

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
                assert!(states >= 12 * with.parameters[0] / if zero == 0 { 1 } else { world as u64 });
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
        ..ChunkResidence::DEVICE
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

/// A few steps with everything on the device.
struct Undisturbed<'a> {
    config: &'a RunConfig,
    folder: &'a Path,
    ran: Ran,
}

impl<'a> Undisturbed<'a> {
    fn new(config: &'a RunConfig, folder: &'a Path) -> Self {
        let ran = rig::run(&rig::golden_config().0, config, &rig::golden_steps()[..4]);
        Undisturbed { config, folder, ran }
    }

    /// Compares it with the same steps after `place`, the only difference: on the processor where `number` is even, else on a
    /// simulated device; in whole sweeps on both.
    fn check(&self, what: &str, number: usize, place: &dyn Fn(&mut Spec)) {
        let (model, _) = rig::golden_config();
        for host_addressable in sweeps::share(&[true, false], number, 2) {
            let mut spec = rig::spec(&model, self.config);
            spec.device.disk = Some(phalanx_tensor::DiskOptions::new(vec![self.folder.to_path_buf()]));
            spec.device.host_addressable &= host_addressable;
            place(&mut spec);
            let steps = &rig::golden_steps()[..4];
            let ran = rig::run_spec(spec, self.config, steps, &rig::Checkpoints::default());
            let what = format!("{what}, host addresses device memory: {host_addressable}");
            assert_eq!(ran.peaks, ran.planned, "{what}: peak == plan");
            assert_same_state(&what, &self.ran.state, &ran.state);
            assert!(same_bits(&self.ran.grad_norms, &ran.grad_norms), "{what}: norms differ");
        }
    }
}

/// Compute type, ranks, ZeRO stage, prefetch.
const PLACED: [(Float, usize, u8, usize); 6] = [
    (Float::F32, 1, 0, 1),
    (Float::Bf16, 2, 0, 1),
    (Float::Bf16, 2, 1, 1),
    (Float::Bf16, 2, 3, 2),
    (Float::F32, 2, 3, 0),
    (Float::F32, 1, 3, 1),
];

#[test]
fn each_chunk_may_lie_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (compute, world, zero, prefetch)) in PLACED.into_iter().enumerate() {
        let mut config = config(Tier::Device, folder.path(), world, zero);
        config.precision.compute = compute;
        (config.memory.chunk, config.memory.prefetch) = (Chunk::Mebibytes(0.02), prefetch);
        let what = format!("{compute:?}, {world} ranks, stage {zero}");
        Undisturbed::new(&config, folder.path()).check(&what, number, &|spec| {
            assert!(spec.mesh.layout.chunk_elements.len() > 6, "chunks of each kind");
            (spec.zero.residence, spec.zero.updates_on_host) = (vec![mixed(zero == 3)], false);
        });
    }
}

#[test]
fn chunks_larger_than_a_buffer_visit_in_tiles() {
    let folder = tempfile::tempdir().unwrap();
    for (at, (compute, world, zero, prefetch)) in PLACED.into_iter().enumerate() {
        let mut config = config(Tier::Device, folder.path(), world, zero);
        config.precision.compute = compute;
        (config.memory.chunk, config.memory.prefetch) = (Chunk::Mebibytes(64.0), prefetch);
        let undisturbed = Undisturbed::new(&config, folder.path());
        for (number, memory) in (at..).zip([Memory::Host, Memory::Disk]) {
            let what = format!("{compute:?}, {world} ranks, stage {zero}, {memory:?}");
            undisturbed.check(&what, number, &|spec| {
                let parameters = if zero == 3 { memory } else { Memory::Device };
                spec.zero.residence = vec![Residence::uniform(ChunkResidence {
                    parameters,
                    optimizer: memory,
                    ..ChunkResidence::DEVICE
                })];
                let chunk = spec.mesh.layout.chunk_elements[0] as usize / world;
                (spec.zero.buffer, spec.zero.updates_on_host) = (3 * NORM_BLOCK, false);
                assert!(
                    !chunk.is_multiple_of(spec.zero.buffer) && chunk / spec.zero.buffer >= 2,
                    "{chunk} in {}",
                    spec.zero.buffer
                );
            });
        }
    }
}

#[test]
fn the_buffer_bounds_what_an_update_needs_on_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(Tier::Nvme, folder.path(), 1, 3);
    (config.memory.chunk, config.memory.update) = (Chunk::Mebibytes(64.0), UpdateOn::Device);
    let visitors = [64.0, 1.0 / 64.0].map(|buffer_mb| {
        config.memory.buffer_mb = buffer_mb;
        let plan = plan(&config);
        let step = plan.of(0).memory.phase(PhaseName::Step).unwrap();
        step.slots.iter().filter(|slot| slot.name == "visitor").map(|slot| slot.bytes).max().unwrap()
    });
    assert_eq!(visitors[1], (NORM_BLOCK * 4) as u64, "a buffer of one block");
    assert!(visitors[0] > 4 * visitors[1], "{visitors:?}");
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

/// Runs with gradients in each tier, for every way in which they are buffered.
fn check_gradients(what: &str, world: usize, zero: u8, change: &dyn Fn(&mut RunConfig)) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(Tier::Device, folder.path(), world, zero);
    config.memory.chunk = Chunk::Mebibytes(0.3);
    change(&mut config);
    let undisturbed = Undisturbed::new(&config, folder.path());
    for (at, gradients) in [Memory::Host, Memory::Disk].into_iter().enumerate() {
        for (number, optimizer) in (at..).zip([Memory::Device, gradients]) {
            let what = format!("{what}, {world} ranks, stage {zero}, {gradients:?}, optimizer {optimizer:?}");
            undisturbed.check(&what, number, &|spec| {
                let lies = ChunkResidence { gradients, optimizer, ..ChunkResidence::DEVICE };
                // The first chunks stay on the device.
                let first = vec![ChunkResidence::DEVICE, lies, ChunkResidence::DEVICE];
                spec.zero.residence = vec![Residence::of_chunks(first, lies); spec.zero.residence.len()];
                (spec.zero.buffer, spec.zero.updates_on_host) = (3 * NORM_BLOCK, false);
            });
        }
    }
}

#[test]
fn gradients_leave_and_come_back_after_one_micro_batch() {
    for (world, zero) in [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (3, 3)] {
        check_gradients("one micro-batch", world, zero, &|c| {
            c.batch.global = 6;
            c.precision.compute = Float::F32;
        });
    }
}

#[test]
fn gradients_leave_and_come_back_between_micro_batches() {
    for (world, zero) in [(1, 0), (1, 3), (2, 0), (2, 1), (2, 3)] {
        check_gradients("reduced each", world, zero, &|c| c.batch.micro = Some(1));
        check_gradients("deferred", world, zero, &|c| {
            (c.batch.micro, c.batch.reduce) = (Some(2), Reduce::Defer);
        });
    }
}

#[test]
fn gradients_of_16_bits_or_rounded_for_other_ranks_leave_and_come_back() {
    for (world, zero) in [(1, 0), (2, 0), (2, 1), (2, 3)] {
        check_gradients("bf16", world, zero, &|c| {
            (c.batch.micro, c.precision.accumulate) = (Some(2), Float::Bf16);
        });
        check_gradients("sent in bf16", world, zero, &|c| {
            (c.batch.micro, c.precision.communicate) = (Some(2), Some(Float::Bf16));
        });
        check_gradients("sent in bf16, no overlap", world, zero, &|c| {
            (c.parallel.overlap, c.precision.communicate) = (false, Some(Float::Bf16));
        });
    }
}

/// Overflows skip steps, whose gradients are never used.
#[test]
fn skipped_steps_leave_nothing_behind() {
    check_gradients("f16", 2, 1, &|c| {
        c.precision.compute = Float::F16;
        c.precision.initial_scale_power = 24;
        (c.precision.hysteresis, c.precision.loss_scale_window) = (1, 2);
    });
}

#[test]
fn gradients_are_summed_over_tensor_and_pipeline_axes_wherever_they_lie() {
    for (pipeline, tensor, zero) in [(2, 2, 1), (2, 1, 3), (1, 2, 0)] {
        check_gradients("a mesh", 2, zero, &|c| {
            (c.parallel.pipeline, c.parallel.tensor) = (pipeline, tensor);
            c.parallel.sequence_parallel = tensor > 1;
            c.batch.micro = Some(1);
        });
    }
}

/// Micro-batches accumulate in buffers that come back from the host for each of them: while later layers compute, so that
/// compute waits less for copies, and not in place of other copies.
#[test]
fn gradients_come_back_before_the_next_micro_batch_needs_them() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(Tier::Device, folder.path(), 1, 0);
    (config.batch.micro, config.memory.gradients) = (Some(2), Tier::Host);
    config.memory.chunk = Chunk::Mebibytes(0.05);
    let machine: Machine = serde_json::from_value(serde_json::json!({
        "name": "test", "memory_bytes": 1, "host_bytes": 1, "memory_gb_per_s": 1.0, "host_gb_per_s": 1.0,
        "copy": { "latency_us": 0.0, "gb_per_s": 1.0 }, "tflops": { "f32": 0.01, "bf16": 0.01 },
    }))
    .unwrap();
    let mut time = |overlap| {
        config.parallel.overlap = overlap;
        let mut spec = rig::spec(&rig::golden_config().0, &config);
        spec.device.host_addressable = false;
        RunPlan::new(spec).unwrap().step_times(&machine).unwrap()[0]
    };
    let [ahead, at_need] = [true, false].map(&mut time);
    assert!(ahead.to_device_s == at_need.to_device_s && ahead.to_device_s > 0.0);
    let (waits, waited) = (ahead.exposed_copy_s, at_need.exposed_copy_s);
    assert!(waits < 0.8 * waited, "waits for copies: {waits} s with, {waited} s without");
}

#[test]
fn gradients_take_memory_of_their_tier_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(Tier::Device, folder.path(), 2, 2);
    let init = |memory: &phalanx_plan::MemoryPlan| memory.phase(PhaseName::Init).unwrap().peak.categories;
    let here = init(&plan(&config).of(0).memory).get(Category::Gradients);
    config.memory.gradients = Tier::Host;
    let plan = plan(&config);
    assert_eq!(init(&plan.of(0).memory).get(Category::Gradients), 0);
    assert_eq!(init(&plan.of(0).host).get(Category::Gradients), here);
}

/// The norm is computed before they leave, so that they come back only once.
#[test]
fn gradients_of_one_micro_batch_travel_once_each_way() {
    let (model, _) = rig::golden_config();
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(Tier::Device, folder.path(), 2, 2);
    config.memory.chunk = Chunk::Mebibytes(0.3);
    let here = plan(&config).of(0).memory.phase(PhaseName::Init).unwrap().peak.categories;
    config.memory.gradients = Tier::Host;
    let mut spec = rig::spec(&model, &config);
    spec.device.host_addressable = false;
    let moved = |spec: Spec| {
        let plan = RunPlan::new(spec).unwrap();
        [Memory::Host, Memory::Device].map(|to| {
            let copies = plan.of(0).step.copies.iter().filter(|copy| copy.to == to);
            copies.map(|copy| copy.bytes).sum::<u64>()
        })
    };
    let with = moved(spec.clone());
    spec.zero.residence[0] = Residence::DEVICE;
    let without = moved(spec);
    let gradients = here.get(Category::Gradients);
    for (with, without) in with.into_iter().zip(without) {
        assert_eq!(with - without, gradients);
    }
}

/// Updates on the host and on the device, with everything that the host may find elsewhere.
#[test]
fn the_host_updates_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    for (at, (compute, world, zero, prefetch)) in PLACED.into_iter().enumerate() {
        let mut config = config(Tier::Device, folder.path(), world, zero);
        config.precision.compute = compute;
        (config.memory.chunk, config.memory.prefetch) = (Chunk::Mebibytes(0.3), prefetch);
        let undisturbed = Undisturbed::new(&config, folder.path());
        let places = [Memory::Host, Memory::Disk].iter().flat_map(|o| Memory::ALL.map(|other| (*o, other)));
        for (number, (optimizer, elsewhere)) in (at..).zip(places) {
            let what = format!("{compute:?}, {world} ranks, stage {zero}, {optimizer:?}, {elsewhere:?}");
            undisturbed.check(&what, number, &|spec| {
                let parameters = if zero == 3 { elsewhere } else { Memory::Device };
                let lies = ChunkResidence { parameters, gradients: elsewhere, optimizer };
                // The device updates the first chunk, and the third one visits it.
                let visits = ChunkResidence { optimizer: Memory::Device, ..lies };
                spec.zero.residence =
                    vec![Residence::of_chunks(vec![ChunkResidence::DEVICE, lies, visits], lies)];
                (spec.zero.buffer, spec.zero.updates_on_host) = (3 * NORM_BLOCK, true);
            });
        }
    }
}

#[test]
fn skipped_steps_and_other_optimizers_work_on_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let on_host = |spec: &mut Spec| {
        let lies = ChunkResidence { optimizer: Memory::Host, ..ChunkResidence::DEVICE };
        spec.zero.residence = vec![Residence::uniform(lies)];
        assert!(spec.zero.updates_on_host, "the default");
    };
    let mut scaled = config(Tier::Device, folder.path(), 2, 1);
    scaled.precision.compute = Float::F16;
    scaled.precision.initial_scale_power = 24;
    (scaled.precision.hysteresis, scaled.precision.loss_scale_window) = (1, 2);
    Undisturbed::new(&scaled, folder.path()).check("f16", 0, &on_host);
    let mut sgd = config(Tier::Device, folder.path(), 2, 1);
    (sgd.optimizer.kind, sgd.optimizer.lr) = (OptimizerKind::Sgd, 0.05);
    Undisturbed::new(&sgd, folder.path()).check("SGD", 1, &on_host);
}

/// For each parameter, a bf16 gradient comes to the host and a bf16 parameter goes back; states stay there.
#[test]
fn an_update_on_the_host_moves_gradients_and_parameters_alone() {
    let (model, _) = rig::golden_config();
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(Tier::Host, folder.path(), 1, 0);
    config.precision.accumulate = Float::Bf16;
    config.memory.chunk = Chunk::Mebibytes(0.3);
    let moved = |update| {
        let mut config = config.clone();
        config.memory.update = update;
        let spec = rig::addressed(rig::spec(&model, &config), false);
        let elements: u64 = spec.mesh.layout.chunk_elements.iter().sum();
        let plan = RunPlan::new(spec).unwrap();
        let bytes = |to| {
            let copies = plan.of(0).step.copies.iter().filter(|copy| copy.to == to);
            copies.map(|copy| copy.bytes).sum::<u64>()
        };
        [Memory::Host, Memory::Device].map(|to| bytes(to) / elements)
    };
    // Two moments and master weights, each way.
    assert_eq!(moved(UpdateOn::Device), [12, 12]);
    assert_eq!(moved(UpdateOn::Host), [2, 2]);
    assert_eq!(moved(UpdateOn::Auto), [2, 2]);
}

/// The dry run leaves out repetitions of a schedule and copies them into the trace.
#[test]
fn the_plan_of_many_micro_batches_is_that_of_their_dry_run() {
    let (model, _) = rig::golden_config();
    let folder = tempfile::tempdir().unwrap();
    for (gradients, zero, reduce) in [
        (Tier::Host, 1, Reduce::Each),
        (Tier::Host, 0, Reduce::Defer),
        (Tier::Nvme, 3, Reduce::Each),
        (Tier::Nvme, 2, Reduce::Defer),
    ] {
        let mut config = config(gradients, folder.path(), 2, zero);
        config.memory.gradients = gradients;
        config.memory.chunk = Chunk::Mebibytes(0.02);
        (config.batch.global, config.batch.micro, config.batch.reduce) = (64, Some(1), reduce);
        config.parallel.pipeline = 2;
        for host_addressable in [true, false] {
            let spec = rig::addressed(rig::spec(&model, &config), host_addressable);
            let [short, long] = [RunPlan::new(spec.clone()), RunPlan::unabridged(spec)].map(Result::unwrap);
            assert_eq!(short.ranks, long.ranks, "{gradients:?}, stage {zero}, {reduce:?}");
        }
    }
}
