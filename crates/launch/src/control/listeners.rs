//! The sockets at which the launcher of host 0 listens. Hosts may name the rendezvous differently: `localhost` and 127.0.0.1, a
//! name of `/etc/hosts` and an address, a name of one family and the other. So it listens at every address of its name and at
//! loopback of both families; and at all addresses of its host where the name stands for loopback, by which nobody else reaches it.

use std::io::{Error, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use phalanx_collectives::secure::prepare_to_accept;

/// Sockets of one port.
pub(crate) struct Listeners {
    pub(crate) sockets: Vec<TcpListener>,
    /// The addresses of the sockets.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Addresses of the name at which it cannot listen, with the reason.
    left_out: Vec<String>,
}

const LOOPBACK: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

/// All addresses of a host. The first takes connections of both families, unless the system is set otherwise.
const EVERYWHERE: [IpAddr; 2] = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];

impl Listeners {
    /// Listens for hosts that reach this one by `host`, which stands for this one. A port of 0 is chosen by the system and told to the
    /// others with the name, so only what the name says counts.
    ///
    /// # Errors
    /// A name that cannot be resolved, addresses of another host, a port that is in use.
    pub(crate) fn open(host: &str, port: u16) -> Result<Listeners, String> {
        let mut named: Vec<IpAddr> = resolve(host, port)?.iter().map(SocketAddr::ip).collect();
        named.dedup();
        let is_told = port == 0 && (host.parse::<IpAddr>().is_ok() || host == "localhost");
        let (needed, wanted) = match named.iter().any(IpAddr::is_loopback) {
            true if is_told => (named, &[][..]),
            true => (EVERYWHERE.to_vec(), &[][..]),
            false => (named, &LOOPBACK[..]),
        };
        let mut opened = Listeners { sockets: Vec::new(), addresses: Vec::new(), left_out: Vec::new() };
        let mut refused = None;
        for (at, ip) in needed.iter().chain(wanted).enumerate() {
            match opened.bind(SocketAddr::new(*ip, opened.port().unwrap_or(port))) {
                Ok(()) => {}
                // The socket of both families has it.
                Err(error)
                    if error.kind() == ErrorKind::AddrInUse && opened.has_both() && ip.is_unspecified() => {}
                // Hosts would reach another program there.
                Err(error) if error.kind() == ErrorKind::AddrInUse && at < needed.len() => {
                    return Err(cannot(host, port, &error));
                }
                Err(error) if at < needed.len() && !ip.is_unspecified() => {
                    opened.left_out.push(format!("{ip} ({error})"));
                    refused = Some(error);
                }
                Err(error) => refused = refused.or(Some(error)),
            }
            if at + 1 == needed.len() && opened.sockets.is_empty() {
                return Err(cannot(host, port, &refused.unwrap_or_else(|| ErrorKind::NotFound.into())));
            }
        }
        Ok(opened)
    }

    fn bind(&mut self, address: SocketAddr) -> std::io::Result<()> {
        let socket = TcpListener::bind(address)?;
        prepare_to_accept(&socket)?;
        self.addresses.push(socket.local_addr()?);
        self.sockets.push(socket);
        Ok(())
    }

    fn has_both(&self) -> bool {
        self.addresses.iter().any(|address| address.ip() == EVERYWHERE[0])
    }

    /// The port of all sockets, once there is one.
    pub(crate) fn port(&self) -> Option<u16> {
        self.addresses.first().map(SocketAddr::port)
    }

    /// Describes the addresses at which it listens.
    pub(crate) fn describe(&self) -> String {
        let at = |address: &SocketAddr| match address.ip().is_unspecified() {
            true => format!("all addresses of this host, port {}", address.port()),
            false => address.to_string(),
        };
        let mut at: Vec<String> = self.addresses.iter().map(at).collect();
        at.dedup();
        let but = if self.left_out.is_empty() { "" } else { "; not at " };
        format!("{}{but}{}", at.join(", "), self.left_out.join(", "))
    }
}

fn cannot(host: &str, port: u16, error: &Error) -> String {
    format!(
        "host 0 cannot listen at {host}:{port}: {error}; the rendezvous is an address of host 0, at a port that no other program \
         uses"
    )
}

/// The addresses of a host.
pub(crate) fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    let found = (host, port)
        .to_socket_addrs()
        .map_err(|error| format!("the name {host} cannot be resolved: {error}"))?;
    let addresses: Vec<SocketAddr> = found.collect();
    if addresses.is_empty() { Err(format!("the name {host} has no address")) } else { Ok(addresses) }
}
