//! Process groups: who takes part in a collective, and how its bytes move.
//!
//! [`Group`] is the one trait that the rest of the engine sees, always passed, never ambient. Work in
//! flight owns its buffers ([`Pending`]). Implementations: [`Solo`] for a world of one,
//! [`shared_memory`] for ranks of one host as threads or as processes, [`network`] for ranks of several hosts, [`MetaGroup`]
//! that only records. Every reduction adds along one fixed tree ([`phalanx_simd::sums`]), so whoever moves the bytes,
//! the sums have the same bits. Every call is compared with the peers' before a byte moves.

pub mod bench;
pub mod call;
pub mod error;
pub mod group;
pub mod hosts;
pub mod linked;
pub mod meta;
pub mod mover;
pub mod network;
mod parts;
pub mod pending;
mod placement;
pub mod pretended;
pub mod secure;
pub mod shared_memory;
pub mod solo;
pub mod staged;
pub mod statistics;

pub use call::{Buffers, Call, element_of};
pub use error::{Blame, CollectiveError};
pub use group::Group;
pub use hosts::Hosts;
pub use meta::MetaGroup;
pub use mover::Mover;
pub use network::{
    Carrier, Connections, GroupSums, InFlight, Messenger, Network, Wire, describe_frame, transport_bytes,
};
pub use pending::Pending;
pub use phalanx_plan::trace::CollectiveOp;
pub use phalanx_simd::Isa;
pub use shared_memory::{
    Endpoint, FlightEvent, HostJob, MAX_WORLD, Options, SealedFile, join, join_carried, take_file,
    take_sealed, threads,
};
pub use solo::Solo;
pub use statistics::Statistics;
