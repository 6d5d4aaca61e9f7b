//! Several hosts pretended by threads of one process: each has a control block of its own, and they speak TCP over the
//! loopback device, as ranks of real hosts do, or through a carrier. For tests and benchmarks.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use phalanx_tensor::operations::{Elementwise, Operation};
use phalanx_tensor::{Kernels, Region};

use crate::hosts::Hosts;
use crate::network::node::Node;
use crate::network::{Carrier, Network, Wire};
use crate::secure::Secret;
use crate::shared_memory::Endpoint;
use crate::shared_memory::control::{Control, cores};
use crate::shared_memory::host::Host;
use crate::shared_memory::memory::Memory;
use crate::shared_memory::mirror;

/// Time between two looks of the launchers.
const LOOK: Duration = Duration::from_millis(10);

/// Stand-in for the launchers of pretended hosts: passes on the reason why a job ended, and the states of the ranks. Ends when it
/// is dropped.
pub struct Launchers {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A processor that only copies f32, as the first bytes of a link come to a device: groups themselves only move and add bytes.
pub struct NoKernels;

impl Kernels for NoKernels {
    fn name(&self) -> &'static str {
        "none"
    }

    fn threads(&self) -> usize {
        1
    }

    fn execute(&self, operation: Operation) {
        match operation {
            Operation::Elementwise(Elementwise::Copy(copy)) => {
                copy.to.into_slice::<f32>().copy_from_slice(copy.from.as_slice());
            }
            operation => panic!("no kernel for {}", operation.name()),
        }
    }
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
    let networks = networks(sizes, plaintext, streams, &Secret::generate()?)?;
    let nodes = networks.into_iter().enumerate();
    let nodes = nodes.map(|(rank, (network, listener))| Node::new(network, rank, listener));
    endpoints(sizes, nodes.collect::<std::io::Result<_>>()?)
}

/// The same, where rank r exchanges messages through the r-th carrier.
///
/// # Errors
/// When the system refuses memory or threads.
pub fn carried_hosts_of_threads(
    sizes: &[usize],
    carriers: Vec<Arc<dyn Carrier>>,
) -> std::io::Result<(Vec<Endpoint>, Launchers)> {
    let hosts = Hosts::new(sizes.to_vec());
    let carriers = carriers.into_iter().enumerate();
    let nodes = carriers.map(|(rank, carrier)| Node::carried(carried(&hosts, rank), carrier));
    endpoints(sizes, nodes.collect())
}

/// The endpoint of rank `rank` of `world` ranks, each alone on its host, which exchange messages through a carrier. Other
/// processes have the other ranks, and nobody watches them.
///
/// # Errors
/// When the system refuses memory.
pub fn lone_rank(rank: usize, world: usize, carrier: Arc<dyn Carrier>) -> std::io::Result<Endpoint> {
    let control = Control::create(Region::anonymous(Control::bytes(world))?, world, cores());
    let host = Host::new(Arc::new(control), Memory::Threads, rank, rank..rank + 1);
    let network = carried(&Hosts::new(vec![1; world]), rank);
    Ok(Endpoint::new(host, Some(Arc::new(Node::carried(network, carrier)))))
}

/// The endpoints of a job by world rank, and what launchers would do for it.
fn endpoints(sizes: &[usize], nodes: Vec<Node>) -> std::io::Result<(Vec<Endpoint>, Launchers)> {
    let hosts = Hosts::new(sizes.to_vec());
    let world = hosts.world_size();
    let controls = (0..hosts.len())
        .map(|_| Ok(Arc::new(Control::create(Region::anonymous(Control::bytes(world))?, world, cores()))));
    let controls = controls.collect::<std::io::Result<Vec<_>>>()?;
    let mut endpoints = Vec::with_capacity(world);
    for (rank, node) in nodes.into_iter().enumerate() {
        let host = node.network.host;
        let host = Host::new(Arc::clone(&controls[host]), Memory::Threads, rank, hosts.ranks(host));
        endpoints.push(Endpoint::new(host, Some(Arc::new(node))));
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

/// The network settings of each rank of such a job, and its listener.
fn networks(
    sizes: &[usize],
    plaintext: bool,
    streams: usize,
    secret: &Secret,
) -> std::io::Result<Vec<(Network, TcpListener)>> {
    let hosts = Hosts::new(sizes.to_vec());
    let listeners = (0..hosts.world_size()).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)));
    let listeners = listeners.collect::<std::io::Result<Vec<_>>>()?;
    let addresses =
        listeners.iter().map(TcpListener::local_addr).collect::<std::io::Result<Vec<SocketAddr>>>()?;
    let network = |rank: usize| Network {
        hosts: hosts.clone(),
        host: hosts.host_of(rank),
        job: *b"pretended hosts.",
        epoch: 0,
        secret: secret.clone(),
        addresses: addresses.clone(),
        plaintext,
        streams,
        wire: Wire::Tcp,
    };
    Ok(listeners.into_iter().enumerate().map(|(rank, listener)| (network(rank), listener)).collect())
}

