//! The messages of one group: a communicator of its members.

use std::io::{Error, Result};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use phalanx_collectives::{InFlight, Messenger};

use crate::calls::{self, Communicator};

/// The messages of a group.
pub struct GroupMessages {
    pub communicator: Communicator,
    /// Set when memory of messages may go: MPI is not called any more.
    pub closed: Arc<RwLock<bool>>,
}

impl GroupMessages {
    /// The right to call MPI, which nobody takes away before the guard goes.
    fn open(&self) -> Result<RwLockReadGuard<'_, bool>> {
        let closed = self.closed.read().unwrap_or_else(PoisonError::into_inner);
        match *closed {
            true => Err(Error::other("this rank has left MPI after a failure")),
            false => Ok(closed),
        }
    }
}

impl Messenger for GroupMessages {
    unsafe fn send(&self, to: usize, from: *const u8, bytes: usize) -> Result<InFlight> {
        let _open = self.open()?;
        // SAFETY: as the caller promises.
        let id = unsafe { self.communicator.send(to, from, bytes) }.map_err(Error::other)?;
        Ok(InFlight { id, received_bytes: None })
    }

    unsafe fn receive(&self, from: usize, to: *mut u8, bytes: usize) -> Result<InFlight> {
        let _open = self.open()?;
        // SAFETY: as the caller promises.
        let id = unsafe { self.communicator.receive(from, to, bytes) }.map_err(Error::other)?;
        Ok(InFlight { id, received_bytes: Some(bytes) })
    }

    fn is_over(&self, message: &InFlight) -> Result<bool> {
        let _open = self.open()?;
        let Some(bytes) = calls::test(message.id).map_err(Error::other)? else { return Ok(false) };
        match message.received_bytes {
            Some(expected) if expected != bytes => {
                Err(Error::other(format!("a message of {bytes} bytes, where {expected} were expected")))
            }
            _ => Ok(true),
        }
    }
}
