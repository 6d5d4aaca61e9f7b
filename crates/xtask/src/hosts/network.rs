//! The hosts and what connects them: one namespace for each host, and one for the bridge that their cables lead to.

use crate::hosts::arguments::Link;
use crate::hosts::namespace::Namespace;

/// Hosts that reach each other.
pub struct Network {
    bridge: Namespace,
    hosts: Vec<Namespace>,
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
        let network = Network { bridge, hosts };
        for (number, host) in network.hosts.iter().enumerate() {
            network.connect(number, host)?;
            limit(host, link)?;
        }
        Ok(network)
    }

    fn connect(&self, number: usize, host: &Namespace) -> Result<(), String> {
        let pid = host.pid();
        self.bridge.run(&format!("ip link add cable{number} type veth peer name eth0 netns {pid}"))?;
        self.bridge.run(&format!("ip link set cable{number} master bridge up"))?;
        host.run(&format!("ip address add {}/16 dev eth0", address(number)))?;
        host.run("ip link set eth0 up")
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

/// The addresses of all hosts.
pub const NETWORK: &str = "10.77.0.0/16";

/// The address of host `number`.
pub fn address(number: usize) -> String {
    format!("10.77.{}.{}", number / 200, number % 200 + 1)
}

/// Makes what the host sends late, slow or lost: with `netem`, or else with what the kernel has.
fn limit(host: &Namespace, link: &Link) -> Result<(), String> {
    if *link == Link::default() {
        return Ok(());
    }
    let part = |name: &str, value: Option<String>| value.map_or(String::new(), |v| format!(" {name} {v}"));
    let delay = part("delay", link.delay_ms.map(|ms| format!("{ms}ms")));
    let rate = part("rate", link.rate.clone());
    let loss = part("loss", link.loss_percent.map(|percent| format!("{percent}%")));
    let refused = match host.run(&format!("tc qdisc add dev eth0 root netem limit 100000{delay}{rate}{loss}"))
    {
        Ok(()) => return Ok(()),
        Err(refused) => refused,
    };
    if link.delay_ms.is_some() {
        return Err(format!("{refused}: without netem in the kernel there are no delays; leave out --delay"));
    }
    if let Some(rate) = &link.rate {
        host.run(&format!("tc qdisc add dev eth0 root tbf rate {rate} burst 256k latency 50ms"))?;
    }
    if let Some(percent) = link.loss_percent {
        let probability = percent / 100.0;
        host.run(&format!(
            "iptables -A INPUT -i eth0 -m statistic --mode random --probability {probability} -j DROP"
        ))?;
    }
    Ok(())
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
