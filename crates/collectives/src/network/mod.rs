//! Ranks of several hosts: shared memory within a host; between hosts TCP, or a library that carries messages.
//!
//! The files, from the lowest to the highest; each imports only files above it in this list:
//!
//! 1. `frame`: a call on the wire; `socket_options`: wakes and buffers of the system; `line`: one connection, which never blocks; `door`: who connects to this rank; `carrier`:
//!    what can take the place of TCP; `node`: a rank's place in the network.
//! 2. `peer_path`: what a link needs of either; `lines`: a path over TCP; `messages`: a path over a carrier; `link`: a group's link
//!    to one member; `layout`: how a group lies on its hosts; `exchange`: a call in
//!    progress and its waits.
//! 3. `staging`, `partial_sums`: sums over hosts; `parcels`: copies over hosts; `choice`: which algorithm a call uses. One
//!    file per algorithm: what moves.
//! 4. `channel`: the algorithm of each call. `memory`: what all of it takes.
//!
//! No ring adds: it would change the order of additions (`partial_sums`).

mod all_gather;
mod all_reduce;
mod all_to_all;
mod broadcast;
mod carrier;
pub(crate) mod channel;
mod choice;
pub(crate) mod door;
mod exchange;
pub(crate) mod frame;
mod gather;
mod halving;
mod layout;
pub(crate) mod line;
mod lines;
mod link;
mod memory;
mod messages;
pub(crate) mod node;
mod parcels;
mod partial_sums;
mod peer_path;
mod reduce;
mod reduce_scatter;
mod ring_all_gather;
mod scatter;
mod socket_options;
mod staging;

use std::net::SocketAddr;

pub use carrier::{Carrier, InFlight, Messenger};
pub use choice::algorithm;
pub use frame::describe_frame;
pub use memory::{Connections, GroupSums, transport_bytes};
use serde::{Deserialize, Serialize};

use crate::hosts::Hosts;
use crate::secure::{Identity, Protection, Secret};

/// Transport between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wire {
    /// TCP connections of this crate: authenticated, and encrypted unless somebody asked for plaintext.
    #[default]
    Tcp,
    /// Messages of MPI, by a [`Carrier`]. Nothing here authenticates or encrypts them.
    Mpi,
}

/// Settings with which a rank reaches the ranks of other hosts. Its launcher hands them over in a sealed memory file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Network {
    /// The hosts of the job.
    pub hosts: Hosts,
    /// The host of this rank.
    pub host: usize,
    /// The job's random number.
    pub job: [u8; 16],
    /// Which start of the job this is.
    pub epoch: u32,
    /// The job's secret.
    pub secret: Secret,
    /// Address at which each world rank listens.
    pub addresses: Vec<SocketAddr>,
    /// True if traffic between hosts is not encrypted. Peers authenticate each other all the same.
    pub plaintext: bool,
    /// Connections between two ranks of a group, at least one, over which large messages are divided.
    pub streams: usize,
    /// Transport between hosts. With [`Wire::Mpi`], secret, addresses and streams of this rank go unused.
    pub wire: Wire,
}

impl Network {
    /// Identity of the job's data connections.
    pub(crate) fn identity(&self) -> Identity {
        // The launchers that share the job's random number have compared their builds.
        Identity { build: env!("CARGO_PKG_VERSION"), job: self.job, epoch: self.epoch, purpose: "data" }
    }

    /// Protection of the traffic between hosts.
    pub(crate) fn protection(&self) -> Protection {
        if self.plaintext { Protection::Plaintext } else { Protection::Encrypted }
    }

    /// Checks that the parts fit each other.
    ///
    /// # Errors
    /// A number of addresses, a host or a number of streams that cannot be.
    pub(crate) fn check(&self) -> std::io::Result<()> {
        let world = self.hosts.world_size();
        if self.addresses.len() != world || self.host >= self.hosts.len() || self.streams == 0 {
            let text = format!(
                "host {} of {} with {} addresses for {world} ranks and {} streams",
                self.host,
                self.hosts.len(),
                self.addresses.len(),
                self.streams
            );
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
        }
        Ok(())
    }
}
