//! Makes simulated accelerators as the devices of ranks.

use std::sync::Arc;

use phalanx_tensor::{Arena, Device, DeviceFactory, DeviceRequest, Kernels, Memory};

use crate::{Error, Failure, Options, Simulated};

/// Makes the kernels of the device that a request describes.
type MakeKernels = dyn Fn(&DeviceRequest) -> std::io::Result<Arc<dyn Kernels>> + Send + Sync;

/// Every rank computes on a simulated accelerator of its own.
pub struct SimulatedFactory {
    options: Options,
    memory_bytes: Option<u64>,
    make_kernels: Box<MakeKernels>,
    /// Number of the device, number of its call, and how that fails.
    failures: Vec<(usize, u64, Failure)>,
}

impl SimulatedFactory {
    /// Devices with `options`; the delays of each rank have a seed of their own, derived from `options.seed`. The memory of
    /// each device has `memory_bytes`, or as much as its plan needs. `make_kernels` makes the kernels of each, such as
    /// `CpuFactory::kernels`.
    pub fn new(
        options: Options,
        memory_bytes: Option<u64>,
        make_kernels: impl Fn(&DeviceRequest) -> std::io::Result<Arc<dyn Kernels>> + Send + Sync + 'static,
    ) -> SimulatedFactory {
        SimulatedFactory { options, memory_bytes, make_kernels: Box::new(make_kernels), failures: Vec::new() }
    }

    /// The same, where call number `call` of device number `index` fails (see [`Simulated::fail_at`]).
    #[must_use]
    pub fn with_failure(mut self, index: usize, call: u64, failure: Failure) -> SimulatedFactory {
        self.failures.push((index, call, failure));
        self
    }
}

impl DeviceFactory for SimulatedFactory {
    fn is_host_addressable(&self) -> bool {
        false
    }

    fn make(&self, request: &DeviceRequest) -> std::io::Result<Device> {
        let kernels = (self.make_kernels)(request)?;
        let memory_bytes = self.memory_bytes.unwrap_or(request.device_plan.arena_bytes);
        let seed = self.options.seed.wrapping_mul(1 << 16).wrapping_add(request.index as u64);
        let options = Options { memory_bytes, seed, ..self.options };
        // Transports read host memory: that is what is shared.
        let region = (request.map_shared)(request.host_plan.arena_bytes as usize)?;
        request.pin(&region, true)?;
        let host = Arena::replaying_in(Memory::Host, request.host_plan.clone(), region);
        let disk = request.make_disk()?;
        let (simulated, memory) = Simulated::new(kernels, options).map_err(refused)?;
        for (_, call, failure) in self.failures.iter().filter(|(index, ..)| *index == request.index) {
            simulated.fail_at(*call, *failure);
        }
        let arena = memory.replaying(request.device_plan.clone()).map_err(refused)?;
        let device = Device::with_memories(simulated, arena, host);
        Ok(match disk {
            None => device,
            Some(disk) => device.with_disk(disk),
        })
    }
}

fn refused(error: Error) -> std::io::Error {
    match error {
        Error::Memory { error, .. } | Error::Thread(error) => error,
        Error::TooSmall { .. } => std::io::Error::new(std::io::ErrorKind::OutOfMemory, error),
    }
}
