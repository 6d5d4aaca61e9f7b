//! A group whose bytes move between the memories of devices, over a link that the devices have (NCCL between cards).
//!
//! The transport of the host stays in front: a call is described, met and compared there as any other, before a byte moves, and its waits
//! notice ranks that stop or fail. Where it would move bytes, the device's link does ([`steps`] has the steps of each call). Sums have the
//! order of [`reduction`](crate::reduction), so the bits are those of every other transport.
//!
//! A call begins after what the device was given before. It is over when the host knows it: waits block the host, as those of calls
//! through host memory do.

mod steps;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use phalanx_tensor::links::{INVITATION_BYTES, Invitation, LinkId, LinkMark, LinkStep, Links, Span};
use phalanx_tensor::{Category, DType, Device, DeviceError, Tensor};
use phalanx_trace::{Axis, CollectiveOp, Memory};

use crate::call::{Buffers, Call};
use crate::error::CollectiveError;
use crate::group::Group;
use crate::mover::Mover;
use crate::pending::{Pending, Progress};
use crate::statistics::Statistics;
use steps::{Places, Shape};

/// The group for tensors in the memory of `device`, over a link of the device. It is connected by [`Group::connect`]. A group of one rank
/// needs none: see [`crate::staged::on_device`].
pub fn linked(transport: Arc<dyn Group>, device: &Device) -> Arc<dyn Group> {
    assert!(transport.world_size() > 1, "a link of one rank");
    if transport.memory() == Memory::Device {
        return transport;
    }
    Arc::new(Linked { transport, device: device.clone(), link: Arc::default() })
}

struct Linked {
    transport: Arc<dyn Group>,
    device: Device,
    /// Set when the group is connected.
    link: Arc<OnceLock<LinkId>>,
}

impl Group for Linked {
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
        let (op, site) = (call.op, call.site);
        let shape = Shape::of(&call, self.rank(), self.world_size());
        let room = |elements| self.device.alloc_for_collective(shape.dtype, elements, "summands", site);
        let mut summands = Some(shape.summands()).filter(|elements| *elements > 0).map(room);
        let started = if self.device.is_meta() {
            self.transport.submit(call)
        } else {
            let span = |tensor: &mut Option<Tensor>| tensor.as_mut().map(span_of);
            let source = span(&mut call.buffers.source);
            let target = span(&mut call.buffers.target);
            let steps = shape.steps(Places { source, target, summands: span(&mut summands) });
            let (device, link) = (self.device.clone(), Arc::clone(&self.link));
            // A group that could not be connected has ended the job: no call of it starts.
            let after = link.get().map(|link| links(&device).mark(*link));
            self.transport.submit_moved(call, Box::new(Moves { device, link, steps, after }))
        };
        let started = Mutex::new(Some((started.in_flight(op, site), summands)));
        Pending::started(Buffers::default(), Arc::new(Landing { started }), 0)
    }

    #[track_caller]
    fn connect(&self) -> Result<(), CollectiveError> {
        let words = INVITATION_BYTES / size_of::<u32>();
        let mut invitation =
            self.device.alloc_host(DType::U32, [words], Category::Communication, "invitation");
        if self.rank() == 0 && !self.device.is_meta() {
            let made = links(&self.device).invite();
            let made = made.inspect_err(|error| self.transport.abort(&error.to_string()))?;
            let bytes = made.chunks_exact(4).map(|four| u32::from_le_bytes(four.try_into().expect("four")));
            invitation.host_slice_mut::<u32>().iter_mut().zip(bytes).for_each(|(to, word)| *to = word);
        }
        let invitation = self.transport.broadcast(invitation, 0).wait()?;
        if self.device.is_meta() {
            return self.transport.barrier().wait();
        }
        let mut bytes = [0; INVITATION_BYTES];
        let words = invitation.host_slice::<u32>();
        bytes.chunks_exact_mut(4).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        let (device, link) = (self.device.clone(), Arc::clone(&self.link));
        let (rank, ranks) = (self.rank(), self.world_size());
        let joining = Joining { device, link, invitation: bytes, rank, ranks };
        let barrier = Call::new(CollectiveOp::Barrier, None, None);
        self.transport.submit_moved(barrier, Box::new(joining)).wait().map(drop)
    }

    fn abort(&self, reason: &str) {
        self.transport.abort(reason);
    }

    fn take_statistics(&self) -> Statistics {
        self.transport.take_statistics()
    }
}

