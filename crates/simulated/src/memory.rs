//! The device's memory: one memfd mapped twice, without access for tensors and with access for the workers.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use phalanx_plan::MemoryPlan;
use phalanx_tensor::{Arena, Memory, Region};
use rustix::fs::MemfdFlags;

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The plan needs more than the device has.
    #[error(
        "the plan needs {needed_bytes} bytes of device memory, and the simulated device has {memory_bytes}: give it more \
         memory, or change the plan so that it needs less"
    )]
    TooSmall {
        /// Bytes of the plan's arena.
        needed_bytes: u64,
        /// Bytes of the device's memory.
        memory_bytes: u64,
    },
    /// The system refused memory.
    #[error("the system refuses {bytes} bytes of memory to the simulated device: {error}")]
    Memory {
        /// Number of bytes that were requested.
        bytes: u64,
        /// Its answer.
        error: std::io::Error,
    },
    /// The system refused a thread.
    #[error(transparent)]
    Thread(std::io::Error),
}

/// The memory of a [`Simulated`](crate::Simulated) device, from which one arena is made. The host cannot access it.
pub struct DeviceMemory {
    region: Region,
    bytes: u64,
}

impl DeviceMemory {
    /// Maps `bytes` of a new memfd without access, and again with access.
    pub(crate) fn map(bytes: u64) -> Result<(DeviceMemory, Region), Error> {
        let map = || -> std::io::Result<(Region, Region)> {
            let length = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
            let length =
                length.checked_next_multiple_of(4096).ok_or(std::io::ErrorKind::OutOfMemory)?.max(4096);
            let file = rustix::fs::memfd_create("phalanx-simulated", MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&file, length as u64)?;
            Ok((Region::without_access(file.as_fd(), length)?, Region::shared(file.as_fd(), length)?))
        };
        let (region, workers) = map().map_err(|error| Error::Memory { bytes, error })?;
        Ok((DeviceMemory { region, bytes }, workers))
    }

    /// The addresses that tensors carry.
    pub(crate) fn addresses(&self) -> Range<usize> {
        let start = self.region.base().addr();
        start..start + self.region.bytes()
    }

    /// An arena that replays `plan`.
    ///
    /// # Errors
    /// When the plan needs more memory than there is.
    pub fn replaying(self, plan: MemoryPlan) -> Result<Arc<Arena>, Error> {
        if plan.arena_bytes > self.bytes {
            return Err(Error::TooSmall { needed_bytes: plan.arena_bytes, memory_bytes: self.bytes });
        }
        Ok(Arena::replaying(plan, self.region))
    }

    /// An arena that hands out memory as it is asked for.
    pub fn unplanned(self) -> Arc<Arena> {
        Arena::unplanned_in(Memory::Device, self.region)
    }
}
