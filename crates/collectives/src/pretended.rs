//! Several hosts pretended by threads of one process: each has a control block of its own, and they speak TCP over the
//! loopback device, as ranks of real hosts do. For tests and benchmarks.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use phalanx_tensor::Region;

use crate::hosts::Hosts;
use crate::network::Network;
use crate::network::node::Node;
use crate::secure::Secret;
use crate::shared_memory::Endpoint;
use crate::shared_memory::control::{Control, cores};
use crate::shared_memory::host::Host;
use crate::shared_memory::memory::Memory;
use crate::shared_memory::mirror;

/// Time between two looks of the launchers.
const LOOK: Duration = Duration::from_millis(10);

/// What the launchers of pretended hosts do for each other: they pass on why a job ended, and what their ranks do. Ends
/// when it is dropped.
pub struct Launchers {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// One endpoint per rank of a job on hosts with these numbers of ranks, by world rank. Their groups take tensors of any
/// host memory. With `plaintext`, traffic between the hosts is not encrypted; large messages are divided over `streams`
/// connections.
///
/// # Errors
/// When the system refuses sockets, memory or threads.
pub fn hosts_of_threads(
    sizes: &[usize],
    plaintext: bool,
    streams: usize,
) -> std::io::Result<(Vec<Endpoint>, Launchers)> {
    let hosts = Hosts::new(sizes.to_vec());
    let world = hosts.world_size();
    let listeners = (0..world).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)));
    let listeners = listeners.collect::<std::io::Result<Vec<_>>>()?;
    let addresses =
        listeners.iter().map(TcpListener::local_addr).collect::<std::io::Result<Vec<SocketAddr>>>()?;
    let (secret, job) = (Secret::generate()?, *b"pretended hosts.");
    let controls = (0..hosts.len())
        .map(|_| Ok(Arc::new(Control::create(Region::anonymous(Control::bytes(world))?, world, cores()))));
    let controls = controls.collect::<std::io::Result<Vec<_>>>()?;
    let mut endpoints = Vec::with_capacity(world);
    for (rank, listener) in listeners.into_iter().enumerate() {
        let host = hosts.host_of(rank);
        let network = Network {
            hosts: hosts.clone(),
            host,
            job,
            epoch: 0,
            secret: secret.clone(),
            addresses: addresses.clone(),
            plaintext,
            streams,
        };
        let node = Arc::new(Node::new(network, rank, listener)?);
        let host = Host::new(Arc::clone(&controls[host]), Memory::Threads, rank, hosts.ranks(host));
        endpoints.push(Endpoint::new(host, Some(node)));
    }
    let over = Arc::new(AtomicBool::new(false));
    let watched = Arc::clone(&over);
    let thread = std::thread::Builder::new().name("launchers".into()).spawn(move || {
        while !watched.load(Ordering::Acquire) {
            relay(&hosts, &controls);
            std::thread::sleep(LOOK);
        }
    })?;
    Ok((endpoints, Launchers { over, thread: Some(thread) }))
}

/// Passes on what the launchers of real hosts would.
fn relay(hosts: &Hosts, controls: &[Arc<Control>]) {
    for (own, control) in controls.iter().enumerate() {
        let others =
            || controls.iter().enumerate().filter(move |(host, _)| *host != own).map(|(_, other)| other);
        for rank in hosts.ranks(own) {
            let state = mirror::write(control, rank);
            others().for_each(|other| mirror::read(other, rank, &state));
        }
        if control.is_aborted() && others().any(|other| !other.is_aborted()) {
            let abort = control.aborted().expect("it has ended");
            others().for_each(|other| other.abort(abort.clone()));
        }
    }
}

impl Drop for Launchers {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
