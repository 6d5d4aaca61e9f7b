//! Guests: connections that were accepted and whose handshake is not over. One thread makes many handshakes at a time, and whoever
//! is not authenticated costs little: at most [`GUESTS_MAX`] connections, each with less than [`HANDSHAKE_MAX`](super::HANDSHAKE_MAX)
//! bytes of buffers and for at most [`HANDSHAKE_TIME`]. When another one comes, the guest goes that has said nothing, or else the
//! oldest one.

use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::connection::Connection;
use super::handshake::{Established, Handshake, Waiting};
use super::identity::{Identity, Protection, Secret};
use super::sockets::close_at_once;
use super::{HANDSHAKE_MAX, HANDSHAKE_TIME};

/// Maximum number of guests.
const GUESTS_MAX: usize = 128;
const _: () = assert!(GUESTS_MAX * HANDSHAKE_MAX <= 1 << 20);
/// Maximum number of connections that are accepted before those that are open get their turn.
const ACCEPTED_MAX: usize = 32;
/// Connections that may wait in the system to be accepted; more than a burst of strangers.
const BACKLOG: i32 = 1024;

/// Connections whose handshake is not over.
pub struct Guests {
    secret: Secret,
    identity: Identity,
    protection: Protection,
    guests: Vec<Guest>,
}

struct Guest {
    socket: TcpStream,
    peer: SocketAddr,
    handshake: Handshake,
    since: Instant,
    waiting: Waiting,
}

/// A guest that has shown that it knows the secret.
pub struct Authenticated {
    pub(crate) socket: TcpStream,
    pub(crate) established: Established,
}

impl Authenticated {
    /// The connection, its socket, and what the peer said of itself.
    ///
    /// # Errors
    /// The system's.
    pub fn into_connection(self) -> Result<(Connection, TcpStream, Vec<u8>)> {
        let socket = self.socket.try_clone()?;
        let (connection, hello) = Connection::new(self.socket, self.established)?;
        Ok((connection, socket, hello))
    }
}

/// End of a guest's handshake: authenticated, or with the reason why not.
pub type Left = std::result::Result<Authenticated, (SocketAddr, Error)>;

/// Prepares a listener: accepting does not block, and a burst of connections waits in the system.
///
/// # Errors
/// The system's.
pub fn prepare_to_accept(listener: &TcpListener) -> Result<()> {
    listener.set_nonblocking(true)?;
    Ok(rustix::net::listen(listener, BACKLOG)?)
}

impl Guests {
    /// No guests yet; those that come have to know the secret and belong to `identity`.
    pub fn new(secret: Secret, identity: Identity, protection: Protection) -> Guests {
        Guests { secret, identity, protection, guests: Vec::new() }
    }

    /// Returns whether a guest has shown that it may know the secret, and its handshake is not over.
    pub fn expects_one(&self) -> bool {
        self.guests.iter().any(|guest| guest.handshake.has_heard())
    }

    /// Waits until something happens at the listeners, which [`prepare_to_accept`] has prepared, at the guests or at `wake`, for
    /// `limit` at most; accepts and goes on with what can. Returns the guests that have left.
    ///
    /// # Errors
    /// When the system refuses to say what happens.
    pub fn serve(
        &mut self,
        listeners: &[TcpListener],
        wake: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<Vec<Left>> {
        let (is_ready, is_knocked_at) = self.wait(listeners, wake, limit)?;
        let (mut left, now) = (Vec::new(), Instant::now());
        // From the last to the first, so that removing one does not move those that are still to come.
        for index in (0..self.guests.len()).rev() {
            if is_ready[index] {
                left.extend(self.advance(index));
            } else if now.duration_since(self.guests[index].since) >= HANDSHAKE_TIME {
                left.push(self.send_away(index, "the peer did not complete the handshake in time"));
            }
        }
        for listener in
            listeners.iter().zip(is_knocked_at).filter_map(|(listener, is)| is.then_some(listener))
        {
            self.accept(listener, &mut left);
        }
        Ok(left)
    }

    /// Which guests and which listeners can go on.
    fn wait(
        &self,
        listeners: &[TcpListener],
        wake: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<(Vec<bool>, Vec<bool>)> {
        let mut fds: Vec<PollFd> = self
            .guests
            .iter()
            .map(|guest| {
                let flags = if guest.waiting == Waiting::ToWrite { PollFlags::OUT } else { PollFlags::IN };
                PollFd::from_borrowed_fd(guest.socket.as_fd(), flags)
            })
            .collect();
        fds.extend(listeners.iter().map(|socket| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)));
        fds.extend(wake.map(|wake| PollFd::from_borrowed_fd(wake, PollFlags::IN)));
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut happened = fds.iter().map(|fd| !fd.revents().is_empty());
        let guests = happened.by_ref().take(self.guests.len()).collect();
        Ok((guests, happened.take(listeners.len()).collect()))
    }

    /// Goes on with a handshake; returns the guest if it leaves.
    fn advance(&mut self, index: usize) -> Option<Left> {
        let guest = &mut self.guests[index];
        match guest.handshake.advance(&guest.socket) {
            Ok(Waiting::Done) => {
                let Guest { socket, handshake, .. } = self.guests.swap_remove(index);
                Some(Ok(Authenticated { socket, established: handshake.finish() }))
            }
            Ok(waiting) => {
                guest.waiting = waiting;
                None
            }
            Err(error) => Some(Err((self.guests.swap_remove(index).peer, error))),
        }
    }

    fn send_away(&mut self, index: usize, why: &str) -> Left {
        Err((self.guests.swap_remove(index).peer, Error::new(ErrorKind::TimedOut, why)))
    }

    fn accept(&mut self, listener: &TcpListener, left: &mut Vec<Left>) {
        for _ in 0..ACCEPTED_MAX {
            match listener.accept() {
                Ok((socket, peer)) => self.welcome(socket, peer, left),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    // Out of descriptors, or the connection is gone already. The listener stays readable in the first
                    // case, so the caller must not spin.
                    std::thread::sleep(Duration::from_millis(20));
                    return;
                }
            }
        }
    }

    fn welcome(&mut self, socket: TcpStream, peer: SocketAddr, left: &mut Vec<Left>) {
        let Ok(handshake) = Handshake::accepting(&self.secret, &self.identity, self.protection) else {
            return;
        };
        if socket.set_nonblocking(true).is_err() {
            return;
        }
        close_at_once(&socket, true);
        if self.guests.len() == GUESTS_MAX {
            let silent = |guest: &Guest| (guest.handshake.has_heard(), guest.since);
            let oldest = (0..GUESTS_MAX).min_by_key(|index| silent(&self.guests[*index]));
            left.push(self.send_away(oldest.expect("there are guests"), "the peer made way for others"));
        }
        self.guests.push(Guest { socket, peer, handshake, since: Instant::now(), waiting: Waiting::ToRead });
        left.extend(self.advance(self.guests.len() - 1));
    }
}
