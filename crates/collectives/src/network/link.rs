//! A group's link to one member on another host: its connections, and the buffers that wait to be sent or filled.
//!
//! A call's frame and small buffers go over the first connection. A large buffer is cut into one part for each. Both
//! sides know the lengths from the call on which they agree, so nothing but the bytes is sent. What is received goes
//! straight to its place, and not before the frames of all peers were compared.

use std::collections::VecDeque;
use std::io::{Error, ErrorKind, Result};

use rustix::event::PollFlags;

use super::frame::{FRAME_BYTES, HeardCall};
use super::line::Line;
use crate::shared_memory::memory::MemoryRange;

/// Buffers of at least so many bytes a connection are divided over all connections.
const STRIPE_BYTES: usize = 128 << 10;
/// Parts of a buffer begin at multiples of this.
const STRIPE_ALIGN: usize = 64;

/// The link to one member.
pub(crate) struct Link {
    pub(crate) lines: Vec<Line>,
    outgoing: Vec<VecDeque<MemoryRange>>,
    incoming: Vec<VecDeque<MemoryRange>>,
    frame_out: Box<[u8; FRAME_BYTES]>,
    frame_in: Box<[u8; FRAME_BYTES]>,
    /// Bytes of the peer's frame that have arrived.
    frame_bytes: usize,
    heard: HeardCall,
    /// Whether the peer's frame was compared with this rank's call.
    agreed: bool,
    /// Whether all peers' frames were compared, so that buffers are filled.
    open: bool,
}

impl Link {
    pub(crate) fn new(lines: Vec<Line>) -> Link {
        let queues = || lines.iter().map(|_| VecDeque::new()).collect();
        Link {
            outgoing: queues(),
            incoming: queues(),
            lines,
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
        let frame = MemoryRange { address: self.frame_out.as_mut_ptr(), bytes: FRAME_BYTES };
        self.outgoing[0].push_back(frame);
        (self.frame_bytes, self.agreed, self.open) = (0, false, false);
    }

    /// Appends a buffer to what is sent. It stays as it is until [`Link::is_sent`].
    pub(crate) fn send(&mut self, buffer: MemoryRange) {
        divide(&mut self.outgoing, buffer);
    }

    /// Appends a buffer to what is filled.
    pub(crate) fn receive(&mut self, buffer: MemoryRange) {
        divide(&mut self.incoming, buffer);
    }

    pub(crate) fn is_sent(&self) -> bool {
        self.outgoing.iter().all(VecDeque::is_empty)
    }

    /// Whether the peer's frame and all buffers have arrived.
    pub(crate) fn is_received(&self) -> bool {
        self.agreed && self.incoming.iter().all(VecDeque::is_empty)
    }

    /// The peer's call, when it has arrived and was not compared yet.
    pub(crate) fn heard(&self) -> Option<&HeardCall> {
        (!self.agreed && self.frame_bytes == FRAME_BYTES).then_some(&self.heard)
    }

    /// Whether the peer's call was compared.
    pub(crate) fn has_agreed(&self) -> bool {
        self.agreed
    }

    /// The connections that wait for the system, and for what.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (&Line, PollFlags)> {
        self.lines.iter().enumerate().filter_map(|(index, line)| {
            let reads = match (self.agreed, self.open) {
                (false, _) => index == 0,
                (true, false) => false,
                (true, true) => !self.incoming[index].is_empty(),
            };
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, reads);
            flags.set(PollFlags::OUT, !self.outgoing[index].is_empty());
            (!flags.is_empty()).then_some((line, flags))
        })
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
        let mut moved = self.send_some()?;
        moved |= self.receive_frame()?;
        if self.open {
            moved |= self.receive_some()?;
        }
        Ok(moved)
    }

    fn send_some(&mut self) -> Result<bool> {
        let mut moved = false;
        for (line, queue) in self.lines.iter_mut().zip(&mut self.outgoing) {
            while let Some(first) = queue.front_mut() {
                // SAFETY: the caller of `send` keeps the buffer as it is until it was sent; it is valid for its length.
                let bytes = unsafe { std::slice::from_raw_parts(first.address, first.bytes) };
                let taken = line.write(bytes)?;
                moved |= taken > 0;
                *first = first.range(taken, first.bytes - taken);
                // The last record of a buffer may still lie in the line.
                if first.bytes > 0 || !line.flush()? {
                    break;
                }
                queue.pop_front();
            }
        }
        Ok(moved)
    }

    fn receive_frame(&mut self) -> Result<bool> {
        if self.agreed || self.frame_bytes == FRAME_BYTES {
            return Ok(false);
        }
        let bytes = self.lines[0].read(&mut self.frame_in[self.frame_bytes..])?;
        self.frame_bytes += bytes;
        if self.frame_bytes == FRAME_BYTES && !self.heard.read(&self.frame_in) {
            return Err(Error::new(ErrorKind::InvalidData, "the peer sent something else than a call"));
        }
        Ok(bytes > 0)
    }

    fn receive_some(&mut self) -> Result<bool> {
        let mut moved = false;
        for (line, queue) in self.lines.iter_mut().zip(&mut self.incoming) {
            while let Some(first) = queue.front_mut() {
                // SAFETY: the caller of `receive` leaves the buffer to this link until it is filled; it is valid for its
                // length.
                let target = unsafe { std::slice::from_raw_parts_mut(first.address, first.bytes) };
                let bytes = line.read(target)?;
                moved |= bytes > 0;
                *first = first.range(bytes, first.bytes - bytes);
                if first.bytes > 0 {
                    break;
                }
                queue.pop_front();
            }
        }
        Ok(moved)
    }
}

/// Appends a buffer to the queues of the connections: whole to the first, or a part to each.
fn divide(queues: &mut [VecDeque<MemoryRange>], buffer: MemoryRange) {
    if buffer.bytes < queues.len() * STRIPE_BYTES {
        if buffer.bytes > 0 {
            queues[0].push_back(buffer);
        }
        return;
    }
    let part = buffer.bytes.div_ceil(queues.len()).next_multiple_of(STRIPE_ALIGN);
    for (index, queue) in queues.iter_mut().enumerate() {
        let start = (index * part).min(buffer.bytes);
        let bytes = (buffer.bytes - start).min(part);
        if bytes > 0 {
            queue.push_back(buffer.range(start, bytes));
        }
    }
}
