//! Authenticated connections between the hosts of a job, for the launchers (control) and for the ranks (data).
//!
//! Both sides prove with a Noise handshake (NNpsk0: fresh Curve25519 keys and a pre-shared key) that they know the job's
//! secret. The program's build, job, epoch, purpose and protection are in the prologue, so a peer of another job, of an
//! earlier start, of another build, or one that wants another protection fails the handshake. The first message is
//! authenticated by the secret alone and could be replayed; the responder believes it only after a third message, which
//! needs the keys of this very handshake. Before that a peer can send [`HANDSHAKE_MAX`] bytes in [`HANDSHAKE_TIME`].
//!
//! The files: `identity`: who may connect; `handshake`: the three messages; `records`: what protects the bytes
//! afterwards; `connection`: messages in both directions; `guests`: many handshakes of peers that connect;
//! `sockets`: options of their sockets.

mod connection;
mod guests;
mod handshake;
mod identity;
mod records;
mod sockets;

use std::net::TcpStream;
use std::time::{Duration, Instant};

pub use connection::{Connection, Receiver, Sender};
pub use guests::{Authenticated, Guests, Left, prepare_to_accept};
pub(crate) use handshake::{Established, Handshake, complete};
pub use identity::{Identity, Protection, Secret};
pub(crate) use records::{Opener, RECORD_MAX, Sealer};
pub(crate) use sockets::{bound_time_between_tries, set_option};
pub use sockets::{close_at_once, unacknowledged_bytes};

/// Maximum number of bytes that a peer can send before it is authenticated.
pub const HANDSHAKE_MAX: usize = 4096;
/// Maximum time from the acceptance of a connection to the end of its handshake.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Maximum number of bytes of the hello, the authenticated first words of the connecting side.
pub const HELLO_MAX: usize = 1024;

/// Authenticates a connection that this side has made. `hello` says who this side is.
///
/// # Errors
/// When the peer does not know the secret or belongs to another job, epoch, version or purpose (it closes the
/// connection), when it is slow, and errors of the system.
pub fn connect(
    socket: TcpStream,
    secret: &Secret,
    identity: &Identity,
    hello: &[u8],
    protection: Protection,
    deadline: Instant,
) -> std::io::Result<Connection> {
    let handshake = Handshake::connecting(secret, identity, protection, hello)?;
    let established = complete(handshake, &socket, deadline, &|| Ok(()))?;
    Ok(Connection::new(socket, established)?.0)
}

/// Authenticates a connection that this side has accepted. Returns the peer's hello, too.
///
/// # Errors
/// When the peer does not know the secret or belongs to another job, epoch, version or purpose, when it sends more than a
/// handshake or is slow, and errors of the system.
pub fn accept(
    socket: TcpStream,
    secret: &Secret,
    identity: &Identity,
    protection: Protection,
    deadline: Instant,
) -> std::io::Result<(Connection, Vec<u8>)> {
    let handshake = Handshake::accepting(secret, identity, protection)?;
    let established =
        complete(handshake, &socket, deadline.min(Instant::now() + HANDSHAKE_TIME), &|| Ok(()))?;
    Connection::new(socket, established)
}
