//! The launchers find each other: that of host 0 listens, and the others connect to it, again and again until it does. Both
//! prove that they know the job's secret before anything else is said.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use phalanx_collectives::secure::{self, Connection, Identity, Protection, Secret};
use serde::{Deserialize, Serialize};

use crate::control::link::{Inbox, Link};
use crate::control::message::Message;
use crate::control::plane::{ControlPlane, HostInfo};

/// Connections that are authenticated at the same time; more wait in the system's queue.
const AT_ONCE: usize = 16;

/// Time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(200);

/// Time between two lines that say for whom this launcher waits.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// What a launcher says of its host when it connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduction {
    /// The name of the host.
    pub name: String,
    /// What differs between machines: several hosts may be one machine.
    pub machine: String,
    /// Its number.
    pub host: usize,
    /// Number of hosts that it expects.
    pub hosts: usize,
    /// Number of ranks that it runs.
    pub ranks: usize,
    /// What its program says about it to that of host 0.
    #[serde(default)]
    pub about: String,
}

impl Introduction {
    fn info(&self) -> HostInfo {
        let Introduction { name, machine, host, ranks, about, .. } = self.clone();
        HostInfo { name, id: host, machine, ranks, about }
    }
}

/// A control plane whose launchers have all met.
pub struct Met {
    /// The connections.
    pub plane: ControlPlane,
    /// The address of this host by which the others reach it.
    pub address: IpAddr,
}

/// What the connections between launchers belong to. The secret is that of one job.
const IDENTITY: Identity = Identity { job: [0; 16], epoch: 0, purpose: "control" };

/// The listening launcher of host 0.
pub struct Meeting {
    listener: TcpListener,
}

impl Meeting {
    /// Listens at `host:port`, which is this host. Where the name of this host stands for a loopback address only, as in
    /// Debian's `/etc/hosts`, it listens at all addresses: others reach it by the name.
    ///
    /// # Errors
    /// A name that cannot be resolved, an address of another host, a port that is in use.
    pub fn listen(host: &str, port: u16) -> Result<Meeting, String> {
        let addresses = resolve(host, port)?;
        let named = host.parse::<IpAddr>().is_err() && host != "localhost";
        let only_loopback = addresses.iter().all(|address| address.ip().is_loopback());
        let bound = match named && only_loopback {
            true => TcpListener::bind(("0.0.0.0", port)),
            false => TcpListener::bind(&addresses[..]),
        };
        let listener = bound.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        let listener = listener.map_err(|error| {
            format!(
                "host 0 cannot listen at {host}:{port}: {error}; the rendezvous is an address of host 0, at a port that no \
                 other program uses"
            )
        })?;
        Ok(Meeting { listener })
    }

    /// The port at which it listens.
    ///
    /// # Errors
    /// The system's.
    pub fn port(&self) -> std::io::Result<u16> {
        Ok(self.listener.local_addr()?.port())
    }

    /// Waits until the launchers of all hosts have connected, for `limit` at most. `own` introduces host 0; `note` gets lines
    /// for the user.
    ///
    /// # Errors
    /// The hosts that have not come.
    pub fn gather(
        self,
        own: Introduction,
        secret: &Secret,
        protection: Protection,
        limit: Duration,
        note: &(dyn Fn(&str) + Sync),
    ) -> Result<Met, String> {
        let inbox = Inbox::new().map_err(|error| error.to_string())?;
        let mut address = self.listener.local_addr().map_err(|error| error.to_string())?.ip();
        let (mut links, mut infos) = (BTreeMap::new(), BTreeMap::new());
        infos.insert(0, own.info());
        let until = Instant::now() + limit;
        let mut tell = Instant::now() + TELL_EVERY;
        let mut strangers = Strangers::default();
        let (sender, authenticated) = mpsc::channel();
        let mut open = 0;
        while infos.len() < own.hosts {
            while open < AT_ONCE
                && let Ok((socket, _)) = self.listener.accept()
            {
                open += 1;
                let (sender, secret) = (sender.clone(), secret.clone());
                let run = move || {
                    // The receiver may have gone meanwhile.
                    let _ = sender.send(authenticate(socket, &secret, protection));
                };
                if std::thread::Builder::new().name("rendezvous".into()).spawn(run).is_err() {
                    open -= 1;
                }
            }
            let result = authenticated.recv_timeout(Duration::from_millis(20));
            open -= usize::from(result.is_ok());
            match result {
                Ok(Ok((connection, socket, introduction))) => {
                    let missing = |host: usize| !infos.contains_key(&host);
                    if let Some(reason) = refusal(&own, &introduction, missing) {
                        note(&format!("{} was refused: {reason}", introduction.name));
                        let _ = connection.split().0.send(&Message::Refused(reason).encode());
                        continue;
                    }
                    if let Ok(local) = socket.local_addr() {
                        address = local.ip();
                    }
                    let host = introduction.host;
                    let link =
                        Link::new(connection, socket, host, &inbox).map_err(|error| error.to_string())?;
                    links.insert(host, link);
                    infos.insert(host, introduction.info());
                }
                Ok(Err(why)) => strangers.note(&why, note),
                Err(_) => {}
            }
            let now = Instant::now();
            if now >= until {
                return Err(give_up(&waited_for(&own, &infos), limit, links.values()));
            }
            if now >= tell {
                tell = now + TELL_EVERY;
                note(&format!("waiting for {} to come to the rendezvous", waited_for(&own, &infos)));
            }
        }
        let plane = ControlPlane::new(0, infos.into_values().collect(), inbox, links);
        Ok(Met { plane, address })
    }
}

