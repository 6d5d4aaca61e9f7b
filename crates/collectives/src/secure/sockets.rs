//! Options of sockets: what the system does with bytes that the peer has not acknowledged.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Chooses what happens to bytes that the peer has not acknowledged when the last owner of a socket closes it: whether the system
/// discards them and forgets the connection, or tries to deliver them, for minutes if the peer is gone.
pub fn close_at_once(socket: &TcpStream, discards: bool) {
    // A socket that is closed already has nothing to deliver.
    let _ = rustix::net::sockopt::set_socket_linger(socket, discards.then_some(Duration::ZERO));
}

/// Bounds the time between two tries to send what was not acknowledged: the system doubles it with each one, so that a connection
/// would stand still for as long as an outage has lasted after its end. From Linux 6.15 on it is at most a second. Before, the first six
/// tries of connections with little under way are not doubled. What the system refuses stays as it was.
///
/// The system gives a connection up after a number of tries, which would be 14 s now. How long a peer may be silent, who waits for it
/// knows; the system does after the quarter of an hour that its tries take where the time between them doubles.
pub(crate) fn bound_time_between_tries(socket: &TcpStream) {
    /// `TCP_RTO_MAX_MS` of `linux/tcp.h`.
    const RTO_MAX_MS: libc::c_int = 44;
    /// The least that the system takes.
    const MILLISECONDS: libc::c_int = 1000;
    const GIVES_UP_AFTER_MS: libc::c_int = 900_000;
    set_option(socket, libc::IPPROTO_TCP, RTO_MAX_MS, MILLISECONDS);
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_THIN_LINEAR_TIMEOUTS, 1);
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, GIVES_UP_AFTER_MS);
}

/// Sets an option, unless the system refuses it.
pub(crate) fn set_option(socket: &TcpStream, level: libc::c_int, option: libc::c_int, value: libc::c_int) {
    let size = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the descriptor is open while `socket` is borrowed; the system reads `size` bytes of `value`, which lives here.
    let _ = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), size) };
}

/// Bytes that were sent and that the peer's system has not acknowledged; 0 if the system does not say.
pub fn unacknowledged_bytes(socket: &TcpStream) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open while `socket` is borrowed; the system writes a number to `bytes`, which lives here.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { bytes.max(0) as usize } else { 0 }
}
