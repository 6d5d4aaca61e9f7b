//! A path over TCP: several connections, each with the buffers that wait to be sent or filled.
//!
//! A call's frame and small buffers go over the first connection. A large buffer is cut into one part for each.

use std::collections::VecDeque;
use std::io::Result;
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags};

use super::line::Line;
use super::peer_path::{Frame, PeerPath, Waits};
use crate::secure::close_at_once;
use crate::shared_memory::memory::MemoryRange;

/// Buffers of at least so many bytes a connection are divided over all connections.
const STRIPE_BYTES: usize = 128 << 10;
/// Parts of a buffer begin at multiples of this.
const STRIPE_ALIGN: usize = 64;

/// The connections to one member.
pub(crate) struct Lines {
    lines: Vec<Line>,
    outgoing: Vec<VecDeque<MemoryRange>>,
    incoming: Vec<VecDeque<MemoryRange>>,
}

impl Lines {
    pub(crate) fn new(lines: Vec<Line>) -> Lines {
        let queues = || lines.iter().map(|_| VecDeque::new()).collect();
        Lines { outgoing: queues(), incoming: queues(), lines }
    }
}

impl PeerPath for Lines {
    fn send(&mut self, buffer: MemoryRange) {
        divide(&mut self.outgoing, buffer);
    }

    fn receive(&mut self, buffer: MemoryRange) {
        divide(&mut self.incoming, buffer);
    }

    fn is_sent(&self) -> bool {
        self.outgoing.iter().all(VecDeque::is_empty)
    }

    fn is_filled(&self) -> bool {
        self.incoming.iter().all(VecDeque::is_empty)
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

    fn receive_frame(&mut self, frame: &mut Frame, known: usize) -> Result<usize> {
        self.lines[0].read(&mut frame[known..])
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

    fn discard(&mut self) {
        self.lines.iter().for_each(|line| close_at_once(&line.socket, true));
    }

    fn add_fds<'a>(&'a self, waits: Waits, fds: &mut Vec<PollFd<'a>>) {
        for (index, line) in self.lines.iter().enumerate() {
            let reads = match waits {
                Waits::Frame => index == 0,
                Waits::Others => false,
                Waits::Buffers => !self.incoming[index].is_empty(),
            };
            if reads {
                let buffers = self.incoming[index].iter().map(|buffer| buffer.bytes);
                line.expect(if waits == Waits::Buffers { buffers.sum() } else { 1 });
            }
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, reads);
            flags.set(PollFlags::OUT, !self.outgoing[index].is_empty());
            if !flags.is_empty() {
                fds.push(PollFd::from_borrowed_fd(line.socket.as_fd(), flags));
            }
        }
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