/// Tells the hosts that have come which have not; returns the same for the user.
fn give_up<'a>(missing: &str, limit: Duration, links: impl Iterator<Item = &'a Link>) -> String {
    let why = format!("{missing} did not come to the rendezvous within {} s", limit.as_secs());
    let told = Message::GivenUp(why.clone()).encode();
    links.for_each(|link| link.send(told.clone(), false));
    format!("{why}: is `phalanx launch` running there, with the same --nnodes, --rendezvous and secret?")
}

/// Connections that were refused; a port scan must not fill the terminal.
#[derive(Default)]
struct Strangers {
    told: Option<Instant>,
    untold: usize,
}

impl Strangers {
    fn note(&mut self, why: &str, note: &dyn Fn(&str)) {
        self.untold += 1;
        if self.told.is_some_and(|told| told.elapsed() < TELL_EVERY) {
            return;
        }
        let more = if self.untold > 1 { format!(" (and {} more)", self.untold - 1) } else { String::new() };
        note(&format!("a connection was refused: {why}{more}"));
        (self.told, self.untold) = (Some(Instant::now()), 0);
    }
}

/// The hosts that have not come yet.
fn waited_for(own: &Introduction, infos: &BTreeMap<usize, HostInfo>) -> String {
    let missing: Vec<String> = (0..own.hosts)
        .filter(|host| !infos.contains_key(host))
        .take(8)
        .map(|host| host.to_string())
        .collect();
    let more = own.hosts - infos.len() - missing.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{} {}{more}", if own.hosts - infos.len() == 1 { "host" } else { "hosts" }, missing.join(", "))
}

/// Why a host cannot be part of the job.
fn refusal(own: &Introduction, other: &Introduction, missing: impl Fn(usize) -> bool) -> Option<String> {
    let Introduction { host, hosts, ranks, .. } = other;
    if *hosts != own.hosts {
        return Some(format!(
            "it expects {hosts} hosts, and host 0 {}: give all the same --nnodes",
            own.hosts
        ));
    }
    if *host == 0 || *host >= own.hosts {
        return Some(format!("it is host {host} (--node-rank) of {}", own.hosts));
    }
    if !missing(*host) {
        return Some(format!("there is a host {host} already: give each host its own --node-rank"));
    }
    (*ranks == 0).then(|| "it runs no ranks".to_string())
}

type Authenticated = (Connection, TcpStream, Introduction);

fn authenticate(socket: TcpStream, secret: &Secret, protection: Protection) -> Result<Authenticated, String> {
    let peer = socket.peer_addr().map_err(|error| error.to_string())?;
    let from = |text: String| format!("{peer}: {text}");
    socket.set_nonblocking(false).map_err(|error| from(error.to_string()))?;
    secure::close_at_once(&socket, true);
    let own = socket.try_clone().map_err(|error| from(error.to_string()))?;
    let until = Instant::now() + secure::HANDSHAKE_TIME;
    let (connection, hello) = secure::accept(socket, secret, &IDENTITY, protection, until)
        .map_err(|error| from(error.to_string()))?;
    let introduction =
        serde_json::from_slice(&hello).map_err(|_| from("it did not introduce itself".into()))?;
    Ok((connection, own, introduction))
}

