//! The handshake of a connection, as a state machine that never blocks: one thread can make many at a time.
//!
//! Each of its three messages is a length (u16, little endian) and a body. (1) The connecting side: a fresh public key
//! and the hello, encrypted with the secret. A peer without the secret fails here, before any costly operation. (2) The
//! accepting side: its fresh key. (3) The connecting side: an empty record with the new keys.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use snow::{Builder, HandshakeState};

use super::identity::{Identity, Protection, Secret};
use super::records::{Opener, Sealer, both};
use super::{HANDSHAKE_MAX, HELLO_MAX};

const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
/// Maximum number of bytes of a message's body: key, hello and tag, with room to spare. Two of them and their lengths are
/// less than [`HANDSHAKE_MAX`].
const MESSAGE_MAX: usize = 1536;
const _: () = assert!(2 * (MESSAGE_MAX + 2) <= HANDSHAKE_MAX && HELLO_MAX + 64 <= MESSAGE_MAX);

/// Event that a handshake waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    ToRead,
    ToWrite,
    /// It is over.
    Done,
}

/// Result of a handshake.
pub(crate) struct Established {
    /// None: the bytes go as they are.
    pub(crate) keys: Option<(Sealer, Opener)>,
    /// Description that the connecting side sent of itself.
    pub(crate) hello: Vec<u8>,
}

/// A handshake in progress.
pub(crate) struct Handshake {
    state: State,
    encrypted: bool,
    /// The part of a message that was read.
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    written: usize,
    hello: Vec<u8>,
}

enum State {
    /// The accepting side waits for message 1.
    AwaitFirst(Box<HandshakeState>),
    /// The connecting side waits for message 2.
    AwaitSecond(Box<HandshakeState>),
    /// The accepting side waits for message 3.
    AwaitThird(Sealer, Opener),
    Over(Sealer, Opener),
    /// After an error.
    Failed,
}

