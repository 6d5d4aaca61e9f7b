//! A group whose bytes move between the memories of devices, over a link that the devices have (NCCL between cards).
//!
//! The transport of the host stays in front: a call is described, met and compared there as any other, before a byte moves, and its waits
//! notice ranks that stop or fail. Where it would move bytes, the device's link does (`steps.rs` has the steps of each call). Sums have the
//! order of [`phalanx_simd::sums`], so the bits are those of every other transport.
//!
//! A call runs after all work issued earlier. Waiting for it blocks until all ranks have made the call and its steps are issued;
//! from there on, the device's compute stream waits in the host's place, where the device can order them ([`Links::follow`]), and the
//! thread of the group looks whether the call comes to its end. One that fails then is a failure of the device: the next wait of the host
//! returns it, as does the next call of the group.

mod signal;
mod steps;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use phalanx_plan::trace::{Axis, CollectiveOp, Memory, Site};
use phalanx_tensor::links::{Follow, INVITATION_BYTES, Invitation, LinkId, LinkMark, LinkStep, Links, Span};
use phalanx_tensor::{Category, DType, Device, DeviceError, Tensor};

use crate::call::{Buffers, Call};
use crate::error::CollectiveError;
use crate::group::Group;
use crate::mover::Mover;
use crate::pending::{Pending, Progress, Unfinished};
use crate::statistics::Statistics;
use signal::{CallStage, Signal};
use steps::{Places, SUMMANDS_BYTES, Shape};

/// The group for tensors in the memory of `device`, over a link of the device. It is connected by [`Group::connect`]. A group of one rank
/// needs none: see [`crate::staged::on_device`].
pub fn linked(transport: Arc<dyn Group>, device: &Device) -> Arc<dyn Group> {
    linked_in_pieces(transport, device, SUMMANDS_BYTES)
}

/// The same; in a sum, a rank receives at most so many bytes of other ranks at once, for which the device has room. All ranks give the same.
pub fn linked_in_pieces(transport: Arc<dyn Group>, device: &Device, piece_bytes: usize) -> Arc<dyn Group> {
    assert!(transport.world_size() > 1, "a link of one rank");
    if transport.memory() == Memory::Device {
        return transport;
    }
    let (link, last) = (Arc::default(), Arc::default());
    Arc::new(Linked { transport, device: device.clone(), piece_bytes, link, last })
}

struct Linked {
    transport: Arc<dyn Group>,
    device: Device,
    /// Bytes of the parts of other ranks that a sum receives at once, at most.
    piece_bytes: usize,
    /// Set when the group is connected.
    link: Arc<OnceLock<LinkId>>,
    /// The last call that the compute stream follows.
    last: Arc<Mutex<Unfinished>>,
}

/// Elements that each rank sends to each other one when a group is connected.
const WARM_UP: usize = 256;

/// Polling interval while waiting for the steps of a call to be issued.
const ISSUED_NAP: Duration = Duration::from_micros(20);

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
        let shape = Shape::of(&call, [self.rank(), self.world_size()], self.piece_bytes);
        let room = |elements| self.device.alloc_for_collective(shape.dtype, elements, "summands", site);
        let mut summands = Some(shape.summands()).filter(|elements| *elements > 0).map(room);
        let mut follow = None;
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
            let signal = Arc::new(Signal::default());
            if let (Some(link), Some(Ok(call))) = (link.get(), &after) {
                let (device, last) = (device.clone(), Arc::clone(&self.last));
                let (signal, transport) = (Arc::clone(&signal), Arc::clone(&self.transport));
                follow = Some(Following { device, transport, link: *link, call: *call, signal, last });
            }
            self.transport
                .submit_moved(call, Box::new(Moves { device, link, steps, after, signal, op, site }))
        };
        let started = Mutex::new(Some((started.in_flight(op, site), summands)));
        Pending::started(Buffers::default(), Arc::new(Landing { started, follow }), 0)
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
            self.transport.barrier().wait()?;
            return self.warm_up();
        }
        let mut bytes = [0; INVITATION_BYTES];
        let words = invitation.host_slice::<u32>();
        bytes.chunks_exact_mut(4).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        let (device, link) = (self.device.clone(), Arc::clone(&self.link));
        let (rank, ranks) = (self.rank(), self.world_size());
        let joining = Joining { device, link, invitation: bytes, rank, ranks };
        let barrier = Call::new(CollectiveOp::Barrier, None, None);
        self.transport.submit_moved(barrier, Box::new(joining)).wait()?;
        self.warm_up()?;
        Ok(links(&self.device).warmed().inspect_err(|error| self.transport.abort(&error.to_string()))?)
    }

    fn abort(&self, reason: &str) {
        self.transport.abort(reason);
    }

    fn take_statistics(&self) -> Statistics {
        self.transport.take_statistics()
    }
}

