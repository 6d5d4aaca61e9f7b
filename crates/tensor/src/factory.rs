//! Making devices: the one place that knows which kind of device a run computes on.
//!
//! Whoever starts a rank has a factory passed in, and asks it for the rank's device. The engine (`train`, `parallel`)
//! names no kind of device.

use std::io::{Error, ErrorKind};
use std::sync::Arc;

use phalanx_plan::MemoryPlan;

use crate::arena::Arena;
use crate::device::Device;
use crate::disk::{DiskMemory, DiskOptions};
use crate::region::Region;

/// Method to compute matrix products of f32 and f16. Those of bf16 use tile registers if the processor has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductMethod {
    /// By multiply-adds of f32.
    Fma,
    /// On tile registers, in parts of bf16: an f32 is the sum of three, an f16 of two.
    Split,
    /// On the tensor cores of a card: an f32 is rounded to 11 bits (TF32). Other types are computed as by [`ProductMethod::Fma`].
    Tf32,
}

/// Requirements for the device of one rank.
pub struct DeviceRequest<'a> {
    /// Number of the device among those of the run.
    pub index: usize,
    /// Threads that compute.
    pub threads: usize,
    /// Method to compute matrix products, if the device has several; None lets the device choose.
    pub products: Option<ProductMethod>,
    /// The plan of the device's own memory.
    pub device_plan: &'a MemoryPlan,
    /// The plan of the rank's host memory.
    pub host_plan: &'a MemoryPlan,
    /// The plan of the rank's disk memory.
    pub disk_plan: &'a MemoryPlan,
    /// Options of the disk memory. They may be left out when the plan places nothing on disk.
    pub disk: Option<&'a DiskOptions>,
    /// True if the pages of host memory are locked, so that the system keeps them where they are. None: locked if the device
    /// copies from host memory by itself and the system allows it.
    pub pin_host: Option<bool>,
    /// Maps so many bytes of memory that the transport of the rank's collectives can read: called once, with the size of
    /// the memory from which collectives are sent.
    pub map_shared: &'a dyn Fn(usize) -> std::io::Result<Region>,
}

impl DeviceRequest<'_> {
    /// Locks the pages of a rank's host memory if the request says so. `copies_by_itself`: true if the device copies from host
    /// memory by itself.
    ///
    /// # Errors
    /// If the request wants locked memory and the system refuses it.
    pub fn pin(&self, host: &Region, copies_by_itself: bool) -> std::io::Result<()> {
        match self.pin_host {
            Some(false) => Ok(()),
            Some(true) => host.lock(),
            None if copies_by_itself => host.lock().or(Ok(())),
            None => Ok(()),
        }
    }

    /// The disk memory of the rank: an arena that replays the plan over a new file. None when the plan places nothing there.
    ///
    /// # Errors
    /// A folder that is missing, that cannot be written, or whose disk is too full.
    pub fn make_disk(&self) -> std::io::Result<Option<Arc<Arena>>> {
        if self.disk_plan.phases.iter().all(|phase| phase.slots.is_empty()) {
            return Ok(None);
        }
        let bytes = self.disk_plan.arena_bytes;
        let options = self.disk.ok_or_else(|| {
            let text = format!("the plan places {bytes} bytes on disk, but no folder was given for them");
            Error::new(ErrorKind::InvalidInput, text)
        })?;
        let disk = DiskMemory::with_options(options, bytes)?;
        Ok(Some(Arena::replaying_on_disk(self.disk_plan.clone(), disk)))
    }
}

/// Makes the devices of a run.
pub trait DeviceFactory: Send + Sync {
    /// Returns whether the host, and transports that read host memory, can read device memory in place. Dry runs are planned
    /// accordingly.
    fn is_host_addressable(&self) -> bool;

    /// Bytes that each device takes of its memory beside the plan, for kernels and its driver; None if device memory is memory of
    /// the machine.
    fn beside_plan(&self) -> Option<u64> {
        None
    }

    /// Makes the device of one rank; its arenas replay the plans.
    ///
    /// # Errors
    /// When the system has not that much memory, or starts fewer threads.
    fn make(&self, request: &DeviceRequest) -> std::io::Result<Device>;
}
