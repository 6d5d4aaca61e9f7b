//! Work in flight owns its buffers.
//!
//! A [`Pending`] holds the tensors of a call until it is waited for, so nothing can touch memory that
//! a transfer reads or writes. Dropping it waits too. When the call fails its tensors are leaked: the
//! job ends, and a peer may still be reading them.

use std::sync::Arc;

use crate::call::Buffers;
use crate::error::CollectiveError;

/// How far the calls of a group have come. A ticket is the number of a call, counted from 1.
pub trait Progress: Send + Sync {
    /// Blocks until the call is over; bounded by the group's deadline.
    ///
    /// # Errors
    /// When the call, or one before it, failed.
    fn wait(&self, ticket: u64) -> Result<(), CollectiveError>;

    /// Whether a wait would return at once.
    fn is_done(&self, ticket: u64) -> bool;

    /// Called before a wait by a thread that panics: the peers it would wait for may never come.
    fn give_up(&self) {}
}

/// A collective that was started; `T` is what comes back.
#[must_use = "a collective is over only when it was waited for"]
pub struct Pending<T> {
    flight: Flight,
    finish: fn(Buffers) -> T,
}

struct Flight {
    buffers: Buffers,
    /// None when the call was over before it was returned.
    progress: Option<(Arc<dyn Progress>, u64)>,
}

impl Pending<Buffers> {
    /// A call that is already over.
    pub fn ready(buffers: Buffers) -> Pending<Buffers> {
        Pending { flight: Flight { buffers, progress: None }, finish: |buffers| buffers }
    }

    /// A call that `progress` knows as `ticket`.
    pub fn started(buffers: Buffers, progress: Arc<dyn Progress>, ticket: u64) -> Pending<Buffers> {
        Pending { flight: Flight { buffers, progress: Some((progress, ticket)) }, finish: |buffers| buffers }
    }

    /// The same call, whose tensors `wait` returns as `map` makes them.
    pub fn map<T>(self, finish: fn(Buffers) -> T) -> Pending<T> {
        Pending { flight: self.flight, finish }
    }
}

impl<T> Pending<T> {
    /// Blocks until the call is over and gives the tensors back.
    ///
    /// # Errors
    /// When ranks disagree, one is missing, or the job was ended. The tensors are lost.
    pub fn wait(mut self) -> Result<T, CollectiveError> {
        self.flight.wait()?;
        Ok((self.finish)(std::mem::take(&mut self.flight.buffers)))
    }

    /// Whether [`Pending::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        self.flight.progress.as_ref().is_none_or(|(progress, ticket)| progress.is_done(*ticket))
    }
}

impl Flight {
    fn wait(&mut self) -> Result<(), CollectiveError> {
        let Some((progress, ticket)) = self.progress.take() else { return Ok(()) };
        let result = progress.wait(ticket);
        if result.is_err() {
            std::mem::forget(std::mem::take(&mut self.buffers));
        }
        result
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if let (true, Some((progress, _))) = (std::thread::panicking(), &self.progress) {
            progress.give_up();
        }
        // An error repeats at the group's next call; here only the memory matters.
        let _ = self.wait();
    }
}
