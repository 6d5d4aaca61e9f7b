//! Options of sockets that spare work of the processor: how rarely the system wakes a rank, and how much is under way.
//!
//! TCP between ranks of one machine is bound by the processor, which copies each byte into the system and out of it. It copies
//! faster what is still in its caches, and loses time with each wake.

use std::net::TcpStream;

use crate::secure::set_option;

/// Bytes that the system holds for a connection within one machine: not taken by the system yet, and not read yet. The system
/// reserves twice as many. Between machines it chooses itself, by the time that bytes are under way.
const UNSENT_BYTES: usize = 512 << 10;
const UNREAD_BYTES: usize = 1 << 20;

/// Bounds the bytes that lie in the system, on a connection whose two ends have the same address. What the system refuses
/// stays as it was: slower, not wrong.
pub(crate) fn bound_buffers_within_machine(socket: &TcpStream) {
    let (Ok(own), Ok(peer)) = (socket.local_addr(), socket.peer_addr()) else { return };
    if own.ip() == peer.ip() {
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, UNSENT_BYTES);
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(socket, UNREAD_BYTES);
    }
}

/// Chooses how many bytes have to be there before the system says that a connection can be read (`SO_RCVLOWAT`). It says so
/// with fewer when the connection ends, breaks, or has no room for more. Reads still take what is there.
pub(crate) fn set_low_water_mark(socket: &TcpStream, bytes: usize) {
    // Another mark than asked for costs wakes, or a wait of 50 ms: the loop that waits tries all connections that often.
    set_option(
        socket,
        libc::SOL_SOCKET,
        libc::SO_RCVLOWAT,
        libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX),
    );
}
