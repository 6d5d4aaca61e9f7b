//! Links: communication between the memories of several ranks' devices, past the host.
//!
//! A link connects the devices of a group of ranks. One rank makes an invitation, which reaches the others by another way; each joins with
//! it. A link moves bytes, and sums what has arrived. It checks nothing: who uses it has agreed with the other ranks on the call before, and
//! sees by other means whether they still work.

use phalanx_plan::trace::DType;

use crate::events::DeviceError;

/// Bytes of an invitation.
pub const INVITATION_BYTES: usize = 128;

/// Data that the ranks of a link exchange before they are connected.
pub type Invitation = [u8; INVITATION_BYTES];

/// The number of a link of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkId(pub usize);

/// A moment of the compute stream, by the number of the call of a link that comes behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkMark(pub u64);

/// A range of device memory, as tensors have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first address.
    pub address: usize,
    /// Length.
    pub bytes: usize,
}

impl Span {
    /// A part of the range.
    ///
    /// # Panics
    /// When it is not inside.
    #[must_use]
    pub fn range(self, start: usize, bytes: usize) -> Span {
        assert!(start + bytes <= self.bytes, "{bytes} bytes at {start} exceed {self:?}");
        Span { address: self.address + start, bytes }
    }
}

/// A buffer that goes to another rank or comes from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The other rank, by its number in the group.
    pub peer: usize,
    /// True if it is sent.
    pub is_sent: bool,
    /// The buffer.
    pub buffer: Span,
}

/// A sum of one part of each rank, along the tree of `collectives::reduction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartsSum {
    /// The type of the parts.
    pub dtype: DType,
    /// Elements of a part.
    pub elements: usize,
    /// This device's number among those of the link.
    pub place: usize,
    /// Devices of the link.
    pub places: usize,
    /// This rank's part.
    pub own: Span,
    /// The parts of the others one behind the other, in the order of their ranks.
    pub others: Span,
    /// Destination of the sum. It may be `own`.
    pub target: Span,
    /// True to accumulate into `target`.
    pub accumulate: bool,
}

/// One step of a call. Steps of a link run one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkStep {
    /// Part r of `whole` becomes the part of rank r; `part` may be this rank's part of `whole`.
    AllGather {
        /// Part that this rank contributes.
        part: Span,
        /// Result.
        whole: Span,
    },
    /// The buffer becomes that of `root`.
    Broadcast {
        /// The buffer.
        buffer: Span,
        /// The rank that has it.
        root: usize,
    },
    /// Messages, all at once.
    Exchange(Vec<Message>),
    /// A copy within this rank's memory.
    Copy {
        /// Source.
        from: Span,
        /// Destination.
        to: Span,
    },
    /// A sum.
    Sum(PartsSum),
}

/// Ordering of later work of the compute stream behind a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follow {
    /// Later work runs behind the call.
    Ordered,
    /// Steps of the call are still to be issued: ask again.
    NotYet,
    /// The device does not order them, or the link has failed: the host waits until the call is over.
    No,
}

/// The links of a device. May be used by any thread.
pub trait Links: Send + Sync {
    /// Makes an invitation.
    ///
    /// # Errors
    /// When the device cannot.
    fn invite(&self) -> Result<Invitation, DeviceError>;

    /// Begins to connect this device, number `place` of `places`, with the others; [`Links::is_over`] says when it is connected.
    ///
    /// # Errors
    /// When the device cannot.
    fn join(&self, invitation: &Invitation, place: usize, places: usize) -> Result<LinkId, DeviceError>;

    /// A link has moved bytes between all of its devices for the first time, which is when libraries take memory of a device.
    ///
    /// # Errors
    /// When the device has too little left.
    fn warmed(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Marks what the compute stream was given so far, for a call of the link that follows. Calls start in the order of their marks.
    ///
    /// # Errors
    /// When the device cannot.
    fn mark(&self, link: LinkId) -> Result<LinkMark, DeviceError>;

    /// Starts the steps of a call: nothing else is in progress on the link. They run after what `after` has marked. This waits for nothing
    /// that the thread that marks may hold, because that thread may wait for calls.
    ///
    /// # Safety
    /// The memory of the steps stays valid until [`Links::is_over`] has said that the call is over, or the link was abandoned; and nothing
    /// else uses it meanwhile but work that `after` includes, or that follows the call ([`Links::follow`]).
    ///
    /// # Errors
    /// When the device cannot.
    unsafe fn start(&self, link: LinkId, steps: Vec<LinkStep>, after: LinkMark) -> Result<(), DeviceError>;

    /// Returns whether the device has reached the call in progress: the work that [`Links::mark`] marked for it is over. A device that
    /// cannot tell returns true for every call; then the computation before the call counts as time of the call.
    ///
    /// # Errors
    /// When it failed.
    fn has_begun(&self, _link: LinkId) -> Result<bool, DeviceError> {
        Ok(true)
    }

    /// Advances a link; returns whether the call that was started on it is over.
    ///
    /// # Errors
    /// When it failed.
    fn is_over(&self, link: LinkId) -> Result<bool, DeviceError>;

    /// Lets what the compute stream is given from here on run behind `call`, which has started, so that the host need not wait until it is
    /// over. The memory of the call may then be used as that stream orders it; if the call fails, [`Links::fail`] follows.
    ///
    /// # Errors
    /// When the device cannot.
    fn follow(&self, _link: LinkId, _call: LinkMark) -> Result<Follow, DeviceError> {
        Ok(Follow::No)
    }

    /// The call in progress has failed, and the link is abandoned next. If the compute stream follows the call, this is a failure of the
    /// device: what comes behind computes with what has not arrived.
    fn fail(&self, _link: LinkId, _why: DeviceError) {}

    /// Ends a link whatever its state: when this returns, nothing that was started on it uses memory.
    fn abandon(&self, link: LinkId);

    /// Ends a link on which nothing is in progress, as all its ranks do.
    fn leave(&self, link: LinkId);
}
