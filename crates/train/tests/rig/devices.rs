//! The devices on which the engine's tests run: the processor, the simulated accelerator, or a card.
//!
//! `PHALANX_TEST_DEVICE=simulated:7` runs every test that takes its devices from here on the simulated accelerator,
//! with the delays of seed 7; `cargo xtask simulated` does that for many seeds. `PHALANX_TEST_DEVICE=cuda` runs them on the
//! card that the dynamic loader's `libcuda.so` drives, which may be the emulator, with NVRTC from the folder `PHALANX_NVRTC`;
//! `cargo xtask cuda-emulator` does that for the tests that an emulator can run.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::Arc;

use phalanx_cpu::{Cpu, CpuFactory};
use phalanx_cuda::{CudaFactory, Made};
use phalanx_simulated::{Options, Simulated, SimulatedFactory};
use phalanx_tensor::{Device, DeviceFactory, DeviceRequest, Kernels};
use phalanx_train::Spec;

/// The device on which tests run.
const DEVICE: &str = "PHALANX_TEST_DEVICE";

thread_local! {
    /// True if runs that this thread starts are on cards, whatever the environment says.
    static ON_CARDS: Cell<bool> = const { Cell::new(false) };
    /// Driver calls counted by the devices of the last factory of cards.
    static MADE: RefCell<Option<Arc<Made>>> = const { RefCell::new(None) };
    /// True if cards launch repeated work as graphs.
    static GRAPHS: Cell<bool> = const { Cell::new(true) };
}

/// Runs `body`, whose runs are on cards.
pub fn on_cards<T>(body: impl FnOnce() -> T) -> T {
    ON_CARDS.set(true);
    let result = body();
    ON_CARDS.set(false);
    result
}

/// Runs `body`, whose runs are on cards that launch every kernel by itself.
pub fn on_cards_without_graphs<T>(body: impl FnOnce() -> T) -> T {
    GRAPHS.set(false);
    let result = on_cards(body);
    GRAPHS.set(true);
    result
}

/// The factory selected by the environment, or by [`on_cards`].
pub fn factory() -> Box<dyn DeviceFactory> {
    if ON_CARDS.get() {
        return Box::new(cuda());
    }
    match std::env::var(DEVICE) {
        Err(_) => Box::new(CpuFactory::new()),
        Ok(name) if name == "cuda" => Box::new(cuda()),
        Ok(name) => match name.strip_prefix("simulated:").and_then(|seed| seed.parse().ok()) {
            Some(seed) => Box::new(simulated(seed)),
            None => panic!("{DEVICE}={name}: expected simulated:SEED or cuda"),
        },
    }
}

/// The factory that the plan of `spec` is for: a plan for memory that the host cannot address runs on simulated devices
/// whatever the environment says.
pub fn factory_for(spec: &Spec) -> Box<dyn DeviceFactory> {
    let selected = factory();
    match (selected.is_host_addressable(), spec.device.host_addressable) {
        (true, false) => Box::new(simulated(1)),
        (false, _) if spec.device.linked => Box::new(linked_cuda(spec.communicators())),
        _ => selected,
    }
}

/// Simulated accelerators that compute with the kernels of the processor.
pub fn simulated(seed: u64) -> SimulatedFactory {
    // A run has many thousand calls; each that sleeps takes about 60 microseconds more than its delay.
    let options = Options { seed, delayed_share: 0.05, ..Options::new(0) };
    SimulatedFactory::new(options, None, kernels)
}

/// A simulated accelerator whose allocations no plan knows.
pub fn unplanned() -> Device {
    let options = Options { delayed_share: 0.05, ..Options::new(1 << 28) };
    Simulated::unplanned_device(Cpu::new(1), options).expect("memory for a small model")
}

/// Cards, which ranks share. Compiled kernels are kept in the target folder.
pub fn cuda() -> CudaFactory {
    linked_cuda(Vec::new())
}

/// The same with communicators of NCCL of so many ranks each.
pub fn linked_cuda(communicators: Vec<usize>) -> CudaFactory {
    cuda_with(phalanx_cuda::Options { communicators, ..phalanx_cuda::Options::default() })
}

/// The same with options, to which it adds where the compiler and its programs are, and whether there are graphs.
pub fn cuda_with(options: phalanx_cuda::Options) -> CudaFactory {
    let options = phalanx_cuda::Options {
        nvrtc: std::env::var_os("PHALANX_NVRTC").map(Into::into),
        graphs: GRAPHS.get(),
        cache: option_env!("CARGO_TARGET_TMPDIR").map(|folder| Path::new(folder).join("phalanx/cuda")),
        ..options
    };
    let factory = CudaFactory::new(options, kernels);
    MADE.replace(Some(Arc::clone(factory.made())));
    factory
}

/// Graphs that the devices of the factory which this thread has made last have launched.
pub fn graphs_launched() -> u64 {
    MADE.with_borrow(|made| made.as_ref().map_or(0, |made| made.launches().graphs))
}

/// Driver calls counted by the devices of the last factory that this thread made.
pub fn made() -> Arc<Made> {
    MADE.with_borrow(|made| Arc::clone(made.as_ref().expect("a factory was made")))
}

/// The kernels of the processor.
fn kernels(request: &DeviceRequest) -> std::io::Result<Arc<dyn Kernels>> {
    Ok(CpuFactory::new().kernels(request)?)
}

/// The plan for devices of `factory`.
pub fn on(factory: &dyn DeviceFactory, spec: Spec) -> Spec {
    spec.for_devices(factory)
}
