//! Collectives of tensors that the transport cannot read: they are copied to host memory, sent, and copied back.
//!
//! A transport says in which memory it reads and writes tensors ([`Group::memory`]). On a device whose memory the
//! host addresses (the processor) that is device memory itself, and nothing is staged. Elsewhere [`on_device`]
//! puts this group in front of the transport: it takes tensors in device memory, and has a planned tensor in host
//! memory for each of them while the call lasts. The copies are operations of the device, on its copy streams, so
//! they are in the trace of a dry run with their bytes.
//!
//! Where a copy fails, the device of this rank has failed, and no collective of the rank will come any more. The failure
//! ends the job at once, before the rank waits for what it still has in flight.
//!
//! Cost beyond the transport's: one copy to the host of what peers read, and one back of what this rank receives.

use std::sync::{Arc, Mutex, PoisonError};

use phalanx_tensor::{Device, Tensor};
use phalanx_trace::{Axis, CollectiveOp, Memory, Site};

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
        match self.to_host(op, accumulate, device_buffers, site) {
            Ok((on_device, on_host)) => {
                let sent = self.transport.submit(Call { buffers: on_host, ..call });
                let (device, transport) = (self.device.clone(), Arc::clone(&self.transport));
                let landing = Landing { device, transport, sent: Mutex::new(Some(sent)), op, site };
                Pending::started(on_device, Arc::new(landing), 0)
            }
            Err(error) => {
                abort_for(&error, &*self.transport);
                Pending::failed(error)
            }
        }
    }

    fn abort(&self, reason: &str) {
        self.transport.abort(reason);
    }

    fn take_statistics(&self) -> Statistics {
        self.transport.take_statistics()
    }
}

/// Ends the job when the device of this rank failed.
fn abort_for(error: &CollectiveError, transport: &dyn Group) {
    if let CollectiveError::Device(failure) = error {
        transport.abort(&failure.to_string());
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
    /// device and on the host.
    fn to_host(
        &self,
        op: CollectiveOp,
        accumulate: bool,
        buffers: Buffers,
        site: Site,
    ) -> Result<(Buffers, Buffers), CollectiveError> {
        let Buffers { source, target } = buffers;
        // An in-place all_gather has its own part in the target, and an accumulating reduce_scatter reads the target.
        let reads_target = accumulate || (op == CollectiveOp::AllGather && source.is_none());
        let stage = |tensor: Option<Tensor>, copies: bool| -> Result<_, CollectiveError> {
            let Some(tensor) = tensor else { return Ok((None, None)) };
            let host = self.device.alloc_host_like(&tensor, "staged", site);
            if !copies {
                // Its contents do not matter, but its placement does.
                self.device.place_like(host.view(), tensor.view());
                return Ok((Some(tensor), Some(host)));
            }
            let (tensor, host) = self.device.copy_to_host_at(tensor, host, site).wait()?;
            Ok((Some(tensor), Some(host)))
        };
        let (source, host_source) = stage(source, true)?;
        let (target, host_target) = stage(target, reads_target)?;
        let on_host = Buffers { source: host_source, target: host_target };
        Ok((Buffers { source, target }, on_host))
    }
}

/// A call of the transport whose results must still be copied to the device.
struct Landing {
    device: Device,
    transport: Arc<dyn Group>,
    sent: Mutex<Option<Pending<Buffers>>>,
    op: CollectiveOp,
    site: Site,
}

impl Landing {
    /// Whether the call writes its source: operations in place.
    fn writes_source(&self, has_target: bool) -> bool {
        use CollectiveOp::*;
        matches!(self.op, AllReduce | Reduce | Broadcast) || (self.op == ReduceScatter && !has_target)
    }

    fn take(&self) -> Option<Pending<Buffers>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Copies the received values to the device and frees the host tensor.
    fn back(&self, host: Option<Tensor>, device: &mut Option<Tensor>) -> Result<(), CollectiveError> {
        let (Some(host), Some(tensor)) = (host, device.take()) else { return Ok(()) };
        let (_, tensor) = self.device.copy_to_device_at(host, tensor, self.site).wait()?;
        *device = Some(tensor);
        Ok(())
    }
}

impl Progress for Landing {
    fn wait(&self, _: u64, buffers: &mut Buffers) -> Result<(), CollectiveError> {
        let Some(sent) = self.take() else { return Ok(()) };
        let Buffers { source, target } = sent.wait()?;
        let land = || {
            if self.writes_source(target.is_some()) {
                self.back(source, &mut buffers.source)?;
            }
            self.back(target, &mut buffers.target)
        };
        land().inspect_err(|error| abort_for(error, &*self.transport))
    }

    fn is_done(&self, _: u64) -> bool {
        let sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.as_ref().is_none_or(Pending::is_done)
    }

    fn give_up(&self) {
        // If this thread panics, dropping the transport's call tells the peers.
        drop(self.take());
    }
}