impl Drop for Linked {
    fn drop(&mut self) {
        let Some(link) = self.link.get() else { return };
        if std::thread::panicking() {
            links(&self.device).abandon(*link);
        } else {
            links(&self.device).leave(*link);
        }
    }
}

fn links(device: &Device) -> &dyn Links {
    device.links().expect("a group is linked only where the devices have links")
}

fn span_of(tensor: &mut Tensor) -> Span {
    let view = tensor.view_mut();
    Span { address: view.address().as_ptr().expose_provenance(), bytes: view.bytes() }
}

/// A call that was started; its parts of other ranks are freed when it is over.
struct Landing {
    started: Mutex<Option<(Pending<Buffers>, Option<Tensor>)>>,
}

impl Landing {
    fn take(&self) -> Option<(Pending<Buffers>, Option<Tensor>)> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Progress for Landing {
    fn wait(&self, _: u64, buffers: &mut Buffers) -> Result<(), CollectiveError> {
        let Some((started, summands)) = self.take() else { return Ok(()) };
        match started.wait() {
            Ok(over) => {
                *buffers = over;
                Ok(())
            }
            Err(error) => {
                // As all tensors of a call that failed.
                std::mem::forget(summands);
                Err(error)
            }
        }
    }

    fn is_done(&self, _: u64) -> bool {
        let started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        started.as_ref().is_none_or(|(started, _)| started.is_done())
    }

    fn give_up(&self) {
        // Dropped in a thread that panics, the call tells the peers.
        drop(self.take().map(|(started, summands)| (started, std::mem::forget(summands))));
    }
}

/// Moves the bytes of a call.
struct Moves {
    device: Device,
    link: Arc<OnceLock<LinkId>>,
    steps: Vec<LinkStep>,
    after: Option<Result<LinkMark, DeviceError>>,
}

impl Moves {
    fn link(&self) -> LinkId {
        *self.link.get().expect("a group is connected before its first call")
    }
}

impl Mover for Moves {
    fn start(&mut self) -> Result<(), DeviceError> {
        let steps = std::mem::take(&mut self.steps);
        let after = self.after.take().expect("a group is connected before its first call")?;
        // SAFETY: the call owns its tensors until it is over; if it fails, it is abandoned first.
        unsafe { links(&self.device).start(self.link(), steps, after) }
    }

    fn is_over(&mut self) -> Result<bool, DeviceError> {
        links(&self.device).is_over(self.link())
    }

    fn abandon(&mut self) {
        links(&self.device).abandon(self.link());
    }
}

/// Connects the devices of a group.
struct Joining {
    device: Device,
    link: Arc<OnceLock<LinkId>>,
    invitation: Invitation,
    rank: usize,
    ranks: usize,
}

impl Mover for Joining {
    fn start(&mut self) -> Result<(), DeviceError> {
        let link = links(&self.device).join(&self.invitation, self.rank, self.ranks)?;
        let first = self.link.set(link).is_ok();
        assert!(first, "a group is connected once");
        Ok(())
    }

    fn is_over(&mut self) -> Result<bool, DeviceError> {
        self.link.get().map_or(Ok(true), |link| links(&self.device).is_over(*link))
    }

    fn abandon(&mut self) {
        if let Some(link) = self.link.get() {
            links(&self.device).abandon(*link);
        }
    }
}
