//! A path over a library that carries messages: each frame is a message, and each buffer is one, or several if it is longer
//! than the library's longest.
//!
//! Messages are received only when they may be written: the frame from the beginning of a call, buffers after the frames of
//! all peers were compared. Until then they wait at the sender, or in the library.

use std::collections::VecDeque;
use std::io::Result;
use std::sync::Arc;

use rustix::event::PollFd;

use super::carrier::{InFlight, Messenger};
use super::frame::FRAME_BYTES;
use super::peer_path::{Frame, PeerPath, Waits};
use crate::shared_memory::memory::MemoryRange;

/// Maximum number of messages that are in flight in one direction.
const IN_FLIGHT: usize = 16;

/// The messages to and from one member.
pub(crate) struct Messages {
    messenger: Arc<dyn Messenger>,
    /// The member, by group rank.
    peer: usize,
    /// Bytes of the longest message.
    longest: usize,
    /// The peer's frame, while it is awaited.
    frame: Option<InFlight>,
    outgoing: Queue,
    incoming: Queue,
}

/// Messages in one direction, in their order.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<MemoryRange>,
    in_flight: VecDeque<InFlight>,
}

impl Messages {
    pub(crate) fn new(messenger: Arc<dyn Messenger>, peer: usize, longest: usize) -> Messages {
        assert!(longest >= FRAME_BYTES, "messages of {longest} bytes are shorter than a call's frame");
        let (outgoing, incoming) = Default::default();
        Messages { messenger, peer, longest, frame: None, outgoing, incoming }
    }
}

impl PeerPath for Messages {
    fn send(&mut self, buffer: MemoryRange) {
        self.outgoing.cut(buffer, self.longest);
    }

    fn receive(&mut self, buffer: MemoryRange) {
        self.incoming.cut(buffer, self.longest);
    }

    fn is_sent(&self) -> bool {
        self.outgoing.is_empty()
    }

    fn is_filled(&self) -> bool {
        self.incoming.is_empty()
    }

    fn send_some(&mut self) -> Result<bool> {
        let (messenger, peer) = (&*self.messenger, self.peer);
        // SAFETY: the caller of `send` keeps the buffer as it is until it was sent, or a failed call has closed the carrier.
        self.outgoing
            .advance(messenger, |buffer| unsafe { messenger.send(peer, buffer.address, buffer.bytes) })
    }

    fn receive_frame(&mut self, frame: &mut Frame, _: usize) -> Result<usize> {
        let message = match self.frame.take() {
            Some(message) => message,
            // SAFETY: the link leaves the frame, which does not move, to this message until it has arrived, or a failed call
            // has closed the carrier.
            None => unsafe { self.messenger.receive(self.peer, frame.as_mut_ptr(), FRAME_BYTES)? },
        };
        if self.messenger.is_over(&message)? {
            return Ok(FRAME_BYTES);
        }
        self.frame = Some(message);
        Ok(0)
    }

    fn receive_some(&mut self) -> Result<bool> {
        let (messenger, peer) = (&*self.messenger, self.peer);
        // SAFETY: the caller of `receive` leaves the buffer to this path until it is filled, or a failed call has closed the
        // carrier.
        self.incoming
            .advance(messenger, |buffer| unsafe { messenger.receive(peer, buffer.address, buffer.bytes) })
    }

    fn add_fds<'a>(&'a self, _: Waits, _: &mut Vec<PollFd<'a>>) {}
}

impl Queue {
    /// Appends a buffer as messages of at most `longest` bytes.
    fn cut(&mut self, buffer: MemoryRange, longest: usize) {
        let starts = (0..buffer.bytes).step_by(longest);
        self.waiting.extend(starts.map(|start| buffer.range(start, (buffer.bytes - start).min(longest))));
    }

    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.in_flight.is_empty()
    }

    /// Begins the messages for which there is room, and forgets those that are over. Returns whether there were some.
    fn advance(
        &mut self,
        messenger: &dyn Messenger,
        begin: impl Fn(MemoryRange) -> Result<InFlight>,
    ) -> Result<bool> {
        let mut moved = false;
        loop {
            while self.in_flight.len() < IN_FLIGHT
                && let Some(buffer) = self.waiting.pop_front()
            {
                self.in_flight.push_back(begin(buffer)?);
                moved = true;
            }
            let Some(first) = self.in_flight.front() else { return Ok(moved) };
            if !messenger.is_over(first)? {
                return Ok(moved);
            }
            self.in_flight.pop_front();
            moved = true;
        }
    }
}
