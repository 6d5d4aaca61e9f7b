//! Ways of single tensors between device memory and the memory in which they stay.
//!
//! Host memory is one copy away. Disk is one copy away from a device whose memory the host can address; otherwise a
//! tensor passes through host memory, and whoever waits for it starts the second half of its way.

use phalanx_tensor::{Category, Device, DeviceError, Memory, PendingCopy, Tensor};

/// The memory that tensors get on their ways.
pub(crate) struct Ways<'a> {
    pub(crate) device: &'a Device,
    /// What they are while they are in device memory.
    pub(crate) category: Category,
    /// Their name in device memory.
    pub(crate) name: &'static str,
}

/// A tensor on its way to the device.
pub(crate) enum Arriving {
    /// It is there already, or its memory on the device is only written.
    Ready {
        /// Its place, unless that is the device.
        stored: Option<Tensor>,
        /// Its memory on the device.
        here: Tensor,
    },
    Direct(PendingCopy),
    /// From disk to host memory, the first half of the way.
    ToHost(PendingCopy),
    /// From host memory to the device, the second half; with the place on disk.
    FromHost(Tensor, PendingCopy),
}

/// A tensor on its way to the memory in which it stays.
pub(crate) enum Leaving {
    /// It stays in device memory.
    Ready(Tensor),
    Direct(PendingCopy),
    /// To host memory, the first half of the way to its place on disk.
    ToHost(PendingCopy, Tensor),
}

impl Ways<'_> {
    /// Starts to bring a tensor to the device.
    pub(crate) fn bring(&self, stored: Tensor) -> Arriving {
        match stored.memory() {
            Memory::Device => Arriving::Ready { stored: None, here: stored },
            Memory::Host => {
                let window = self.window(&stored);
                Arriving::Direct(self.device.copy_to_device(stored, window))
            }
            Memory::Disk if self.device.is_host_addressable() => {
                let window = self.window(&stored);
                Arriving::Direct(self.device.copy_from_disk(stored, window))
            }
            Memory::Disk => {
                let passage = self.passage(&stored);
                Arriving::ToHost(self.device.copy_from_disk(stored, passage))
            }
        }
    }

    /// Waits for a tensor: its place, unless that is the device, and the tensor on the device.
    pub(crate) fn arrive(&self, arriving: Arriving) -> Result<(Option<Tensor>, Tensor), DeviceError> {
        match arriving {
            Arriving::Ready { stored, here } => Ok((stored, here)),
            Arriving::Direct(pending) => pending.wait().map(|(stored, here)| (Some(stored), here)),
            Arriving::FromHost(disk, pending) => pending.wait().map(|(_, here)| (Some(disk), here)),
            Arriving::ToHost(_) => {
                let arriving = self.continue_arrival(arriving)?;
                self.arrive(arriving)
            }
        }
    }

    /// Starts the second half of a way to the device that leads through host memory.
    pub(crate) fn continue_arrival(&self, arriving: Arriving) -> Result<Arriving, DeviceError> {
        Ok(match arriving {
            Arriving::ToHost(pending) => {
                let (disk, passage) = pending.wait()?;
                let window = self.window(&passage);
                Arriving::FromHost(disk, self.device.copy_to_device(passage, window))
            }
            other => other,
        })
    }

    /// Starts to move a tensor from the device to its place.
    pub(crate) fn send(&self, here: Tensor, stored: Option<Tensor>) -> Leaving {
        let Some(stored) = stored else { return Leaving::Ready(here) };
        match stored.memory() {
            Memory::Disk if self.device.is_host_addressable() => {
                Leaving::Direct(self.device.copy_to_disk(here, stored))
            }
            Memory::Disk => {
                let passage = self.passage(&here);
                Leaving::ToHost(self.device.copy_to_host(here, passage), stored)
            }
            _ => Leaving::Direct(self.device.copy_to_host(here, stored)),
        }
    }

    /// Waits until a tensor is in its place, and returns it.
    pub(crate) fn depart(&self, leaving: Leaving) -> Result<Tensor, DeviceError> {
        match self.continue_departure(leaving)? {
            Leaving::Ready(here) => Ok(here),
            Leaving::Direct(pending) => pending.wait().map(|(_, stored)| stored),
            Leaving::ToHost(..) => unreachable!("the second half has begun"),
        }
    }

    /// Starts the second half of a way from the device that leads through host memory.
    pub(crate) fn continue_departure(&self, leaving: Leaving) -> Result<Leaving, DeviceError> {
        Ok(match leaving {
            Leaving::ToHost(pending, disk) => {
                let (_, passage) = pending.wait()?;
                Leaving::Direct(self.device.copy_to_disk(passage, disk))
            }
            other => other,
        })
    }

    /// Device memory for a tensor that comes.
    pub(crate) fn window(&self, like: &Tensor) -> Tensor {
        self.device.alloc(like.dtype(), like.shape(), self.category, self.name)
    }

    /// Host memory that a tensor passes between disk and device.
    fn passage(&self, like: &Tensor) -> Tensor {
        self.device.alloc_host(like.dtype(), like.shape(), Category::Workspace, "passage")
    }
}
