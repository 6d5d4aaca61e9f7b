//! The hosts and what connects them: one namespace for each host, and one for the bridge that their cables lead to. If
//! links are to be slow, late or lossy, the hosts reach each other through a [`relay`] in the namespace of the bridge.

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::process::{Child, Stdio};

use crate::hosts::arguments::Link;
use crate::hosts::namespace::Namespace;
use crate::hosts::relay;

/// Hosts that reach each other.
pub struct Network {
    bridge: Namespace,
    hosts: Vec<Namespace>,
    relay: Option<Child>,
}

impl Network {
    /// A network of `hosts` hosts, whose links have the given quality.
    ///
    /// # Errors
    /// When the system refuses a namespace or an interface, or cannot make such links.
    pub fn new(hosts: usize, link: &Link) -> Result<Network, String> {
        let bridge = Namespace::new()?;
        bridge.run("ip link add bridge type bridge")?;
        bridge.run("ip link set bridge up")?;
        let hosts = (0..hosts).map(|_| Namespace::new()).collect::<Result<Vec<_>, _>>()?;
        let mut network = Network { bridge, hosts, relay: None };
        if *link == Link::default() {
            for (number, host) in network.hosts.iter().enumerate() {
                network.connect(number, host, "eth0", &address(number))?;
            }
            return Ok(network);
        }
        network.relay = Some(network.start_relay(link)?);
        for (number, host) in network.hosts.iter().enumerate() {
            network.connect(number, host, "cable", &tunnel_address(number).to_string())?;
            open_tunnel(number, host)?;
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

    /// Starts the relay through which all packets go.
    fn start_relay(&self, link: &Link) -> Result<Child, String> {
        self.bridge.run(&format!("ip address add {RELAY}/16 dev bridge"))?;
        let program =
            std::env::current_exe().map_err(|error| format!("the path of this program: {error}"))?;
        let mut command = self.bridge.command(&program.to_string_lossy());
        command.arg("hosts").args(relay::arguments(self.hosts.len(), link)).stdout(Stdio::piped());
        let mut relay = command.spawn().map_err(|error| format!("setpriv (util-linux): {error}"))?;
        let mut line = String::new();
        if let Some(stdout) = relay.stdout.as_mut() {
            let _ = BufReader::new(stdout).read_line(&mut line);
        }
        match line.trim() {
            "ready" => Ok(relay),
            _ => Err(format!("the relay ended: {:?}", relay.wait())),
        }
    }

    /// The namespace of host `number`.
    pub fn host(&self, number: usize) -> &Namespace {
        &self.hosts[number]
    }

    /// Cuts the cable of host `number`: its packets and those to it vanish.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn cut(&self, number: usize) -> Result<(), String> {
        self.bridge.run(&format!("ip link set cable{number} nomaster"))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some(relay) = &mut self.relay {
            let _ = relay.kill();
            let _ = relay.wait();
        }
    }
}

/// Where the relay is.
const RELAY: Ipv4Addr = Ipv4Addr::new(10, 78, 255, 254);

/// Makes the host's interface the end of a tunnel to the relay. The tunnel takes 50 bytes of each packet.
fn open_tunnel(number: usize, host: &Namespace) -> Result<(), String> {
    let (own, port, hardware) = (tunnel_address(number), relay::PORT, relay::hardware_address(number));
    host.run(&format!(
        "ip link add eth0 type vxlan id 1 dstport {port} local {own} remote {RELAY} nolearning"
    ))?;
    host.run(&format!("ip link set eth0 address {hardware} mtu 1450"))?;
    // Else the kernel leaves checksums to a card, and hands on many packets as one.
    host.run("ethtool -K eth0 tx off")?;
    host.run(&format!("ip address add {}/16 dev eth0", address(number)))?;
    host.run("ip link set eth0 up")
}

/// Where the tunnel of host `number` ends.
pub fn tunnel_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 78, (number / 200) as u8, (number % 200 + 1) as u8)
}

/// The address of host `number`.
pub fn address(number: usize) -> String {
    format!("10.77.{}.{}", number / 200, number % 200 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_distinct_and_valid() {
        let mut all: Vec<String> = (0..200).map(address).collect();
        assert_eq!((all[0].as_str(), all[199].as_str()), ("10.77.0.1", "10.77.0.200"));
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 200);
    }
}
