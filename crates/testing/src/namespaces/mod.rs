//! For tests alone: hosts that are network namespaces of this machine, connected by a bridge, with cables that can be cut.
//!
//! Every namespace lives as long as a process that waits for this one ([`Namespace`]), so nothing remains after any end, and
//! nothing has a name in the system. The hosts' cables lead to a bridge in a namespace of its own ([`Network`]). All of it needs
//! root, `ip` of iproute2, and `unshare`, `nsenter` and `setpriv` of util-linux; without them, an error says so.

mod namespace;
mod network;

pub use namespace::Namespace;
pub use network::{Cut, NETWORK, Network, address};
