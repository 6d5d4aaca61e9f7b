//! The hosts of a trial and what connects them. If links are to be slow, late or lossy, the hosts reach each other through a
//! [`relay`] in the namespace of the bridge.

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::process::{Child, Stdio};

use crate::namespaces::{Cut, Namespace, Network, address};

use crate::hosts::arguments::Link;
use crate::hosts::relay;

/// Hosts that reach each other over links of a given quality.
pub struct Linked {
    network: Network,
    relay: Option<Child>,
}

impl Linked {
    /// A network of `hosts` hosts, whose links have the given quality.
    ///
    /// # Errors
    /// When the system refuses a namespace or an interface, or cannot make such links.
    pub fn new(hosts: usize, link: &Link) -> Result<Linked, String> {
        if *link == Link::default() {
            return Ok(Linked { network: Network::new(hosts)?, relay: None });
        }
        let tunnel_address = |number| relay::tunnel_address(number).to_string();
        let network = Network::with_cables(hosts, "cable", tunnel_address)?;
        let relay = start_relay(network.bridge(), hosts, link)?;
        // Ends the relay also where a tunnel fails.
        let linked = Linked { network, relay: Some(relay) };
        for (number, host) in linked.network.hosts().iter().enumerate() {
            open_tunnel(number, host)?;
        }
        Ok(linked)
    }

    /// The namespace of host `number`.
    pub fn host(&self, number: usize) -> &Namespace {
        self.network.host(number)
    }

    /// Cuts the cable of host `number`: its packets and those to it vanish.
    ///
    /// # Errors
    /// The error message of `ip`.
    pub fn cut(&self, number: usize) -> Result<(), String> {
        self.network.cut(number, Cut::Silent)
    }
}

impl Drop for Linked {
    fn drop(&mut self) {
        if let Some(relay) = &mut self.relay {
            let _ = relay.kill();
            let _ = relay.wait();
        }
    }
}

/// IP address of the relay.
const RELAY: Ipv4Addr = Ipv4Addr::new(10, 78, 255, 254);

/// Starts the relay through which all packets go.
fn start_relay(bridge: &Namespace, hosts: usize, link: &Link) -> Result<Child, String> {
    bridge.run(&format!("ip address add {RELAY}/16 dev bridge"))?;
    let program = std::env::current_exe().map_err(|error| format!("the path of this program: {error}"))?;
    let mut command = bridge.command(&program.to_string_lossy());
    command.arg("hosts").args(relay::arguments(hosts, link)).stdout(Stdio::piped());
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

/// Makes the host's interface the end of a tunnel to the relay. The tunnel takes 50 bytes of each packet.
fn open_tunnel(number: usize, host: &Namespace) -> Result<(), String> {
    let (own, port, hardware) = (relay::tunnel_address(number), relay::PORT, relay::hardware_address(number));
    host.run(&format!(
        "ip link add eth0 type vxlan id 1 dstport {port} local {own} remote {RELAY} nolearning"
    ))?;
    host.run(&format!("ip link set eth0 address {hardware} mtu 1450"))?;
    // Else the kernel leaves checksums to a card, and hands on many packets as one.
    host.run("ethtool -K eth0 tx off")?;
    host.run(&format!("ip address add {}/16 dev eth0", address(number)))?;
    host.run("ip link set eth0 up")
}
