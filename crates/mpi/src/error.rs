//! Errors of MPI before the first message.

/// Why MPI cannot carry messages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// Built without the feature `mpi`.
    #[error("this build of phalanx has no MPI; build it with `cargo build --release --features mpi`")]
    NotBuilt,
    /// MPI was started before, in the same process.
    #[error("MPI was started already in this process; it can be started once")]
    Started,
    /// The library does not let several threads call it.
    #[error(
        "{library} does not let several threads call it at once (MPI_THREAD_MULTIPLE), which the groups of a rank do; give \
         --transport tcp"
    )]
    Threads {
        /// Name of the library.
        library: String,
    },
    /// MPI knows this process as another rank.
    #[error(
        "{library} says that this is rank {found} of {found_world}, and the launcher says rank {rank} of {world}: was the \
         process started by the mpirun of another MPI than the one that phalanx is linked with? Otherwise give --transport tcp"
    )]
    OtherRank {
        /// Name of the library.
        library: String,
        /// The rank that MPI knows.
        found: usize,
        /// Its number of ranks.
        found_world: usize,
        /// The rank that the launcher knows.
        rank: usize,
        /// Its number of ranks.
        world: usize,
    },
    /// A call of the library failed.
    #[error("{call}: {text}")]
    Call {
        /// The function.
        call: &'static str,
        /// Message of the library.
        text: String,
    },
}
