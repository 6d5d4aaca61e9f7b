//! Makes processors as devices.

use std::sync::Arc;

use phalanx_tensor::factory::{DeviceFactory, DeviceRequest};
use phalanx_tensor::{Arena, Device, Immediate, Memory, Region};

use crate::{Cpu, Options};

/// Gives every rank a processor device, with memory that its transport reads in place.
pub struct CpuFactory {
    /// Instruction set, tile registers, and how long idle threads spin. The number of threads, and how products are computed,
    /// come with each request.
    pub options: Options,
    /// True if every page is made resident before the device is used.
    pub populate: bool,
}

impl CpuFactory {
    /// The best instruction set of this processor; pages become resident when they are first used.
    pub fn new() -> CpuFactory {
        CpuFactory { options: Options::new(1), populate: false }
    }

    /// The kernels of the device that `request` describes; a device that computes with the processor's kernels has them, too.
    ///
    /// # Errors
    /// When the system starts fewer threads, or the processor cannot compute products as the request says.
    pub fn kernels(&self, request: &DeviceRequest) -> std::io::Result<Arc<Cpu>> {
        let options = Options { threads: request.threads, ..self.options };

        Cpu::with_options(options.with_products(request.products)?)
    }
}

impl Default for CpuFactory {
    fn default() -> Self {
        CpuFactory::new()
    }
}

impl DeviceFactory for CpuFactory {
    fn is_host_addressable(&self) -> bool {
        true
    }

    fn make(&self, request: &DeviceRequest) -> std::io::Result<Device> {
        let cpu = self.kernels(request)?;
        let region = (request.map_shared)(request.device_plan.arena_bytes as usize)?;
        if self.populate {
            cpu.populate(&region)?;
        }
        let device = Arena::replaying(request.device_plan.clone(), region);
        let host_region = Region::anonymous(request.host_plan.arena_bytes as usize)?;
        request.pin(&host_region, false)?;
        let host = Arena::replaying_in(Memory::Host, request.host_plan.clone(), host_region);
        Ok(match request.make_disk()? {
            None => Device::with_memories(Arc::new(Immediate::new(cpu)), device, host),
            Some(disk) => {
                let backend = Arc::new(Immediate::with_disk_stream(cpu)?);
                Device::with_memories(backend, device, host).with_disk(disk)
            }
        })
    }
}
