//! In place of MPI, in a build without it.

use std::convert::Infallible;
use std::io::Result;
use std::sync::Arc;

use phalanx_collectives::{Carrier, Messenger};

use crate::error::MpiError;

/// Stands for a process of MPI in builds without MPI; there is no value of it.
#[derive(Debug)]
pub struct MpiJob(Infallible);

/// The MPI library that this build is linked with.
///
/// # Errors
/// [`MpiError::NotBuilt`], always.
pub fn library() -> std::result::Result<String, MpiError> {
    Err(MpiError::NotBuilt)
}

/// Makes this process, rank `rank` of `world`, a process of MPI.
///
/// # Errors
/// [`MpiError::NotBuilt`], always.
pub fn start(_rank: usize, _world: usize, _longest: usize) -> std::result::Result<MpiJob, MpiError> {
    Err(MpiError::NotBuilt)
}

impl MpiJob {
    /// Leaves MPI.
    pub fn finish(&self) {
        match self.0 {}
    }
}

impl Carrier for MpiJob {
    fn name(&self) -> &str {
        match self.0 {}
    }

    fn max_message_bytes(&self) -> usize {
        match self.0 {}
    }

    fn open(&self, _: usize, _: &[usize]) -> Result<Arc<dyn Messenger>> {
        match self.0 {}
    }

    fn close(&self) {
        match self.0 {}
    }
}
