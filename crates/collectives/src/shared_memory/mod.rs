//! Ranks on one host, as processes or as threads, by one protocol over shared memory.
//!
//! A collective, seen from one rank: (1) write the descriptor, among it where the buffer lies that
//! peers may use, and advance the own counter; (2) wait for every peer's counter, compare its
//! descriptor with the own one, and only then (3) read the peers' buffers in place and write own memory,
//! or that part of theirs which the algorithm gives to this rank alone; (4) advance the counter, and do
//! not return before the peers who use this rank's buffer have. Nothing is copied to be sent.
//!
//! The files, from the lowest to the highest; each imports only files above it in this list:
//!
//! 1. `text`, `descriptor`, `counter`, `flight`: what lies in shared memory; `control`: the shared block; `waits`: who
//!    waits for whom in it; `mirror`: the state of a rank of another host.
//! 2. `inherited`, `sealed`: descriptors from the launcher; `memory`: how a rank's buffers are read by its peers.
//! 3. `options`; `host`: a rank's share of its job; `transfer`: what one call moves.
//! 4. `participation`: a rank's part in one call; `watch`: what a waiting rank looks at; `meeting`: one call's counters
//!    and waits.
//! 5. One file per algorithm: what moves.
//! 6. `channel`: a group's calls in their order; `call_queue`: runs them, beside the caller or by it; `host_group`: the group that the
//!    engine sees.
//! 7. `endpoint`: a rank's access to its job; `host_job`: the launcher's.
//!
//! Nothing has a name in a file system: when the processes are gone, everything is.

mod text;

mod counter;
#[cfg(test)]
mod counter_model;

mod control;
mod descriptor;
mod flight;
mod mirror;
mod waits;

mod inherited;
mod memory;
mod sealed;

mod host;
mod options;
mod transfer;

mod meeting;
mod participation;
mod watch;

mod all_gather;
mod all_reduce;
mod all_to_all;
mod broadcast;
mod gather;
mod point_to_point;
mod reduce;
mod reduce_scatter;
mod scatter;

mod call_queue;
mod channel;
mod host_group;

mod endpoint;
mod host_job;

pub use endpoint::{Endpoint, join, threads};
pub use flight::FlightEvent;
pub use host_job::HostJob;
pub use inherited::take_file;
pub use options::Options;
pub use sealed::{SealedFile, take_sealed};
