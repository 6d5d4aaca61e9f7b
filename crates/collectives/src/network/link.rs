//! A group's link to one member on another host: the calls of both, and the buffers between them.
//!
//! Both sides know the lengths from the call on which they agree, so nothing but the bytes is sent. What is received goes
//! straight to its place, and not before the frames of all peers were compared.

use std::io::{Error, ErrorKind, Result};

use rustix::event::PollFd;

use super::frame::{FRAME_BYTES, HeardCall};
use super::peer_path::{Frame, PeerPath, Waits};
use crate::shared_memory::memory::MemoryRange;

/// The link to one member.
pub(crate) struct Link {
    path: Box<dyn PeerPath>,
    frame_out: Frame,
    frame_in: Frame,
    /// Bytes of the peer's frame that have arrived.
    frame_bytes: usize,
    heard: HeardCall,
    /// True once the peer's frame was compared with this rank's call.
    agreed: bool,
    /// True once all peers' frames were compared, so that buffers are filled.
    open: bool,
}

impl Link {
    pub(crate) fn new(path: Box<dyn PeerPath>) -> Link {
        Link {
            path,
            frame_out: Box::new([0; FRAME_BYTES]),
            frame_in: Box::new([0; FRAME_BYTES]),
            frame_bytes: 0,
            heard: HeardCall::default(),
            agreed: false,
            open: false,
        }
    }

    /// Begins a call: `write` writes this rank's frame.
    pub(crate) fn begin(&mut self, write: impl FnOnce(&mut [u8; FRAME_BYTES])) {
        write(&mut self.frame_out);
        self.path.send(MemoryRange { address: self.frame_out.as_mut_ptr(), bytes: FRAME_BYTES });
        (self.frame_bytes, self.agreed, self.open) = (0, false, false);
    }

    /// Nothing more has to be delivered: the job has failed.
    pub(crate) fn discard(&mut self) {
        self.path.discard();
    }

    /// Appends a buffer to what is sent. It stays as it is until [`Link::is_sent`].
    pub(crate) fn send(&mut self, buffer: MemoryRange) {
        self.path.send(buffer);
    }

    /// Appends a buffer to what is filled.
    pub(crate) fn receive(&mut self, buffer: MemoryRange) {
        self.path.receive(buffer);
    }

    pub(crate) fn is_sent(&self) -> bool {
        self.path.is_sent()
    }

    /// Returns whether the peer's frame and all buffers have arrived.
    pub(crate) fn is_received(&self) -> bool {
        self.agreed && self.path.is_filled()
    }

    /// The peer's call, when it has arrived and was not compared yet.
    pub(crate) fn heard(&self) -> Option<&HeardCall> {
        (!self.agreed && self.frame_bytes == FRAME_BYTES).then_some(&self.heard)
    }

    /// Returns whether the peer's call was compared.
    pub(crate) fn has_agreed(&self) -> bool {
        self.agreed
    }

    /// Adds the descriptors to sleep on, if there are some.
    pub(crate) fn add_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        let waits = match (self.agreed, self.open) {
            (false, _) => Waits::Frame,
            (true, false) => Waits::Others,
            (true, true) => Waits::Buffers,
        };
        self.path.add_fds(waits, fds);
    }

    /// The peer makes the same call.
    pub(crate) fn agree(&mut self) {
        self.agreed = true;
    }

    /// All peers make the same call: from here on, buffers are filled.
    pub(crate) fn open(&mut self) {
        self.open = true;
    }

    /// Moves what can be moved now. Returns whether something was.
    ///
    /// # Errors
    /// The system's; the end of the connection; bytes that are no frame or no record.
    pub(crate) fn advance(&mut self) -> Result<bool> {
        let mut moved = self.path.send_some()?;
        moved |= self.receive_frame()?;
        if self.open {
            moved |= self.path.receive_some()?;
        }
        Ok(moved)
    }

    fn receive_frame(&mut self) -> Result<bool> {
        if self.agreed || self.frame_bytes == FRAME_BYTES {
            return Ok(false);
        }
        let bytes = self.path.receive_frame(&mut self.frame_in, self.frame_bytes)?;
        self.frame_bytes += bytes;
        if self.frame_bytes == FRAME_BYTES && !self.heard.read(&self.frame_in) {
            return Err(Error::new(ErrorKind::InvalidData, "the peer sent something else than a call"));
        }
        Ok(bytes > 0)
    }
}
