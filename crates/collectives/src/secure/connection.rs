//! An authenticated connection that carries messages in both directions: a length (u32, little endian) and so many bytes,
//! in records if the connection is encrypted. Reads and writes block.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use super::handshake::Established;
use super::records::{Opener, RECORD_MAX, Sealer};
use super::sockets::{bound_time_between_tries, close_at_once};

/// An authenticated connection.
pub struct Connection {
    sender: Sender,
    receiver: Receiver,
}

/// The sending half of a connection.
pub struct Sender {
    socket: TcpStream,
    sealer: Option<Sealer>,
    record: Vec<u8>,
}

/// The receiving half of a connection.
pub struct Receiver {
    socket: TcpStream,
    opener: Option<Opener>,
    /// The part of a record that was read, if the connection is encrypted.
    record: Vec<u8>,
    /// Bytes of messages that were received and not returned yet.
    bytes: Vec<u8>,
}

impl Connection {
    /// The connection on which a handshake is over, and the hello of the side that connected.
    pub(super) fn new(socket: TcpStream, established: Established) -> Result<(Connection, Vec<u8>)> {
        socket.set_nonblocking(false)?;
        socket.set_nodelay(true)?;
        close_at_once(&socket, false);
        bound_time_between_tries(&socket);
        let (sealer, opener) = established.keys.unzip();
        let sender = Sender { socket: socket.try_clone()?, sealer, record: Vec::new() };
        let receiver = Receiver { socket, opener, record: Vec::new(), bytes: Vec::new() };
        Ok((Connection { sender, receiver }, established.hello))
    }

    /// The two halves, for two threads.
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }
}

impl Sender {
    /// Sends a message.
    ///
    /// # Errors
    /// When the connection is closed or the peer does not read for longer than the timeout: the connection cannot be
    /// used afterwards.
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        let length = u32::try_from(message.len()).map_err(|_| invalid("a message beyond 4 GiB".into()))?;
        let framed = [&length.to_le_bytes()[..], message].concat();
        let Some(sealer) = &mut self.sealer else { return self.socket.write_all(&framed) };
        self.record.resize(2 + RECORD_MAX, 0);
        for payload in framed.chunks(Sealer::PAYLOAD_MAX) {
            let bytes = sealer.seal(payload, &mut self.record)?;
            self.socket.write_all(&self.record[..bytes])?;
        }
        Ok(())
    }

    /// Maximum time that a write may take; None: no limit.
    ///
    /// # Errors
    /// The system's.
    pub fn set_timeout(&self, limit: Option<Duration>) -> Result<()> {
        self.socket.set_write_timeout(limit)
    }

    /// Closes both directions: the peer, and a thread that receives here, see the end.
    pub fn close(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl Receiver {
    /// The next message. Nothing is allocated for one of more than `max_bytes`.
    ///
    /// # Errors
    /// `UnexpectedEof` when the peer has closed the connection; `WouldBlock` when no complete message came within the
    /// timeout (what came of it is kept: call again); `InvalidData` for a message that is too long or was tampered with.
    pub fn receive(&mut self, max_bytes: usize) -> Result<Vec<u8>> {
        loop {
            if let Some(length) = self.bytes.first_chunk::<4>() {
                let length = u32::from_le_bytes(*length) as usize;
                if length > max_bytes {
                    return Err(invalid(format!("a message of {length} bytes; the maximum is {max_bytes}")));
                }
                if self.bytes.len() >= 4 + length {
                    let message = self.bytes[4..4 + length].to_vec();
                    self.bytes.drain(..4 + length);
                    return Ok(message);
                }
            }
            self.fill()?;
        }
    }

    /// Reads once, and appends what can be read of messages.
    fn fill(&mut self) -> Result<()> {
        let mut buffer = [0; 4096];
        let Some(opener) = &mut self.opener else {
            let bytes = read(&mut self.socket, &mut buffer)?;
            self.bytes.extend_from_slice(&buffer[..bytes]);
            return Ok(());
        };
        let wanted = match self.record.first_chunk::<2>() {
            None => 2,
            Some(length) => 2 + usize::from(u16::from_le_bytes(*length)),
        };
        let limit = (wanted - self.record.len()).min(buffer.len());
        let bytes = read(&mut self.socket, &mut buffer[..limit])?;
        self.record.extend_from_slice(&buffer[..bytes]);
        let complete = self
            .record
            .first_chunk::<2>()
            .is_some_and(|length| self.record.len() == 2 + usize::from(u16::from_le_bytes(*length)));
        if complete {
            let start = self.bytes.len();
            self.bytes.resize(start + self.record.len(), 0);
            let opened = opener.open(&self.record[2..], &mut self.bytes[start..])?;
            self.bytes.truncate(start + opened);
            self.record.clear();
        }
        Ok(())
    }

    /// Maximum time that [`Receiver::receive`] waits for a byte; None: no limit.
    ///
    /// # Errors
    /// The system's.
    pub fn set_timeout(&self, limit: Option<Duration>) -> Result<()> {
        self.socket.set_read_timeout(limit)
    }

    /// The address of the peer.
    ///
    /// # Errors
    /// When the connection is closed.
    pub fn peer(&self) -> Result<SocketAddr> {
        self.socket.peer_addr()
    }
}

fn read(socket: &mut TcpStream, buffer: &mut [u8]) -> Result<usize> {
    loop {
        match socket.read(buffer) {
            Ok(0) => return Err(Error::new(ErrorKind::UnexpectedEof, "the peer closed the connection")),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidData, text)
}
