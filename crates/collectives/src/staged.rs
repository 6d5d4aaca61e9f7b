//! Collectives of tensors that the transport cannot read: they are copied to host memory, sent, and copied back.
//!
//! A transport says in which memory it reads and writes tensors ([`Group::memory`]). On a device whose memory the
//! host addresses (the processor) that is device memory itself, and nothing is staged. Elsewhere [`on_device`]
//! puts this group in front of the transport: it takes tensors in device memory, and has a planned tensor in host
//! memory for each of them while the call lasts. The copies are operations of the device, on its copy streams, so
//! they are in the trace of a dry run with their bytes.
//!
//! If a copy fails, the device of this rank has failed, and the rank will make no further collective. The failure ends the job at
//! once, before the rank waits for what it still has in flight. The rank learns of it when it waits for the call; until then it
//! allocates and frees as planned.
//!
//! Cost beyond the transport's: one copy to the host of what peers read, and one back of what this rank receives.

use std::sync::{Arc, Mutex, PoisonError};

use phalanx_plan::trace::{Axis, CollectiveOp, Memory, Site};
use phalanx_tensor::{Device, DeviceError, Tensor};

use crate::call::{Buffers, Call};
use crate::error::CollectiveError;
use crate::group::Group;
use crate::pending::{Pending, Progress};
use crate::statistics::Statistics;

/// The group for tensors in the memory of `device`: `group` itself where its transport can read that memory.
pub fn on_device(group: Arc<dyn Group>, device: &Device) -> Arc<dyn Group> {
    if device.is_host_addressable() || group.memory() == Memory::Device {
        return group;
    }
    Arc::new(Staged { transport: group, device: device.clone() })
}

/// A group whose transport reads host memory, for tensors in device memory.
struct Staged {
    transport: Arc<dyn Group>,
    device: Device,
}

impl Group for Staged {
    fn name(&self) -> &'static str {
        self.transport.name()
    }
    fn axes(&self) -> &[Axis] {
        self.transport.axes()
    }
    fn members(&self) -> &[usize] {
        self.transport.members()
    }
    fn rank(&self) -> usize {
        self.transport.rank()
    }
    fn world_size(&self) -> usize {
        self.transport.world_size()
    }
    fn memory(&self) -> Memory {
        Memory::Device
    }

    fn submit(&self, mut call: Call) -> Pending<Buffers> {
        if self.world_size() == 1 {
            return Pending::ready(self.alone(call));
        }
        let Call { op, accumulate, site, .. } = call;
        let device_buffers = std::mem::take(&mut call.buffers);
        let (on_device, on_host, staged) = self.to_host(op, accumulate, device_buffers, site);
        let sent = match staged {
            Ok(()) => Sent::Started(self.transport.submit(Call { buffers: on_host, ..call })),
            Err(error) => {
                self.transport.abort(&error.to_string());
                Sent::Failed { error, _held: on_host }
            }
        };
        let (device, transport) = (self.device.clone(), Arc::clone(&self.transport));
        let landing = Landing { device, transport, sent: Mutex::new(Some(sent)), op, site };
        Pending::started(on_device, Arc::new(landing), 0)
    }

    fn abort(&self, reason: &str) {
        self.transport.abort(reason);
    }

    fn take_statistics(&self) -> Statistics {
        self.transport.take_statistics()
    }
}

impl Staged {
    /// Runs a call of a single rank: copies or adds its own values.
    fn alone(&self, call: Call) -> Buffers {
        let Call { op, accumulate, mut buffers, .. } = call;
        if let Buffers { source: Some(source), target: Some(target) } = &mut buffers {
            let (from, to) = (source.view(), target.view_mut().reshape(source.shape()));
            match op == CollectiveOp::ReduceScatter && accumulate {
                true => self.device.add(from, to),
                false => self.device.copy(from, to),
            }
        }
        buffers
    }

    /// Host tensors for the buffers of a call, with the contents that the transport reads. Returns the buffers on the
    /// device and on the host. If a copy fails, its tensors are missing; the others are there, so that what is allocated
    /// does not depend on failures.
    fn to_host(
        &self,
        op: CollectiveOp,
        accumulate: bool,
        buffers: Buffers,
        site: Site,
    ) -> (Buffers, Buffers, Result<(), DeviceError>) {
        let Buffers { source, target } = buffers;
        // An in-place all_gather has its own part in the target, and an accumulating reduce_scatter reads the target.
        let reads_target = accumulate || (op == CollectiveOp::AllGather && source.is_none());
        let mut staged = Ok(());
        let mut stage = |tensor: Option<Tensor>, copies: bool| {
            let Some(tensor) = tensor else { return (None, None) };
            let host = self.device.alloc_host_like(&tensor, "staged", site);
            if !copies || staged.is_err() {
                // Its contents do not matter, but its placement does.
                self.device.place_like(host.view(), tensor.view());
                return (Some(tensor), Some(host));
            }
            match self.device.copy_to_host_at(tensor, host, site).wait() {
                Ok((tensor, host)) => (Some(tensor), Some(host)),
                Err(error) => {
                    staged = Err(error);
                    (None, None)
                }
            }
        };
        let (source, host_source) = stage(source, true);
        let (target, host_target) = stage(target, reads_target);
        let on_host = Buffers { source: host_source, target: host_target };
        (Buffers { source, target }, on_host, staged)
    }
}

/// State of a call on its way.
enum Sent {
    /// The transport has it.
    Started(Pending<Buffers>),
    /// The device failed before; the host tensors are kept as long as the plan keeps them.
    Failed { error: DeviceError, _held: Buffers },
}

/// A call of the transport whose results must still be copied to the device.
struct Landing {
    device: Device,
    transport: Arc<dyn Group>,
    sent: Mutex<Option<Sent>>,
    op: CollectiveOp,
    site: Site,
}

impl Landing {
    /// Returns whether the call writes its source, as operations in place do.
    fn writes_source(&self, has_target: bool) -> bool {
        use CollectiveOp::*;
        matches!(self.op, AllReduce | Reduce | Broadcast) || (self.op == ReduceScatter && !has_target)
    }

    fn take(&self) -> Option<Sent> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Copies the received values to the device and frees the host tensor.
    fn back(&self, host: Option<Tensor>, device: &mut Option<Tensor>) -> Result<(), DeviceError> {
        let (Some(host), Some(tensor)) = (host, device.take()) else { return Ok(()) };
        let (_, tensor) = self.device.copy_to_device_at(host, tensor, self.site).wait()?;
        *device = Some(tensor);
        Ok(())
    }
}

impl Progress for Landing {
    fn wait(&self, _: u64, buffers: &mut Buffers) -> Result<(), CollectiveError> {
        let Buffers { source, target } = match self.take() {
            None => return Ok(()),
            Some(Sent::Failed { error, .. }) => return Err(error.into()),
            Some(Sent::Started(pending)) => pending.wait()?,
        };
        let land = || {
            if self.writes_source(target.is_some()) {
                self.back(source, &mut buffers.source)?;
            }
            self.back(target, &mut buffers.target)
        };
        Ok(land().inspect_err(|error| self.transport.abort(&error.to_string()))?)
    }

    fn is_done(&self, _: u64) -> bool {
        let sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        match &*sent {
            Some(Sent::Started(pending)) => pending.is_done(),
            Some(Sent::Failed { .. }) | None => true,
        }
    }

    fn give_up(&self) {
        // If this thread panics, dropping the transport's call tells the peers.
        drop(self.take());
    }
}