impl Handshake {
    /// The handshake of the connecting side.
    pub(crate) fn connecting(
        secret: &Secret,
        identity: &Identity,
        protection: Protection,
        hello: &[u8],
    ) -> Result<Handshake> {
        if hello.len() > HELLO_MAX {
            let text = format!("a hello of {} bytes; the maximum is {HELLO_MAX}", hello.len());
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let prologue = identity.prologue(protection);
        let mut noise = builder(secret, &prologue)?.build_initiator().map_err(noise_error)?;
        let mut body = [0; MESSAGE_MAX];
        let bytes = noise.write_message(hello, &mut body).map_err(noise_error)?;
        let mut handshake =
            Handshake::new(State::AwaitSecond(Box::new(noise)), identity.encrypts(protection));
        handshake.say(&body[..bytes]);
        Ok(handshake)
    }

    /// The handshake of the accepting side.
    pub(crate) fn accepting(
        secret: &Secret,
        identity: &Identity,
        protection: Protection,
    ) -> Result<Handshake> {
        let prologue = identity.prologue(protection);
        let noise = builder(secret, &prologue)?.build_responder().map_err(noise_error)?;
        Ok(Handshake::new(State::AwaitFirst(Box::new(noise)), identity.encrypts(protection)))
    }

    fn new(state: State, encrypted: bool) -> Handshake {
        let (incoming, outgoing) = (Vec::new(), Vec::new());
        Handshake { state, encrypted, incoming, outgoing, written: 0, hello: Vec::new() }
    }

    /// Returns whether the peer has shown that it knows the secret, at least by a message of an earlier connection.
    pub(crate) fn has_heard(&self) -> bool {
        !matches!(self.state, State::AwaitFirst(_))
    }

    /// Goes on as far as the socket allows, which does not block.
    pub(crate) fn advance(&mut self, mut socket: &TcpStream) -> Result<Waiting> {
        loop {
            while self.written < self.outgoing.len() {
                match socket.write(&self.outgoing[self.written..]) {
                    Ok(0) => return Err(ErrorKind::WriteZero.into()),
                    Ok(bytes) => self.written += bytes,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Waiting::ToWrite),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            if matches!(self.state, State::Over(..)) {
                return Ok(Waiting::Done);
            }
            if !self.read_message(socket)? {
                return Ok(Waiting::ToRead);
            }
            let message = std::mem::take(&mut self.incoming);
            self.hear(&message[2..])?;
        }
    }

    /// Reads no byte beyond the message. Returns whether it is complete.
    fn read_message(&mut self, mut socket: &TcpStream) -> Result<bool> {
        loop {
            let body = self.incoming.first_chunk().map(|length| usize::from(u16::from_le_bytes(*length)));
            if let Some(bytes) = body.filter(|bytes| !(1..=MESSAGE_MAX).contains(bytes)) {
                return Err(Error::new(ErrorKind::InvalidData, format!("a message of {bytes} bytes")));
            }
            let wanted = 2 + body.unwrap_or(0) - self.incoming.len();
            if wanted == 0 {
                return Ok(true);
            }
            let mut buffer = [0; 2 + MESSAGE_MAX];
            match socket.read(&mut buffer[..wanted]) {
                Ok(0) => return Err(closed()),
                Ok(bytes) => self.incoming.extend_from_slice(&buffer[..bytes]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // A peer that refuses closes at once.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(closed()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes a message of the peer and prepares the answer.
    fn hear(&mut self, message: &[u8]) -> Result<()> {
        let mut body = [0; MESSAGE_MAX];
        let next = match std::mem::replace(&mut self.state, State::Failed) {
            State::AwaitFirst(mut noise) => {
                let bytes = noise.read_message(message, &mut body).map_err(refused)?;
                self.hello = body[..bytes.min(HELLO_MAX)].to_vec();
                let bytes = noise.write_message(&[], &mut body).map_err(noise_error)?;
                self.say(&body[..bytes]);
                let (sealer, opener) = both(noise.into_stateless_transport_mode().map_err(noise_error)?);
                State::AwaitThird(sealer, opener)
            }
            State::AwaitSecond(mut noise) => {
                noise.read_message(message, &mut body).map_err(refused)?;
                let (mut sealer, opener) = both(noise.into_stateless_transport_mode().map_err(noise_error)?);
                let bytes = sealer.seal(&[], &mut body)?;
                self.say(&body[2..bytes]);
                State::Over(sealer, opener)
            }
            State::AwaitThird(sealer, mut opener) => {
                let bytes = opener.open(message, &mut body)?;
                if bytes != 0 {
                    return Err(Error::new(ErrorKind::InvalidData, "a third message that is not empty"));
                }
                State::Over(sealer, opener)
            }
            State::Over(..) | State::Failed => unreachable!("nothing is read after the end"),
        };
        self.state = next;
        Ok(())
    }

    fn say(&mut self, body: &[u8]) {
        self.outgoing = (body.len() as u16).to_le_bytes().to_vec();
        self.outgoing.extend_from_slice(body);
        self.written = 0;
    }

    /// Returns the result of a handshake that is over; panics before.
    pub(crate) fn finish(self) -> Established {
        let State::Over(sealer, opener) = self.state else { panic!("the handshake is not over") };
        let keys = self.encrypted.then_some((sealer, opener));
        Established { keys, hello: self.hello }
    }
}

/// Longest wait between two looks at `interrupted`.
const SLICE: Duration = Duration::from_millis(50);

/// Completes a handshake on a socket, which does not block from here on. `interrupted` says from time to time whether to
/// go on.
pub(crate) fn complete(
    mut handshake: Handshake,
    socket: &TcpStream,
    deadline: Instant,
    interrupted: &dyn Fn() -> Result<()>,
) -> Result<Established> {
    socket.set_nonblocking(true)?;
    loop {
        let flags = match handshake.advance(socket)? {
            Waiting::Done => return Ok(handshake.finish()),
            Waiting::ToRead => PollFlags::IN,
            Waiting::ToWrite => PollFlags::OUT,
        };
        interrupted()?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(ErrorKind::TimedOut, "the peer did not complete the handshake in time"));
        }
        let limit = Timespec { tv_sec: 0, tv_nsec: left.min(SLICE).as_nanos() as i64 };
        match poll(&mut [PollFd::from_borrowed_fd(socket.as_fd(), flags)], Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn builder<'a>(secret: &'a Secret, prologue: &'a [u8]) -> Result<Builder<'a>> {
    let builder = Builder::new(PATTERN.parse().map_err(noise_error)?);
    builder.psk(0, secret.bytes()).and_then(|b| b.prologue(prologue)).map_err(noise_error)
}

fn noise_error(error: snow::Error) -> Error {
    Error::other(format!("the handshake cannot be made: {error}"))
}

fn refused(error: snow::Error) -> Error {
    let text = format!(
        "the peer has another secret, or is of another job, start, build of the program or protection ({error})"
    );
    Error::new(ErrorKind::PermissionDenied, text)
}

fn closed() -> Error {
    let text = "the peer closed the connection during the handshake: it may have another secret, or be of another \
                job, start, build of the program or protection";
    Error::new(ErrorKind::UnexpectedEof, text)
}
