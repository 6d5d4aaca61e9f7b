//! Work in flight owns its buffers.
//!
//! A [`Pending`] holds the tensors of a call until it is waited for, so nothing can touch memory that
//! a transfer reads or writes. Dropping it waits too. When the call fails its tensors are leaked: the
//! job ends, and a peer may still be reading them.

use std::sync::Arc;

use phalanx_plan::trace::{CollectiveOp, Site};
use phalanx_tensor::{Access, InFlight, Tensor};

use crate::call::Buffers;
use crate::error::CollectiveError;

/// Tracks which calls of a group are complete. A ticket is the number of a call, counted from 1.
pub trait Progress: Send + Sync {
    /// Blocks until the call is over; bounded by the group's deadline. `buffers` are those of the call.
    ///
    /// # Errors
    /// When the call, or one before it, failed.
    fn wait(&self, ticket: u64, buffers: &mut Buffers) -> Result<(), CollectiveError>;

    /// Returns whether a wait would return at once.
    fn is_done(&self, ticket: u64) -> bool;

    /// Runs `wait`, in which the calling thread waits for a call in another way: it counts as blocked meanwhile.
    fn blocked(&self, wait: &mut dyn FnMut()) {
        wait();
    }

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
    /// Marks in the arenas that the buffers are in flight.
    notes: [Option<InFlight>; 2],
    /// None when the call was over before it was returned.
    progress: Option<(Arc<dyn Progress>, u64)>,
}

impl Pending<Buffers> {
    /// A call that is already over.
    pub fn ready(buffers: Buffers) -> Pending<Buffers> {
        Pending { flight: Flight::new(buffers, None), finish: |buffers| buffers }
    }

    /// A call that `progress` knows as `ticket`.
    pub fn started(buffers: Buffers, progress: Arc<dyn Progress>, ticket: u64) -> Pending<Buffers> {
        Pending { flight: Flight::new(buffers, Some((progress, ticket))), finish: |buffers| buffers }
    }

    /// The same call; until it is over, the arenas of its buffers count them as in flight for `op` at `site`.
    pub(crate) fn in_flight(mut self, op: CollectiveOp, site: Site) -> Pending<Buffers> {
        let Flight { buffers, notes, progress, .. } = &mut self.flight;
        if progress.is_some() {
            let note = |tensor: &Option<Tensor>, access| {
                tensor.as_ref().map(|tensor| tensor.in_flight(access, op.name(), site))
            };
            // In-place operations also write the source.
            let source = if buffers.target.is_some() { Access::Read } else { Access::Write };
            *notes = [note(&buffers.source, source), note(&buffers.target, Access::Write)];
        }
        self
    }

    /// Runs `wait`, in which the calling thread waits for this call in another way.
    pub(crate) fn blocked(&self, wait: &mut dyn FnMut()) {
        match &self.flight.progress {
            Some((progress, _)) => progress.blocked(wait),
            None => wait(),
        }
    }

    /// The tensors of a call that need not be over, because other means order what uses them behind it; and the rest of the call.
    pub(crate) fn hand_over(mut self) -> (Buffers, Unfinished) {
        let Flight { buffers, notes, progress } = &mut self.flight;
        *notes = [None, None];
        (std::mem::take(buffers), Unfinished(progress.take()))
    }

    /// The same call; `wait` passes its tensors through `finish`.
    pub fn map<T>(self, finish: fn(Buffers) -> T) -> Pending<T> {
        Pending { flight: self.flight, finish }
    }
}

/// A call whose tensors were handed over.
#[derive(Default)]
pub(crate) struct Unfinished(Option<(Arc<dyn Progress>, u64)>);

impl Unfinished {
    /// Tells the peers that the calling thread panics.
    pub(crate) fn give_up(self) {
        if let Some((progress, _)) = self.0 {
            progress.give_up();
        }
    }

    /// Blocks until the call is over.
    ///
    /// # Errors
    /// When it failed.
    pub(crate) fn wait(self) -> Result<(), CollectiveError> {
        self.0.map_or(Ok(()), |(progress, ticket)| progress.wait(ticket, &mut Buffers::default()))
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

    /// Returns whether [`Pending::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        self.flight.progress.as_ref().is_none_or(|(progress, ticket)| progress.is_done(*ticket))
    }
}

impl Flight {
    fn new(buffers: Buffers, progress: Option<(Arc<dyn Progress>, u64)>) -> Flight {
        Flight { buffers, notes: [None, None], progress }
    }

    fn wait(&mut self) -> Result<(), CollectiveError> {
        let Some((progress, ticket)) = self.progress.take() else { return Ok(()) };
        self.notes = [None, None];
        let result = progress.wait(ticket, &mut self.buffers);
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
        // The group's next call reports the error again; here only the memory matters.
        let _ = self.wait();
    }
}
