//! The control plane: how the launchers of a job's hosts speak to each other. A star of authenticated connections around the
//! launcher of host 0, which passes on what concerns the others.
//!
//! - `rendezvous`: the launchers find each other, and prove that they know the job's secret. `listeners`: where host 0 listens.
//!   `parting`: why they part before their ranks have started.
//! - `link`: one connection, with a thread that reads and one that writes. Something is sent at least every
//!   [`HEARTBEAT`], so a silent connection is a host that is stopped or cut off.
//! - `message`: what is sent. `plane`: all connections of a launcher, and who has been heard when.
//! - `secret_file`: the secret in a file that only its user can read.

mod link;
mod listeners;
mod message;
mod parting;
mod plane;
mod rendezvous;
mod secret_file;

pub use message::{FailureReport, Message};
pub use parting::Parting;
pub use plane::{ControlPlane, Event, HostInfo};
pub use rendezvous::{Introduction, Meeting, Met, connect};
pub use secret_file::{create_secret, from_digits, read_secret, to_digits};

use std::time::Duration;

/// A launcher sends something at least this often.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(200);
