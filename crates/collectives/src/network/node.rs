//! A rank's place in the network: where others reach it, and how it reaches them.

use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::Network;
use super::carrier::Carrier;
use super::door::{Door, LineKey};
use super::line::Line;
use crate::secure::{Handshake, close_at_once, complete};

/// One rank's place in the network.
pub(crate) struct Node {
    pub(crate) network: Network,
    reach: Reach,
}

/// Means by which this rank and those of other hosts reach each other.
enum Reach {
    /// They connect to this rank's door, or it to theirs.
    Tcp(Door),
    /// A library knows how.
    Carrier(Arc<dyn Carrier>),
}

impl Node {
    /// The place of `rank`, which others reach at `listener`.
    ///
    /// # Errors
    /// When the system refuses a thread or a descriptor.
    pub(crate) fn new(network: Network, rank: usize, listener: TcpListener) -> Result<Node> {
        let door = Door::open(listener, network.clone(), rank)?;
        Ok(Node { network, reach: Reach::Tcp(door) })
    }

    /// The place of a rank that exchanges messages through `carrier`.
    pub(crate) fn carried(network: Network, carrier: Arc<dyn Carrier>) -> Node {
        Node { network, reach: Reach::Carrier(carrier) }
    }

    /// The carrier of messages in place of TCP; None with TCP.
    pub(crate) fn carrier(&self) -> Option<&Arc<dyn Carrier>> {
        match &self.reach {
            Reach::Tcp(_) => None,
            Reach::Carrier(carrier) => Some(carrier),
        }
    }

    /// Waits up to `limit` for the connection `key` of a rank that connects to this one.
    pub(crate) fn take(&self, key: LineKey, limit: Duration) -> Option<Line> {
        match &self.reach {
            Reach::Tcp(door) => door.take(key, limit),
            Reach::Carrier(_) => None,
        }
    }

    /// Connects to the world rank `to`. `interrupted` says from time to time whether to go on.
    ///
    /// # Errors
    /// The system's, those of the handshake, and what `interrupted` returns.
    pub(crate) fn connect(
        &self,
        key: LineKey,
        to: usize,
        interrupted: &dyn Fn() -> Result<()>,
    ) -> Result<Line> {
        let socket = connected(self.network.addresses[to], interrupted)?;
        close_at_once(&socket, true);
        let (identity, protection) = (self.network.identity(), self.network.protection());
        let handshake = Handshake::connecting(&self.network.secret, &identity, protection, &key.hello(to))?;
        // The peer answers when its process has joined the job: how long that may take, `interrupted` knows.
        let deadline = Instant::now() + Duration::from_secs(1 << 30);
        let established = complete(handshake, &socket, deadline, interrupted)?;
        Line::new(socket, established)
    }
}

/// A TCP connection to `address`.
fn connected(address: SocketAddr, interrupted: &dyn Fn() -> Result<()>) -> Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => return Ok(socket.into()),
        Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let slice = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    loop {
        match poll(&mut [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::OUT)], Some(&slice)) {
            Ok(0) | Err(Errno::INTR) => interrupted()?,
            Ok(_) => break,
            Err(error) => return Err(error.into()),
        }
    }
    match rustix::net::sockopt::socket_error(&socket)? {
        Ok(()) => Ok(socket.into()),
        Err(error) => Err(Error::new(ErrorKind::NotConnected, Error::from(error))),
    }
}
