//! `Carrier`: takes the place of TCP between hosts, with a library that carries messages, such as MPI.
//!
//! This crate knows no such library. Whoever starts a rank gives it a [`Carrier`] ([`crate::join_carried`]), and the rank's
//! groups send the same frames and buffers through it. A message is a buffer of bytes from one member of a group to another;
//! both know its length. Messages from one member to another arrive in the order in which they were sent. Nothing here waits
//! but [`Carrier::open`]: a rank that waits for a message also watches whether the job has ended.

use std::io::Result;
use std::sync::Arc;

/// A message on its way: a number that means something to its messenger alone.
#[derive(Debug)]
pub struct InFlight {
    /// The messenger's number of the message.
    pub id: u64,
    /// Bytes of the message, if it is received; None for one that is sent.
    pub received_bytes: Option<usize>,
}

/// Carries the messages of one rank of a job.
pub trait Carrier: Send + Sync {
    /// Name of the library that carries the messages, for reports.
    fn name(&self) -> &str;

    /// Bytes of the longest message, the same in all ranks. Longer buffers are cut.
    fn max_message_bytes(&self) -> usize;

    /// The messenger of a new group. All members (world ranks, by group rank) call this with the same number, which no other
    /// group of a member has. It may wait until all have.
    ///
    /// # Errors
    /// The library's.
    fn open(&self, number: usize, members: &[usize]) -> Result<Arc<dyn Messenger>>;

    /// A call has failed, and memory of messages that are in flight will be given back: from here on, no messenger of this
    /// carrier touches memory or takes messages.
    fn close(&self);
}

/// Carries the messages of one rank in one group.
pub trait Messenger: Send + Sync {
    /// Begins to send `bytes` bytes to member `to`.
    ///
    /// # Safety
    /// The memory is readable and does not change until the message is over or the carrier is closed.
    ///
    /// # Errors
    /// The library's.
    unsafe fn send(&self, to: usize, from: *const u8, bytes: usize) -> Result<InFlight>;

    /// Begins to receive `bytes` bytes from member `from`.
    ///
    /// # Safety
    /// The memory is writable, and nobody else uses it until the message is over or the carrier is closed.
    ///
    /// # Errors
    /// The library's.
    unsafe fn receive(&self, from: usize, to: *mut u8, bytes: usize) -> Result<InFlight>;

    /// Returns whether a message is over: its memory is free (sent) or filled (received). Not called again for a message once it
    /// has returned true. Also makes progress on messages in flight.
    ///
    /// # Errors
    /// The library's; a message of another length.
    fn is_over(&self, message: &InFlight) -> Result<bool>;
}