/// Connects with the launcher of host 0 at `host:port`, which may start later, within `limit`. `secret` is called for each
/// attempt: the file that holds it may be made later.
///
/// # Errors
/// When nobody listens there in time, or the peer refuses: another secret, version or protection.
pub fn connect(
    (host, port): (&str, u16),
    secret: &dyn Fn() -> Result<Option<Secret>, String>,
    own: &Introduction,
    protection: Protection,
    limit: Duration,
    note: &dyn Fn(&str),
) -> Result<Met, String> {
    let hello = serde_json::to_vec(own).map_err(|error| error.to_string())?;
    let until = Instant::now() + limit;
    let mut tell = Instant::now() + TELL_EVERY;
    let mut refused_with = None;
    loop {
        let failed = match (secret()?, resolve(host, port)) {
            (None, _) => "the secret is not there yet".to_string(),
            (_, Err(why)) => why,
            (Some(secret), Ok(addresses)) => match reach(&addresses, until) {
                Err(why) => why,
                Ok(socket) => {
                    let again = refused_with.as_ref() != Some(&secret);
                    match introduce(socket, &secret, &hello, protection) {
                        Ok((connection, socket)) => return meet(own, connection, socket),
                        Err(why) if !again => return Err(refused(host, port, &why)),
                        Err(why) => {
                            // The file may be that of an earlier job, and be replaced in a moment.
                            refused_with = Some(secret);
                            why
                        }
                    }
                }
            },
        };
        let now = Instant::now();
        if now >= until {
            return Err(format!(
                "host 0 could not be reached at {host}:{port} within {} s: {failed}; is `phalanx launch --node-rank 0` \
                 running there?",
                limit.as_secs()
            ));
        }
        if now >= tell {
            tell = now + TELL_EVERY;
            note(&format!("waiting for host 0 at {host}:{port}: {failed}"));
        }
        std::thread::sleep(if refused_with.is_some() { 5 * RETRY } else { RETRY });
    }
}

fn refused(host: &str, port: u16, why: &str) -> String {
    format!(
        "host 0 at {host}:{port} and this host do not trust each other ({why}): the secret, the version of phalanx or \
         --plaintext differs"
    )
}

fn reach(addresses: &[SocketAddr], until: Instant) -> Result<TcpStream, String> {
    let mut why = "no address".to_string();
    for address in addresses {
        // A packet that is lost in silence is answered by nobody. A time of zero is an error.
        let left = until.saturating_duration_since(Instant::now()).max(RETRY);
        match TcpStream::connect_timeout(address, left.min(Duration::from_secs(5))) {
            Ok(socket) => {
                secure::close_at_once(&socket, true);
                return Ok(socket);
            }
            Err(error) => why = error.to_string(),
        }
    }
    Err(why)
}

fn introduce(
    socket: TcpStream,
    secret: &Secret,
    hello: &[u8],
    protection: Protection,
) -> Result<(Connection, TcpStream), String> {
    let own = socket.try_clone().map_err(|error| error.to_string())?;
    let until = Instant::now() + secure::HANDSHAKE_TIME;
    let connection = secure::connect(socket, secret, &IDENTITY, hello, protection, until);
    connection.map(|connection| (connection, own)).map_err(|error| error.to_string())
}

fn meet(own: &Introduction, connection: Connection, socket: TcpStream) -> Result<Met, String> {
    let failed = |error: std::io::Error| error.to_string();
    let address = socket.local_addr().map_err(failed)?.ip();
    let inbox = Inbox::new().map_err(failed)?;
    let link = Link::new(connection, socket, 0, &inbox).map_err(failed)?;
    let plane = ControlPlane::new(own.host, Vec::new(), inbox, BTreeMap::from([(0, link)]));
    Ok(Met { plane, address })
}

fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    let found = (host, port)
        .to_socket_addrs()
        .map_err(|error| format!("the name {host} cannot be resolved: {error}"))?;
    let addresses: Vec<SocketAddr> = found.collect();
    if addresses.is_empty() { Err(format!("the name {host} has no address")) } else { Ok(addresses) }
}
