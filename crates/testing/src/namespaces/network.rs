//! The hosts and what connects them: one namespace for each host, and one for the bridge that their cables lead to.

use crate::namespaces::namespace::Namespace;

/// Hosts that reach each other.
pub struct Network {
    bridge: Namespace,
    hosts: Vec<Namespace>,
}

/// Way in which the cable of a host is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Packets vanish on their way, and nobody is told: a cable behind a switch.
    Silent,
    /// The host's interface loses its carrier: the cable at the host.
    Carrier,
    /// The host's interface is set down, and its routes go.
    Interface,
}

impl Cut {
    /// All of them.
    pub const ALL: [Cut; 3] = [Cut::Silent, Cut::Carrier, Cut::Interface];
}

/// The addresses of all hosts.
pub const NETWORK: &str = "10.77.0.0/16";

/// The interface of a host of [`Network::new`].
const INTERFACE: &str = "eth0";

impl Network {
    /// A network of `hosts` hosts; that of number n has the address [`address`]`(n)`.
    ///
    /// # Errors
    /// When the system refuses a namespace or an interface.
    pub fn new(hosts: usize) -> Result<Network, String> {
        Network::with_cables(hosts, INTERFACE, address)
    }

    /// A network of `hosts` hosts whose cables end in an interface and an address of the caller's choice.
    ///
    /// # Errors
    /// When the system refuses a namespace or an interface.
    pub fn with_cables(
        hosts: usize,
        interface: &str,
        address: impl Fn(usize) -> String,
    ) -> Result<Network, String> {
        let bridge = Namespace::new()?;
        bridge.run("ip link add bridge type bridge")?;
        bridge.run("ip link set bridge up")?;
        let hosts = (0..hosts).map(|_| Namespace::new()).collect::<Result<Vec<_>, _>>()?;
        let network = Network { bridge, hosts };
        for (number, host) in network.hosts.iter().enumerate() {
            network.connect(number, host, interface, &address(number))?;
        }
        Ok(network)
    }

    /// Lays a cable from the bridge to the host's interface `interface`, with this address.
    fn connect(&self, number: usize, host: &Namespace, interface: &str, address: &str) -> Result<(), String> {
        let pid = host.pid();
        self.bridge.run(&format!("ip link add cable{number} type veth peer name {interface} netns {pid}"))?;
        self.bridge.run(&format!("ip link set cable{number} master bridge up"))?;
        host.run(&format!("ip address add {address}/16 dev {interface}"))?;
        host.run(&format!("ip link set {interface} up"))
    }

    /// The namespace of the bridge.
    pub fn bridge(&self) -> &Namespace {
        &self.bridge
    }

    /// The namespace of host `number`.
    pub fn host(&self, number: usize) -> &Namespace {
        &self.hosts[number]
    }

    /// The namespaces of all hosts.
    pub fn hosts(&self) -> &[Namespace] {
        &self.hosts
    }

    /// Cuts the cable of host `number`: its packets and those to it do not arrive.
    ///
    /// # Errors
    /// The error message of `ip`.
    pub fn cut(&self, number: usize, how: Cut) -> Result<(), String> {
        match how {
            Cut::Silent => self.bridge.run(&format!("ip link set cable{number} nomaster")),
            Cut::Carrier => self.bridge.run(&format!("ip link set cable{number} down")),
            Cut::Interface => self.hosts[number].run(&format!("ip link set {INTERFACE} down")),
        }
    }

    /// Parts two hosts: what they send each other vanishes, and both still reach all others.
    ///
    /// # Errors
    /// The error message of `ip`.
    pub fn part(&self, one: usize, other: usize) -> Result<(), String> {
        let blind = |host: usize, peer: usize| {
            let peer = address(peer);
            self.hosts[host]
                .run(&format!("ip neighbour replace {peer} lladdr {NOBODY} dev {INTERFACE} nud permanent"))
        };
        blind(one, other).and_then(|()| blind(other, one))
    }

    /// Repairs what [`Network::part`] did.
    ///
    /// # Errors
    /// The error message of `ip`.
    pub fn join(&self, one: usize, other: usize) -> Result<(), String> {
        let see = |host: usize, peer: usize| {
            self.hosts[host].run(&format!("ip neighbour delete {} dev {INTERFACE}", address(peer)))
        };
        see(one, other).and_then(|()| see(other, one))
    }

    /// Repairs what [`Network::cut`] did.
    ///
    /// # Errors
    /// The error message of `ip`.
    pub fn mend(&self, number: usize, how: Cut) -> Result<(), String> {
        match how {
            Cut::Silent => self.bridge.run(&format!("ip link set cable{number} master bridge")),
            Cut::Carrier => self.bridge.run(&format!("ip link set cable{number} up")),
            Cut::Interface => self.hosts[number].run(&format!("ip link set {INTERFACE} up")),
        }
    }
}

/// The address of a network card that nobody has.
const NOBODY: &str = "02:00:00:00:00:77";

/// The address of host `number`.
pub fn address(number: usize) -> String {
    format!("10.77.{}.{}", number / 200, number % 200 + 1)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

    use super::*;

    /// A socket of host `number`. The thread that makes it enters the namespace and ends.
    fn socket(network: &Network, number: usize) -> UdpSocket {
        let namespace = File::open(format!("/proc/{}/ns/net", network.host(number).pid())).unwrap();
        let make = move || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            UdpSocket::bind((address(number), 7000)).unwrap()
        };
        std::thread::spawn(make).join().unwrap()
    }

    #[test]
    fn nothing_passes_a_cable_that_is_cut_until_it_is_mended() {
        let network = match Network::new(3) {
            Ok(network) => network,
            Err(cause) => return println!("skipped: {cause}"),
        };
        let [own, other] = [0, 2].map(|number| socket(&network, number));
        let passes = |limit: Duration| {
            let until = Instant::now() + limit;
            let wait = Some(Duration::from_millis(20));
            for socket in [&own, &other] {
                socket.set_read_timeout(wait).unwrap();
            }
            let mut heard = [false; 2];
            while heard != [true; 2] && Instant::now() < until {
                // A host whose interface is down is told so.
                let _ = (own.send_to(b"x", (address(2), 7000)), other.send_to(b"x", (address(0), 7000)));
                for (socket, heard) in [&own, &other].into_iter().zip(&mut heard) {
                    *heard |= socket.recv(&mut [0; 8]).is_ok();
                }
            }
            // What is still on its way belongs to this try.
            for socket in [&own, &other] {
                while socket.recv(&mut [0; 8]).is_ok() {}
            }
            heard
        };
        assert_eq!(passes(Duration::from_secs(20)), [true; 2]);
        for cut in Cut::ALL {
            network.cut(2, cut).unwrap();
            assert_eq!(passes(Duration::from_millis(200)), [false; 2], "{cut:?}");
            network.mend(2, cut).unwrap();
            assert_eq!(passes(Duration::from_secs(20)), [true; 2], "{cut:?} mended");
        }
        network.part(0, 2).unwrap();
        assert_eq!(passes(Duration::from_millis(200)), [false; 2], "parted");
        network.join(0, 2).unwrap();
        assert_eq!(passes(Duration::from_secs(20)), [true; 2], "joined");
    }

    #[test]
    fn addresses_are_distinct_and_valid() {
        let mut all: Vec<String> = (0..200).map(address).collect();
        assert_eq!((all[0].as_str(), all[199].as_str()), ("10.77.0.1", "10.77.0.200"));
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 200);
    }
}
