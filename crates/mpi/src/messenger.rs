//! The messages of one group: a communicator of its members.

use std::io::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_collectives::{InFlight, Messenger};

use crate::calls::{self, Communicator};

/// The messages of a group.
pub struct GroupMessages {
    pub communicator: Communicator,
    /// Set when memory of messages may go: MPI is not called any more.
    pub closed: Arc<AtomicBool>,
}

impl GroupMessages {
    fn check_open(&self) -> Result<()> {
        match self.closed.load(Ordering::Acquire) {
            true => Err(Error::other("this rank has left MPI after a failure")),
            false => Ok(()),
        }
    }
}

impl Messenger for GroupMessages {
    unsafe fn send(&self, to: usize, from: *const u8, bytes: usize) -> Result<InFlight> {
        self.check_open()?;
        // SAFETY: as the caller promises.
        let id = unsafe { self.communicator.send(to, from, bytes) }.map_err(Error::other)?;
        Ok(InFlight { id, received_bytes: None })
    }

    unsafe fn receive(&self, from: usize, to: *mut u8, bytes: usize) -> Result<InFlight> {
        self.check_open()?;
        // SAFETY: as the caller promises.
        let id = unsafe { self.communicator.receive(from, to, bytes) }.map_err(Error::other)?;
        Ok(InFlight { id, received_bytes: Some(bytes) })
    }

    fn is_over(&self, message: &InFlight) -> Result<bool> {
        self.check_open()?;
        let Some(bytes) = calls::test(message.id).map_err(Error::other)? else { return Ok(false) };
        match message.received_bytes {
            Some(expected) if expected != bytes => {
                Err(Error::other(format!("a message of {bytes} bytes, where {expected} were expected")))
            }
            _ => Ok(true),
        }
    }
}
