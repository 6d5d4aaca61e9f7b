//! One TCP connection between two ranks, as a stream of bytes in both directions that never blocks.
//!
//! In plaintext the bytes go as they are. Encrypted, they go in records, for which the line has buffers of fixed size.

use std::cell::Cell;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;

use super::socket_options::{bound_buffers_within_machine, set_low_water_mark};
use crate::secure::{Established, Opener, RECORD_MAX, Sealer, bound_time_between_tries, close_at_once};

/// Bytes of the buffer for records that arrive: two of the longest.
const INCOMING_BYTES: usize = 2 * (2 + RECORD_MAX);
/// Maximum number of bytes that are given to the system at once, so that both directions take turns.
const TURN_BYTES: usize = 1 << 20;
/// A rank that waits for many bytes sleeps until so many are there, or all if they are fewer. For less than the minimum it is
/// woken by the first byte, as the system does it by itself: those calls are short, and changing the mark costs time.
const MARK_BYTES: usize = 256 << 10;
const MIN_MARK_BYTES: usize = 32 << 10;

/// Bytes of a line's buffers.
pub(crate) fn buffer_bytes(encrypted: bool) -> usize {
    if encrypted { (2 + RECORD_MAX) + INCOMING_BYTES + RECORD_MAX } else { 0 }
}

/// A connection to a rank of another host.
pub(crate) struct Line {
    pub(crate) socket: TcpStream,
    ciphers: Option<Box<Ciphers>>,
    /// Bytes that must be there before the system wakes a rank that waits for this line.
    mark: Cell<usize>,
}

struct Ciphers {
    sealer: Sealer,
    opener: Opener,
    /// Room for the longest record; the last one is in the first `sealed` bytes, of which those before `written` were sent.
    outgoing: Vec<u8>,
    sealed: usize,
    written: usize,
    /// Bytes received and not decrypted yet.
    incoming: Vec<u8>,
    received: usize,
    /// Bytes decrypted and not read yet.
    payload: Vec<u8>,
    unread: std::ops::Range<usize>,
}

impl Line {
    /// The line on which a handshake is over.
    pub(crate) fn new(socket: TcpStream, established: Established) -> Result<Line> {
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        close_at_once(&socket, false);
        bound_buffers_within_machine(&socket);
        bound_time_between_tries(&socket);
        let ciphers = established.keys.map(|(sealer, opener)| {
            Box::new(Ciphers {
                sealer,
                opener,
                outgoing: vec![0; 2 + RECORD_MAX],
                sealed: 0,
                written: 0,
                incoming: vec![0; INCOMING_BYTES],
                received: 0,
                payload: vec![0; RECORD_MAX],
                unread: 0..0,
            })
        });
        Ok(Line { socket, ciphers, mark: Cell::new(1) })
    }

    /// Prepares a sleep until this line can be read. `expected` bytes are still to come, and the peer sends them all without
    /// another byte from here.
    pub(crate) fn expect(&self, expected: usize) {
        // What a record brings is fewer bytes than the record; of the next ones, a part may have arrived and been taken.
        let taken = self.ciphers.as_ref().map_or(0, |ciphers| ciphers.received);
        let mark = match expected.saturating_sub(taken).min(MARK_BYTES) {
            ..MIN_MARK_BYTES => 1,
            mark => mark,
        };
        if self.mark.replace(mark) != mark {
            set_low_water_mark(&self.socket, mark);
        }
    }

    /// Sends what can be sent now; returns how many of `bytes` were taken.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let Some(ciphers) = &mut self.ciphers else {
            return now(self.socket.write(&bytes[..bytes.len().min(TURN_BYTES)]));
        };
        if !ciphers.flush(&mut self.socket)? || bytes.is_empty() {
            return Ok(0);
        }
        let bytes = &bytes[..bytes.len().min(Sealer::PAYLOAD_MAX)];
        // Not cleared before: most messages are short, and clearing the room of the longest would take longer than encrypting them.
        ciphers.sealed = ciphers.sealer.seal(bytes, &mut ciphers.outgoing)?;
        ciphers.written = 0;
        ciphers.flush(&mut self.socket)?;
        Ok(bytes.len())
    }

    /// Sends what was taken and is not sent yet. Returns whether nothing is left.
    pub(crate) fn flush(&mut self) -> Result<bool> {
        self.ciphers.as_mut().map_or(Ok(true), |ciphers| ciphers.flush(&mut self.socket))
    }

    /// Reads what is there now; returns how many bytes of `target` were filled.
    pub(crate) fn read(&mut self, target: &mut [u8]) -> Result<usize> {
        let Some(ciphers) = &mut self.ciphers else {
            let limit = target.len().min(TURN_BYTES);
            return end_is_error(now_or_end(self.socket.read(&mut target[..limit])));
        };
        while ciphers.unread.is_empty() {
            if !ciphers.open_next()? {
                let room = &mut ciphers.incoming[ciphers.received..];
                match end_is_error(now_or_end(self.socket.read(room)))? {
                    0 => return Ok(0),
                    bytes => ciphers.received += bytes,
                }
            }
        }
        let bytes = ciphers.unread.len().min(target.len());
        let start = ciphers.unread.start;
        target[..bytes].copy_from_slice(&ciphers.payload[start..start + bytes]);
        ciphers.unread.start += bytes;
        Ok(bytes)
    }
}

