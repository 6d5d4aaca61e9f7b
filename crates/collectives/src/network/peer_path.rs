//! The path from this rank to a member on another host: what [`Link`](super::link) needs of TCP connections and of a library's
//! messages.

use std::io::Result;

use rustix::event::PollFd;

use super::frame::FRAME_BYTES;
use crate::shared_memory::memory::MemoryRange;

/// A frame that is sent or received; its place in memory does not change while a link lives.
pub(crate) type Frame = Box<[u8; FRAME_BYTES]>;

/// Event that a link waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    /// The peer's frame.
    Frame,
    /// The frames of other peers: nothing is received until then.
    Others,
    /// Buffers.
    Buffers,
}

/// A path to one member. Nothing here waits.
pub(crate) trait PeerPath: Send {
    /// Appends a buffer to what is sent. It stays as it is until [`PeerPath::is_sent`].
    fn send(&mut self, buffer: MemoryRange);

    /// Appends a buffer to what is filled by [`PeerPath::receive_some`].
    fn receive(&mut self, buffer: MemoryRange);

    /// Returns whether all buffers were sent.
    fn is_sent(&self) -> bool;

    /// Returns whether all buffers are filled.
    fn is_filled(&self) -> bool;

    /// Sends what can be sent now. Returns whether something was.
    fn send_some(&mut self) -> Result<bool>;

    /// Receives the peer's frame, of which `known` bytes have arrived, as far as it has; returns how many more have.
    fn receive_frame(&mut self, frame: &mut Frame, known: usize) -> Result<usize>;

    /// Fills buffers with what has arrived. Returns whether something has.
    fn receive_some(&mut self) -> Result<bool>;

    /// The job has failed: what was not delivered yet never will be. The system discards it when the path closes, and does not
    /// try for minutes to reach a host that is gone.
    fn discard(&mut self) {}

    /// Adds the descriptors to sleep on, if this path has some.
    fn add_fds<'a>(&'a self, waits: Waits, fds: &mut Vec<PollFd<'a>>);
}
