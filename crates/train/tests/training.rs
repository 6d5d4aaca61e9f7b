//! Training from Rust: the configuration's keys reach the devices of a caller's factory, and its notices the caller.

mod rig;

use std::path::Path;
use std::sync::{Arc, Mutex};

use phalanx_cpu::{CpuFactory, Options};
use phalanx_simd::tiles::TileUnit;
use phalanx_simulated::SimulatedFactory;
use phalanx_tensor::DeviceFactory;
use phalanx_train::config::{Float, Products, Tier};
use phalanx_train::{RunConfig, Spec, Training};

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
    if !phalanx_files::is_in_memory(memory).unwrap_or(false) {
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