impl Ciphers {
    fn flush(&mut self, socket: &mut TcpStream) -> Result<bool> {
        while self.written < self.sealed {
            match now(socket.write(&self.outgoing[self.written..self.sealed]))? {
                0 => return Ok(false),
                bytes => self.written += bytes,
            }
        }
        Ok(true)
    }

    /// Decrypts the first record that has arrived. Returns whether there was one.
    fn open_next(&mut self) -> Result<bool> {
        let Some(length) = self.incoming[..self.received].first_chunk::<2>() else { return Ok(false) };
        let end = 2 + usize::from(u16::from_le_bytes(*length));
        if self.received < end {
            return Ok(false);
        }
        let bytes = self.opener.open(&self.incoming[2..end], &mut self.payload)?;
        self.unread = 0..bytes;
        self.incoming.copy_within(end..self.received, 0);
        self.received -= end;
        Ok(true)
    }
}

/// 0 where the system would have to wait.
fn now(result: Result<usize>) -> Result<usize> {
    match result {
        Ok(0) => Err(ErrorKind::WriteZero.into()),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

/// None at the end of the stream.
fn now_or_end(result: Result<usize>) -> Result<Option<usize>> {
    match result {
        Ok(0) => Ok(None),
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(Some(0)),
        Err(error) => Err(error),
    }
}

fn end_is_error(result: Result<Option<usize>>) -> Result<usize> {
    let ended = || Error::new(ErrorKind::UnexpectedEof, "the peer closed the connection");
    result.and_then(|bytes| bytes.ok_or_else(ended))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    /// Returns whether the line can be read within a time.
    fn is_readable(line: &Line, milliseconds: i64) -> bool {
        let limit = Timespec { tv_sec: milliseconds / 1000, tv_nsec: milliseconds % 1000 * 1_000_000 };
        poll(&mut [PollFd::new(&line.socket, PollFlags::IN)], Some(&limit)).unwrap() > 0
    }

    #[test]
    fn a_rank_that_expects_many_bytes_wakes_for_many_for_the_last_ones_and_for_the_end() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut line =
            Line::new(listener.accept().unwrap().0, Established { keys: None, hello: Vec::new() }).unwrap();
        let (first, rest) = (vec![7; MARK_BYTES], vec![8; MIN_MARK_BYTES]);
        line.expect(first.len() + rest.len());
        peer.write_all(&first[1..]).unwrap();
        assert!(!is_readable(&line, 50), "one byte below the mark");
        peer.write_all(&first[..1]).unwrap();
        assert!(is_readable(&line, 10_000), "as many as the mark");
        let (mut target, mut read) = (vec![0; MARK_BYTES], 0);
        while read < MARK_BYTES {
            read += line.read(&mut target[read..]).unwrap();
        }
        assert_eq!(target, first);
        // The last bytes are fewer than the mark was.
        line.expect(rest.len());
        peer.write_all(&rest).unwrap();
        assert!(is_readable(&line, 10_000), "all that is expected");
        assert_eq!(line.read(&mut target).unwrap(), rest.len());
        // A few wake at once, and so does the end of the connection before the mark is reached.
        line.expect(MIN_MARK_BYTES - 1);
        peer.write_all(&[9]).unwrap();
        assert!(is_readable(&line, 10_000), "the first of a few");
        line.expect(MARK_BYTES);
        assert!(!is_readable(&line, 20), "one byte of many");
        drop(peer);
        assert!(is_readable(&line, 10_000), "the end of the connection");
    }
}