/// Network settings of a rank that reaches the others through a carrier. They have no addresses.
fn carried(hosts: &Hosts, rank: usize) -> Network {
    Network {
        hosts: hosts.clone(),
        host: hosts.host_of(rank),
        job: *b"pretended hosts.",
        epoch: 0,
        secret: Secret::from_bytes([0; 32]),
        addresses: vec![SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)); hosts.world_size()],
        plaintext: true,
        streams: 1,
        wire: Wire::Mpi,
    }
}

/// Passes on what the launchers of real hosts would. Why a rank has left comes before that it has.
fn relay(hosts: &Hosts, controls: &[Arc<Control>]) {
    for (own, control) in controls.iter().enumerate() {
        let others =
            || controls.iter().enumerate().filter(move |(host, _)| *host != own).map(|(_, other)| other);
        let states: Vec<_> = hosts.ranks(own).map(|rank| (rank, mirror::write(control, rank))).collect();
        if control.is_aborted() && others().any(|other| !other.is_aborted()) {
            let abort = control.aborted().expect("it has ended");
            others().for_each(|other| other.abort(abort.clone()));
        }
        for (rank, state) in &states {
            others().for_each(|other| mirror::read(other, *rank, state));
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::Barrier;

    use phalanx_tensor::{Arena, Category, DType, Device, Tensor};
    use phalanx_testing::hostile::Random;

    use crate::error::CollectiveError;
    use crate::group::Group;
    use crate::network::door::LineKey;
    use crate::network::frame::FRAME_BYTES;
    use crate::shared_memory::options::Options;

    /// A path to `to` on which everything vanishes, in both directions, once `is_cut`. It ends with the connections.
    fn path_to(to: SocketAddr, is_cut: &Arc<AtomicBool>) -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let is_cut = Arc::clone(is_cut);
        let carry = |mut from: TcpStream, mut to: TcpStream, is_cut: Arc<AtomicBool>| {
            let mut buffer = [0; 1 << 16];
            while let Ok(bytes @ 1..) = from.read(&mut buffer) {
                if !is_cut.load(Ordering::Acquire) && to.write_all(&buffer[..bytes]).is_err() {
                    return;
                }
            }
        };
        std::thread::spawn(move || {
            let (one, _) = listener.accept().unwrap();
            let other = TcpStream::connect(to).unwrap();
            let [back, forth] = [one.try_clone().unwrap(), other.try_clone().unwrap()];
            let also = Arc::clone(&is_cut);
            std::thread::spawn(move || carry(one, other, is_cut));
            carry(forth, back, also);
        });
        address
    }

    type Calls = fn(&dyn Group, &Device) -> Result<(), CollectiveError>;

    fn zeros(device: &Device, elements: usize) -> Tensor {
        device.alloc(DType::F32, [elements], Category::Communication, "zeros")
    }

    /// Four hosts of a rank make `calls` until 2 and 3 do not reach each other any more; the time of rank `first` is over first. What
    /// each rank says of it.
    fn parted(calls: Calls, first: usize) -> Vec<CollectiveError> {
        let is_cut = Arc::new(AtomicBool::new(false));
        let mut networks = networks(&[1; 4], true, 1, &Secret::from_bytes([9; 32])).unwrap();
        // The higher of two ranks connects.
        networks[3].0.addresses[2] = path_to(networks[3].0.addresses[2], &is_cut);
        let nodes = networks.into_iter().enumerate();
        let nodes = nodes.map(|(rank, (network, listener))| Node::new(network, rank, listener).unwrap());
        let (endpoints, _launchers) = endpoints(&[1; 4], nodes.collect()).unwrap();
        let met = Barrier::new(4);
        let run = |(rank, endpoint): (usize, Endpoint)| {
            let deadline = Duration::from_secs(if rank == first { 1 } else { 30 });
            let endpoint = endpoint.with_options(Options { overlap: false, deadline, ..Options::default() });
            let device = Device::new(Arc::new(NoKernels), Arena::heap());
            let group = endpoint.group("data");
            group.barrier().wait().unwrap();
            if met.wait().is_leader() {
                is_cut.store(true, Ordering::Release);
            }
            met.wait();
            loop {
                if let Err(error) = calls(&*group, &device) {
                    return error;
                }
            }
        };
        std::thread::scope(|scope| {
            let start = |at| scope.spawn(move || run(at));
            let threads: Vec<_> = endpoints.into_iter().enumerate().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn two_hosts_that_do_not_reach_each_other_are_named_whoever_gives_up_first() {
        let kinds: [Calls; 4] = [
            |group, _| group.barrier().wait(),
            |group, device| group.all_reduce(zeros(device, 40)).wait().map(drop),
            |group, device| group.all_reduce(zeros(device, 1 << 20)).wait().map(drop),
            |group, device| group.all_gather(zeros(device, 10), zeros(device, 40)).wait().map(drop),
        ];
        std::thread::scope(|scope| {
            for (kind, first) in (0..kinds.len()).flat_map(|kind| (0..4).map(move |first| (kind, first))) {
                let calls = kinds[kind];
                scope.spawn(move || {
                    for error in parted(calls, first) {
                        let what = format!("calls {kind}, rank {first} gives up: {error}");
                        let CollectiveError::Cut { rank, peer, .. } = error else { panic!("{what}") };
                        assert_eq!([rank.min(peer), rank.max(peer)], [2, 3], "{what}");
                    }
                });
            }
        });
    }

    /// Rank 1 knows the secret, and sends `bytes` in place of its call. The error of rank 0.
    fn error_of_a_rank_whose_peer_sends(bytes: &[u8]) -> CollectiveError {
        let networks = networks(&[1, 1], true, 1, &Secret::from_bytes([9; 32])).unwrap();
        let mut networks = networks.into_iter();
        let control = || Control::create(Region::anonymous(Control::bytes(2)).unwrap(), 2, 1);
        let (network, listener) = networks.next().unwrap();
        let node = Arc::new(Node::new(network, 0, listener).unwrap());
        let host = Host::new(Arc::new(control()), Memory::Threads, 0, 0..1);
        let options = Options { overlap: false, deadline: Duration::from_secs(20), ..Options::default() };
        let endpoint = Endpoint::new(host, Some(node)).with_options(options);
        let (network, listener) = networks.next().unwrap();
        let hostile = Node::new(network, 1, listener).unwrap();
        let key = LineKey { channel: 0, from: 1, stream: 0 };
        let mut line = hostile.connect(key, 0, &|| Ok(())).unwrap();
        assert_eq!(line.write(bytes).unwrap(), bytes.len());
        endpoint.group("data").barrier().wait().expect_err("the peer makes no call")
    }

    #[test]
    fn an_authenticated_peer_that_sends_no_call_is_named() {
        let text = error_of_a_rank_whose_peer_sends(&[0xee; FRAME_BYTES]).to_string();
        for word in
            ["rank 1", "the peer sent something else than a call", "to host 1 at 127.0.0.1:", "barrier"]
        {
            assert!(text.contains(word), "no '{word}' in {text}");
        }
        for number in 0..8 {
            let mut random = Random::of_case("calls of a hostile peer", number);
            let mut frame = random.bytes(FRAME_BYTES);
            frame[..8].copy_from_slice(b"PHXCALL1");
            let error = error_of_a_rank_whose_peer_sends(&frame);
            assert!(matches!(error, CollectiveError::Disagreement { .. }), "{error}");
        }
    }
}
