//! Errors of collectives. Every message names ranks, calls and call sites, because the peers of the failed rank may be
//! gone when it is read.

use serde::{Deserialize, Serialize};

/// Cause of the end of a job, beside the rank in whose name it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Blame {
    /// The rank.
    Rank,
    /// Ranks that made different calls.
    Disagreement,
    /// The connection of the rank with another one.
    Link {
        /// The other rank; a job has fewer than 2^16.
        peer: u16,
    },
}

/// Error of a wait, returned instead of the buffers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// A rank or the launcher ended the job.
    #[error("the job ended because of rank {rank}: {reason}")]
    Aborted {
        /// The rank that failed.
        rank: usize,
        /// The reason, as that rank or the launcher gave it.
        reason: String,
    },
    /// Two ranks issued different collectives. No byte was moved.
    #[error("ranks disagree: {report}")]
    Disagreement {
        /// Both ranks, both calls and both call sites.
        report: String,
    },
    /// A rank did not make the call before the deadline.
    #[error("rank {rank} did not arrive: {report}")]
    Missing {
        /// The rank that was waited for.
        rank: usize,
        /// The call, how long it waited, and what the missing rank did last.
        report: String,
    },
    /// All ranks made the call and their devices came to it, but it did not end before the deadline.
    #[error("a call between devices does not end: {report}")]
    Stuck {
        /// The first rank on which it did not end.
        rank: usize,
        /// The call, how long the devices were in it, and all ranks on which it did not end.
        report: String,
    },
    /// A rank ended normally while others still waited for it.
    #[error("rank {rank} has left: {report}")]
    Left {
        /// The rank that ended.
        rank: usize,
        /// The call, and what the rank did last.
        report: String,
    },
    /// The connection to a rank of another host could not be made, or broke.
    #[error("rank {rank} cannot be reached: {report}")]
    Disconnected {
        /// The rank at the other end.
        rank: usize,
        /// Its host and address, the system's error, the call, and what the rank did last.
        report: String,
    },
    /// Nothing passes between two ranks of different hosts, both of which are there.
    #[error("nothing passes between rank {rank} and rank {peer}: {report}")]
    Cut {
        /// The one that waits.
        rank: usize,
        /// The other one.
        peer: usize,
        /// The call, how long a rank waited, and what both did last.
        report: String,
    },
    /// A tensor that other processes cannot read was given to a collective between processes.
    #[error(
        "a tensor of {bytes} bytes of rank {rank} is not in memory that the ranks share, so other processes cannot read \
         it: allocate it from a device over the rank's shared memory, as \
         `Arena::unplanned_in(Memory::Device, endpoint.arena(bytes)?)` or an arena that replays a plan there"
    )]
    NotShared {
        /// The rank whose tensor it is.
        rank: usize,
        /// Its length.
        bytes: usize,
    },
    /// The device of this rank failed.
    #[error(transparent)]
    Device(#[from] phalanx_tensor::DeviceError),
    /// A peer offered a buffer that is not inside its arena, or its arena cannot be mapped.
    #[error("the buffer of rank {rank} cannot be read: {report}")]
    Unreadable {
        /// The rank that offered it.
        rank: usize,
        /// Offset, length and arena, or the system's error.
        report: String,
    },
}
