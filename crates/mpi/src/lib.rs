//! Carries messages between the hosts of a job through MPI, where mpirun or srun has started the ranks.
//!
//! [`start`] makes the process of a rank a process of MPI; what it returns is a [`Carrier`](phalanx_collectives::Carrier).
//! Each group of ranks has a communicator of its own. Nothing but bytes goes through MPI: sums are made by
//! `phalanx-collectives`, in the order that all its transports share, so that the bits are theirs; MPI's own reductions may
//! add in any order, and know no 16-bit floating-point numbers.
//!
//! MPI is linked with the feature `mpi` alone ([`library`] says which). Without it, [`library`] and [`start`] say so.

#[cfg(not(feature = "mpi"))]
mod absent;
#[cfg(feature = "mpi")]
mod calls;
mod error;
#[cfg(feature = "mpi")]
mod job;
#[cfg(feature = "mpi")]
mod messenger;

#[cfg(not(feature = "mpi"))]
pub use absent::{MpiJob, library, start};
pub use error::MpiError;
#[cfg(feature = "mpi")]
pub use job::{MpiJob, library, start};

/// Bytes of the longest message. A rank notices that something moves when a message is over, so a message must be over long before
/// `run.stall_timeout_s` on a slow network. (MPI itself counts the elements of a message in 32 bits.)
pub const LONGEST_MESSAGE: usize = 4 << 20;
