//! Training from Rust: the configuration's keys reach the devices of a caller's factory, and its notices the caller.

use crate::rig;
use std::cell::Cell;
use std::path::Path;
use std::sync::{Arc, Mutex};

use phalanx_cpu::{CpuFactory, Options};
use phalanx_simd::tiles::TileUnit;
use phalanx_simulated::SimulatedFactory;
use phalanx_tensor::DeviceFactory;
use phalanx_train::config::{Float, Products, Tier};
use phalanx_train::rank::Batch;
use phalanx_train::{RunConfig, RunPlan, Spec, Training, on_threads};

/// A sample of numbers that follow each other.
fn count(position: u64, tokens: &mut [u32], targets: &mut [u32]) {
    for (i, (token, target)) in (position as u32..).zip(tokens.iter_mut().zip(targets)) {
        (*token, *target) = (i % 31, (i + 1) % 31);
    }
}

fn training(config: &RunConfig, factory: &dyn DeviceFactory) -> Training {
    let (model, _) = rig::golden_config();
    let spec = Spec::new(config, model, 0, 1).unwrap().for_devices(factory);
    Training::new(spec, count, 3).unwrap()
}

fn losses(config: &RunConfig, factory: &dyn DeviceFactory) -> Vec<u32> {
    let ranks = training(config, factory).on_threads(factory).unwrap();
    let losses = ranks.into_iter().next().expect("one rank").unwrap();
    losses.into_iter().map(f32::to_bits).collect()
}

/// A processor, with the model of tile registers if it is to have some.
fn processor(tiles: Option<TileUnit>) -> CpuFactory {
    CpuFactory { options: Options { tiles, ..Options::new(1) }, populate: false }
}

/// An accelerator that computes with the kernels of such a processor.
fn simulated(tiles: Option<TileUnit>) -> SimulatedFactory {
    let options = phalanx_simulated::Options { delayed_share: 0.0, ..phalanx_simulated::Options::new(0) };
    SimulatedFactory::new(options, None, move |request| Ok(processor(tiles).kernels(request)?))
}

#[test]
fn devices_compute_products_as_the_configuration_says() {
    let with = |products| {
        let (_, mut config) = rig::golden_config();
        config.precision.products = products;
        // Activations are rounded to 16 bits, so another order of sums shows in the losses.
        (config.precision.compute, config.precision.loss_scale) = (Float::F16, 1024.0);
        config
    };
    let [auto, fma, split] = [Products::Auto, Products::Fma, Products::Split].map(with);
    let tiled = Some(TileUnit::Model);
    let by_adds = losses(&fma, &processor(tiled));
    let in_parts = losses(&split, &processor(tiled));
    assert_ne!(by_adds, in_parts, "the two ways round differently");
    assert_eq!(losses(&auto, &processor(tiled)), in_parts);
    assert_eq!(losses(&auto, &processor(None)), by_adds);
    assert_eq!(losses(&fma, &simulated(tiled)), by_adds);
    assert_eq!(losses(&split, &simulated(tiled)), in_parts);
    for factory in [&processor(None) as &dyn DeviceFactory, &simulated(None)] {
        let refusal = training(&split, factory).on_threads(factory).unwrap_err().to_string();
        assert!(refusal.starts_with("precision.products = \"split\""), "{refusal}");
        assert!(refusal.contains("\"fma\""), "{refusal}");
    }
}

#[test]
fn a_caller_hears_what_is_slow_about_the_folder_of_disk_memory() {
    let memory = Path::new("/dev/shm");
    if !phalanx_system::files::is_in_memory(memory).unwrap_or(false) {
        return;
    }
    let heard = |folder: Option<&Path>| {
        let (_, mut config) = rig::golden_config();
        if let Some(folder) = folder {
            (config.memory.optimizer, config.memory.nvme_path) = (Tier::Nvme, Some(folder.into()));
        }
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        let hears = move |line: &str| sink.lock().unwrap().push(line.to_string());
        let factory = processor(None);
        training(&config, &factory).with_notices(hears).on_threads(&factory).unwrap();
        lines.lock().unwrap().clone()
    };
    let lines = heard(Some(memory));
    assert!(lines.iter().any(|line| line.starts_with("/dev/shm is memory, not a disk (tmpfs)")), "{lines:?}");
    assert_eq!(heard(None), Vec::<String>::new());
}

/// An evaluation on ranks that ask to stop when they are asked for the `stop`-th time: its bits on each rank, how often ranks were asked,
/// and its bits when it is done again.
fn evaluated(change: impl Fn(&mut RunConfig), stop: [usize; 2]) -> Vec<(Option<u32>, usize, u32)> {
    let (model, mut config) = rig::golden_config();
    config.batch.micro = Some(1);
    change(&mut config);
    let spec = Spec::new(&config, model, 8, 1).unwrap();
    let plan = RunPlan::new(spec).unwrap();
    let ran = on_threads(&CpuFactory::new(), &plan, |engine| {
        engine.initialise(1).unwrap();
        let (rank, spec) = (engine.at().data.max(engine.at().pipeline), &plan.spec);
        let mut windows = Batch::with_rows(8 / spec.mesh.axes.data, spec.batch.seq);
        count((rank * 100) as u64, &mut windows.tokens, &mut windows.targets);
        let asked = Cell::new(0);
        let stops = || {
            asked.set(asked.get() + 1);
            asked.get() == stop[rank]
        };
        let first = engine.evaluate_unless(&windows, &stops).unwrap().map(|mean| mean.loss.to_bits());
        (first, asked.get(), engine.evaluate(&windows).unwrap().loss.to_bits())
    });
    ran.unwrap()
}

/// On one rank, two replicas and two stages; also with sharded parameters that are gathered ahead.
#[test]
fn an_evaluation_ends_between_two_parts_on_all_ranks_when_one_asks_and_parts_change_no_bit() {
    let never = [usize::MAX; 2];
    let meshes: [fn(&mut RunConfig); 4] = [
        |_| {},
        |config| config.parallel.data = Some(2),
        |config| (config.parallel.data, config.parallel.zero) = (Some(2), 3),
        |config| config.parallel.pipeline = 2,
    ];
    for (number, mesh) in meshes.into_iter().enumerate() {
        // As one part of a whole evaluation, and as several.
        let [whole, parts] = [8, 2].map(|global| {
            move |config: &mut RunConfig| {
                mesh(config);
                config.batch.global = global.max(config.parallel.data.unwrap_or(1));
            }
        });
        let one = evaluated(whole, never);
        let several = evaluated(parts, never);
        assert!(one.iter().all(|(_, asked, _)| *asked == 1), "{number}: {one:?}");
        assert!(several.iter().all(|(_, asked, _)| *asked == 4), "{number}: {several:?}");
        for (one, several) in one.iter().zip(&several) {
            assert_eq!((one.0, one.2), (several.0, several.2), "{number}");
        }
        let last = one.len() - 1;
        let mut stop = never;
        stop[last] = 2;
        for (stopped, whole) in evaluated(parts, stop).iter().zip(&several) {
            assert_eq!((stopped.0, stopped.1, stopped.2), (None, 2, whole.2), "{number}");
        }
    }
}
