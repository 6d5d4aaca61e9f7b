//! A rank's process as a process of MPI.
//!
//! MPI ends a process that breaks its rules, and most libraries end a job whose process is gone. Here the launchers do that:
//! they name the rank first. So errors are returned, and MPI is left in order (`MPI_Finalize`, which waits for all ranks) only
//! when the work of a rank is done.

use std::io::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use mpi::Threading;
use mpi::environment::Universe;
use phalanx_collectives::{Carrier, Messenger};

use crate::calls::{self, Communicator};
use crate::error::MpiError;
use crate::messenger::GroupMessages;

/// A process of MPI.
pub struct MpiJob {
    library: String,
    longest: usize,
    world: Communicator,
    /// True once MPI must not be called any more. Read-locked while messages are begun or tested.
    closed: Arc<RwLock<bool>>,
    /// Leaves MPI when it is dropped.
    universe: Mutex<Option<Universe>>,
}

/// The MPI library that this build is linked with, in a few words.
///
/// # Errors
/// [`MpiError::NotBuilt`] in a build without MPI.
pub fn library() -> std::result::Result<String, MpiError> {
    let text = mpi::environment::library_version().unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    // "Open MPI v4.1.4, package: ...", "MPICH Version:	4.0.2".
    let words = line.split(',').next().unwrap_or_default().split_whitespace();
    let words = words.filter(|word| *word != "Version:").collect::<Vec<_>>().join(" ");
    Ok(if words.is_empty() { "an MPI without a name".to_string() } else { words })
}

/// Makes this process, rank `rank` of `world`, a process of MPI; waits until all ranks are. No message is longer than `longest`
/// bytes, the same in all ranks.
///
/// # Errors
/// A library that was started already, that several threads may not call, or that knows this process as another rank. If the
/// library itself fails to start, it ends the process, with its own message.
pub fn start(rank: usize, world: usize, longest: usize) -> std::result::Result<MpiJob, MpiError> {
    let library = library()?;
    let (universe, threading) =
        mpi::initialize_with_threading(Threading::Multiple).ok_or(MpiError::Started)?;
    let world_of_mpi = match calls::world() {
        Ok(world) => world,
        Err(error) => {
            // Left in order only by `finish`: a rank that failed must not wait for the others.
            std::mem::forget(universe);
            return Err(error);
        }
    };
    let universe = Mutex::new(Some(universe));
    let job = MpiJob { longest, world: world_of_mpi, closed: Arc::default(), universe, library };
    if threading != Threading::Multiple {
        return Err(MpiError::Threads { library: job.library.clone() });
    }
    let (found, found_world) = job.world.rank_and_size()?;
    if (found, found_world) != (rank, world) {
        let library = job.library.clone();
        return Err(MpiError::OtherRank { library, found, found_world, rank, world });
    }
    Ok(job)
}

impl MpiJob {
    /// Leaves MPI in order; waits until all ranks do. Nothing happens after a failure, or for the second time.
    pub fn finish(&self) {
        let mut closed = self.closed.write().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *closed, true) {
            let universe = self.universe.lock().ok().and_then(|mut universe| universe.take());
            drop(universe);
        }
    }
}

impl Drop for MpiJob {
    fn drop(&mut self) {
        // Without `finish`, this rank has failed, and waits for nobody.
        if let Ok(mut universe) = self.universe.lock() {
            std::mem::forget(universe.take());
        }
    }
}

impl Carrier for MpiJob {
    fn name(&self) -> &str {
        &self.library
    }

    fn max_message_bytes(&self) -> usize {
        self.longest
    }

    fn open(&self, number: usize, members: &[usize]) -> Result<Arc<dyn Messenger>> {
        if *self.closed.read().unwrap_or_else(PoisonError::into_inner) {
            return Err(Error::other("this rank has left MPI after a failure"));
        }
        let communicator = self.world.subset(members, number).map_err(Error::other)?;
        Ok(Arc::new(GroupMessages { communicator, closed: Arc::clone(&self.closed) }))
    }

    fn close(&self) {
        *self.closed.write().unwrap_or_else(PoisonError::into_inner) = true;
    }
}
