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
//! 1. `word`, `text`, `descriptor`, `counter`, `flight`: what lies in shared memory; `control`: the shared block; `waits`:
//!    who waits for whom in it; `work`: whether the rank that is waited for works; `mirror`: the state of a rank of another
//!    host.
//! 2. `inherited`, `sealed`: descriptors from the launcher; `memory`: how a rank's buffers are read by its peers.
//! 3. `options`; `host`: a rank's share of its job; `transfer`: what one call moves.
//! 4. `participation`: a rank's part in one call; `watch`: what a waiting rank looks at; `meeting`: one call's counters
//!    and waits; `membership`: a rank's calls in a group.
//! 5. One file per algorithm: what moves.
//! 6. `channel`: the algorithm of each call; `call_queue`: runs calls in their order, beside the caller or by it;
//!    `rank_group`: the group that the engine sees.
//! 7. `endpoint`: a rank's access to its job; `host_job`: the launcher's.
//!
//! Nothing has a name in a file system: when the processes are gone, everything is.

pub(crate) mod text;
pub(crate) mod word;

mod counter;
#[cfg(test)]
mod counter_model;

pub(crate) mod control;
pub(crate) mod descriptor;
mod flight;
pub(crate) mod mirror;
pub(crate) mod waits;
mod work;

mod inherited;
pub(crate) mod memory;
mod sealed;

pub(crate) mod host;
pub(crate) mod options;
pub(crate) mod transfer;

pub(crate) mod meeting;
pub(crate) mod membership;
pub(crate) mod participation;
pub(crate) mod watch;

mod all_gather;
mod all_reduce;
mod all_to_all;
mod broadcast;
mod gather;
pub(crate) mod point_to_point;
mod reduce;
mod reduce_scatter;
mod scatter;

mod call_queue;
pub(crate) mod channel;
mod clock;
pub(crate) mod rank_cell;
mod rank_group;

pub(crate) mod endpoint;
mod host_job;

pub use control::MAX_WORLD;
pub use endpoint::{Endpoint, join, join_carried, threads};
pub use flight::FlightEvent;
pub use host_job::HostJob;
pub use inherited::take_file;
pub use options::Options;
pub use sealed::{SealedFile, take_sealed};
