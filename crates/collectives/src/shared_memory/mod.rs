//! Ranks on one host, as processes or as threads, by one protocol over shared memory.
//!
//! A collective, seen from one rank: (1) write the descriptor, among it where the buffer lies that
//! peers may use, and advance the own counter; (2) wait for every peer's counter, compare its
//! descriptor with the own one, and only then (3) read the peers' buffers in place and write own memory,
//! or that part of theirs which the algorithm gives to this rank alone; (4) advance the counter, and do
//! not return before the peers who use this rank's buffer have. Nothing is copied to be sent.
//!
//! `control` is the shared block, `descriptor` what is agreed, `meeting` one collective's counters
//! and waits, one file per algorithm what moves; `channel` runs calls of a group in their order and
//! `stream` does so beside the caller. `endpoint` is a rank's way in, `host_job` the launcher's.
//! Nothing has a name in a file system: when the processes are gone, everything is.

mod all_gather;
mod all_reduce;
mod all_to_all;
mod broadcast;
mod channel;
mod control;
mod descriptor;
mod endpoint;
mod gather;
mod host_job;
mod meeting;
mod memory;
mod point_to_point;
mod reduce;
mod reduce_scatter;
mod scatter;
mod sealed;
mod stream;
mod waits;
mod watch;

pub use endpoint::{Endpoint, Options, join, threads};
pub use host_job::HostJob;
pub use sealed::{SealedFile, take_sealed};
