//! Making devices: the one place that knows which kind of device a run computes on.
//!
//! Whoever starts a rank has a factory passed in, and asks it for the rank's device. The engine (`train`, `parallel`)
//! names no kind of device.

use phalanx_plan::MemoryPlan;

use crate::device::Device;
use crate::region::Region;

/// What the device of one rank must have.
pub struct DeviceRequest<'a> {
    /// Number of the device among those of the run.
    pub index: usize,
    /// Threads that compute.
    pub threads: usize,
    /// The plan of the device's own memory.
    pub device_plan: &'a MemoryPlan,
    /// The plan of the rank's host memory.
    pub host_plan: &'a MemoryPlan,
    /// Maps so many bytes of memory that the transport of the rank's collectives can read: called once, with the size of
    /// the memory from which collectives are sent.
    pub map_shared: &'a dyn Fn(usize) -> std::io::Result<Region>,
}

/// Makes the devices of a run.
pub trait DeviceFactory: Send + Sync {
    /// Whether the host, and transports that read host memory, can read device memory in place. Dry runs are planned
    /// accordingly.
    fn is_host_addressable(&self) -> bool;

    /// Makes the device of one rank; its arenas replay the plans.
    ///
    /// # Errors
    /// When the system has not that much memory, or starts fewer threads.
    fn make(&self, request: &DeviceRequest) -> std::io::Result<Device>;
}
