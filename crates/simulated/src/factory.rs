//! Makes simulated accelerators as the devices of ranks.

use std::sync::Arc;

use phalanx_tensor::{Arena, Device, DeviceFactory, DeviceRequest, Kernels, Memory};

use crate::{Error, Options, Simulated};

/// Makes the kernels of one device, which use so many threads.
type MakeKernels = dyn Fn(usize) -> std::io::Result<Arc<dyn Kernels>> + Send + Sync;

/// Every rank computes on a simulated accelerator of its own.
pub struct SimulatedFactory {
    options: Options,
    memory_bytes: Option<u64>,
    make_kernels: Box<MakeKernels>,
}

impl SimulatedFactory {
    /// Devices with `options`; the delays of each rank have a seed of their own, derived from `options.seed`. The memory of
    /// each device has `memory_bytes`, or as much as its plan needs. `make_kernels` is called with a number of threads.
    pub fn new(
        options: Options,
        memory_bytes: Option<u64>,
        make_kernels: impl Fn(usize) -> std::io::Result<Arc<dyn Kernels>> + Send + Sync + 'static,
    ) -> SimulatedFactory {
        SimulatedFactory { options, memory_bytes, make_kernels: Box::new(make_kernels) }
    }
}

impl DeviceFactory for SimulatedFactory {
    fn is_host_addressable(&self) -> bool {
        false
    }

    fn make(&self, request: &DeviceRequest) -> std::io::Result<Device> {
        let kernels = (self.make_kernels)(request.threads)?;
        let memory_bytes = self.memory_bytes.unwrap_or(request.device_plan.arena_bytes);
        let seed = self.options.seed.wrapping_mul(1 << 16).wrapping_add(request.index as u64);
        let options = Options { memory_bytes, seed, ..self.options };
        // Transports read host memory: that is what is shared.
        let region = (request.map_shared)(request.host_plan.arena_bytes as usize)?;
        let host = Arena::replaying_in(Memory::Host, request.host_plan.clone(), region);
        Simulated::device(kernels, options, request.device_plan.clone(), host).map_err(refused)
    }
}

fn refused(error: Error) -> std::io::Error {
    match error {
        Error::Memory { error, .. } | Error::Thread(error) => error,
        Error::TooSmall { .. } => std::io::Error::new(std::io::ErrorKind::OutOfMemory, error),
    }
}