impl Linked {
    /// Moves a few bytes in both ways that calls have, between all ranks: a library connects devices, and takes memory for it, when bytes
    /// first go that way, which must not be within a step.
    fn warm_up(&self) -> Result<(), CollectiveError> {
        let ranks = self.world_size();
        let small = |elements| {
            let mut tensor =
                self.device.alloc(DType::F32, [elements], Category::Communication, "warm-up of links");
            self.device.upload(&vec![0f32; elements], tensor.view_mut());
            tensor
        };
        let group: &dyn Group = self;
        group.all_gather(small(WARM_UP), small(ranks * WARM_UP)).wait()?;
        group.all_to_all(small(ranks * WARM_UP), small(ranks * WARM_UP)).wait()?;
        // Nothing is in flight when memory is looked at, and when the tensors are freed.
        if !self.device.is_meta() {
            self.device.synchronize()?;
        }
        Ok(())
    }
}

impl Drop for Linked {
    fn drop(&mut self) {
        let Some(link) = self.link.get() else { return };
        let last = std::mem::take(&mut *self.last.lock().unwrap_or_else(PoisonError::into_inner));
        if std::thread::panicking() {
            // Before the call fails because its link is gone.
            last.give_up();
            links(&self.device).abandon(*link);
        } else {
            // A failure has ended the job; here only the link matters.
            let _ = last.wait();
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

/// A call that was started; its parts of other ranks are freed when it is over, or when the compute stream follows it.
struct Landing {
    started: Mutex<Option<(Pending<Buffers>, Option<Tensor>)>>,
    /// The call as the compute stream follows it, so that the host need not wait; None in a dry run.
    follow: Option<Following>,
}

/// A call that the compute stream of the device may follow.
struct Following {
    device: Device,
    transport: Arc<dyn Group>,
    link: LinkId,
    call: LinkMark,
    signal: Arc<Signal>,
    last: Arc<Mutex<Unfinished>>,
}

impl Following {
    /// Waits until the steps of the call are issued; whether the compute stream follows it then.
    fn follow(&self) -> bool {
        let mut stage = self.signal.wait_for_start();
        if stage == CallStage::Over {
            // What the device was given before is cut here as it is where the call takes longer, so that each step has the same
            // pieces, which a card replays as graphs.
            let _ = links(&self.device).follow(self.link, self.call);
        }
        while stage == CallStage::Started {
            match links(&self.device).follow(self.link, self.call) {
                Ok(Follow::Ordered) => return true,
                Ok(Follow::No) => return false,
                Ok(Follow::NotYet) => stage = self.signal.wait_a_moment(ISSUED_NAP),
                Err(error) => {
                    self.transport.abort(&error.to_string());
                    return false;
                }
            }
        }
        // The call is over, or its wait says why it is not.
        false
    }
}

impl Landing {
    fn take(&self) -> Option<(Pending<Buffers>, Option<Tensor>)> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Progress for Landing {
    fn wait(&self, _: u64, buffers: &mut Buffers) -> Result<(), CollectiveError> {
        let Some((started, summands)) = self.take() else { return Ok(()) };
        let mut follows = false;
        if let Some(following) = &self.follow {
            started.blocked(&mut || follows = following.follow());
        }
        if let Some(following) = self.follow.as_ref().filter(|_| follows) {
            let (handed_over, rest) = started.hand_over();
            *buffers = handed_over;
            // Calls end in their order: the last one is over when all are.
            *following.last.lock().unwrap_or_else(PoisonError::into_inner) = rest;
            return Ok(());
        }
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
    signal: Arc<Signal>,
    op: CollectiveOp,
    site: Site,
}

impl Drop for Moves {
    fn drop(&mut self) {
        // Over, or it has never started.
        self.signal.set(CallStage::Over);
    }
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
        // SAFETY: the call owns its tensors until it is over, or until the device's compute stream follows it: then only what runs
        // behind it uses them. If it fails, it is abandoned first.
        unsafe { links(&self.device).start(self.link(), steps, after)? };
        self.signal.set(CallStage::Started);
        Ok(())
    }

    fn has_begun(&mut self, _: bool) -> Result<bool, DeviceError> {
        links(&self.device).has_begun(self.link())
    }

    fn is_over(&mut self) -> Result<bool, DeviceError> {
        let is_over = links(&self.device).is_over(self.link())?;
        if is_over {
            self.signal.set(CallStage::Over);
        }
        Ok(is_over)
    }

    fn abandon(&mut self, why: &str) {
        let (device, call, reason) = (self.device.name(), self.op.name(), why.to_string());
        let links = links(&self.device);
        links.fail(self.link(), DeviceError { device, call, site: self.site, reason });
        links.abandon(self.link());
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

    /// Connecting takes a while among many ranks: one that works is waited for, until it is the last.
    fn has_begun(&mut self, others_are_over: bool) -> Result<bool, DeviceError> {
        Ok(others_are_over)
    }

    fn is_over(&mut self) -> Result<bool, DeviceError> {
        self.link.get().map_or(Ok(true), |link| links(&self.device).is_over(*link))
    }

    fn abandon(&mut self, _: &str) {
        if let Some(link) = self.link.get() {
            links(&self.device).abandon(*link);
        }
    }
}
