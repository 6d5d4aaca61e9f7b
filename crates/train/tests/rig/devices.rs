//! The devices on which the engine's tests run: the processor, or the simulated accelerator.
//!
//! `PHALANX_TEST_DEVICE=simulated:7` runs every test that takes its devices from here on the simulated accelerator,
//! with the delays of seed 7; `cargo xtask simulated` does that for many seeds.

use std::sync::Arc;

use phalanx_cpu::CpuFactory;
use phalanx_simulated::{Options, SimulatedFactory};
use phalanx_tensor::{DeviceFactory, DeviceRequest, Kernels};
use phalanx_train::Spec;

/// The device on which tests run.
const DEVICE: &str = "PHALANX_TEST_DEVICE";

/// The factory selected by the environment.
pub fn factory() -> Box<dyn DeviceFactory> {
    match std::env::var(DEVICE) {
        Err(_) => Box::new(CpuFactory::new()),
        Ok(name) => match name.strip_prefix("simulated:").and_then(|seed| seed.parse().ok()) {
            Some(seed) => Box::new(simulated(seed)),
            None => panic!("{DEVICE}={name}: expected simulated:SEED"),
        },
    }
}

/// The factory that the plan of `spec` is for: a plan for memory that the host cannot address runs on simulated devices
/// whatever the environment says.
pub fn factory_for(spec: &Spec) -> Box<dyn DeviceFactory> {
    let selected = factory();
    if selected.is_host_addressable() && !spec.host_addressable { Box::new(simulated(1)) } else { selected }
}

/// Simulated accelerators that compute with the kernels of the processor.
pub fn simulated(seed: u64) -> SimulatedFactory {
    let kernels = |request: &DeviceRequest| -> std::io::Result<Arc<dyn Kernels>> {
        Ok(CpuFactory::new().kernels(request)?)
    };
    // A run has many thousand calls; each that sleeps takes about 60 microseconds more than its delay.
    let options = Options { seed, delayed_share: 0.05, ..Options::new(0) };
    SimulatedFactory::new(options, None, kernels)
}

/// The plan for devices of `factory`.
pub fn on(factory: &dyn DeviceFactory, spec: Spec) -> Spec {
    Spec { host_addressable: factory.is_host_addressable(), ..spec }
}
