//! The launchers find each other: that of host 0 listens, and the others connect to it, again and again until it does. Both
//! prove that they know the job's secret before anything else is said.

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_collectives::MAX_WORLD;
use phalanx_collectives::secure::{self, Authenticated, Connection, Guests, Identity, Protection, Secret};
use serde::{Deserialize, Serialize};

use crate::control::link::{Arrival, Inbox, Link};
use crate::control::listeners::{Listeners, resolve};
use crate::control::message::Message;
use crate::control::parting::Parting;
use crate::control::plane::{ControlPlane, HostInfo};
use crate::waiting::{named, so_far, tell_while};

/// Time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(200);

/// Number of connections in a row that host 0 has to close during the handshake before a host takes this for a refusal. Host 0
/// also closes them when it ends; and the secret's file may be that of an earlier job, and be replaced in a moment.
const REFUSALS: usize = 3;

/// Time between two lines about connections that were refused.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// Longest wait for something to happen before the caller is asked whether to go on.
const LOOK: Duration = Duration::from_millis(20);

/// Time in which a host that is refused has to hear why.
const HEARS: Duration = Duration::from_secs(5);

/// Time for those who have begun to prove themselves when all hosts have come: they are told why they are not taken.
const LATE: Duration = Duration::from_millis(500);

/// A launcher's description of its host, sent when it connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduction {
    /// The name of the host.
    pub name: String,
    /// Identifier of the machine: several hosts may be one machine.
    pub machine: String,
    /// Its number.
    pub host: usize,
    /// Number of hosts that it expects.
    pub hosts: usize,
    /// Number of ranks that it runs.
    pub ranks: usize,
    /// The build of its program. All hosts must have the same before they understand each other, so it is part of the handshake.
    #[serde(skip)]
    pub build: &'static str,
    /// The job for which it comes, as all its hosts call it; empty if the secret is that of one job alone.
    pub job: String,
    /// Its program's description of the host, for the program of host 0.
    pub about: String,
}

impl Introduction {
    fn info(&self) -> HostInfo {
        let Introduction { name, machine, host, ranks, about, .. } = self.clone();
        HostInfo { name, id: host, machine, ranks, about }
    }

    /// Identity of the connections between launchers. The job is compared after the handshake, so that an error can name it.
    fn identity(&self) -> Identity {
        Identity { build: self.build, job: [0; 16], epoch: 0, purpose: "control" }
    }
}

/// A control plane whose launchers have all met.
pub struct Met {
    /// The connections.
    pub plane: ControlPlane,
    /// The address of this host by which the others reach it.
    pub address: IpAddr,
}

/// The listening launcher of host 0.
pub struct Meeting {
    listeners: Listeners,
}

impl Meeting {
    /// Listens at `host:port`, which is this host: at all addresses of the name and at loopback, or at all addresses of this host where
    /// the name stands for loopback. Port 0 is one that the system chooses.
    ///
    /// # Errors
    /// A name that cannot be resolved, an address of another host, a port that is in use.
    pub fn listen(host: &str, port: u16) -> Result<Meeting, String> {
        Ok(Meeting { listeners: Listeners::open(host, port)? })
    }

    /// The port at which it listens.
    pub fn port(&self) -> u16 {
        self.listeners.port().unwrap_or(0)
    }

    /// Describes the addresses at which it listens.
    pub fn describe(&self) -> String {
        self.listeners.describe()
    }

    /// Waits until the launchers of all hosts have connected, for `limit` at most. `own` introduces host 0; `note` gets lines
    /// for the user; `ends` says from time to time whether to wait no longer.
    ///
    /// # Errors
    /// The hosts that have not come, what `ends` says, or a host that was asked to stop.
    pub fn gather(
        self,
        own: Introduction,
        secret: &Secret,
        protection: Protection,
        limit: Duration,
        note: &(dyn Fn(&str) + Sync),
        ends: &dyn Fn() -> Option<Parting>,
    ) -> Result<Met, Parting> {
        let missing = Mutex::new(waited_for(&own, &BTreeMap::new()));
        let describe = |waited: Duration| {
            let missing = missing.lock().unwrap_or_else(PoisonError::into_inner);
            format!("waiting for {missing} to come to the rendezvous{}", so_far(waited, limit))
        };
        tell_while(note, &describe, || {
            Gathering::new(self.listeners, own, &missing)?.run(secret, protection, limit, note, ends)
        })
    }
}

/// Hosts that come to the rendezvous.
struct Gathering<'a> {
    listeners: Listeners,
    own: Introduction,
    /// The hosts that have not come, for the lines of the wait.
    missing: &'a Mutex<String>,
    inbox: Inbox,
    /// By host.
    links: BTreeMap<usize, Link>,
    infos: BTreeMap<usize, HostInfo>,
    /// By which address of this host each came.
    came_by: BTreeMap<usize, IpAddr>,
}

impl Gathering<'_> {
    fn new(
        listeners: Listeners,
        own: Introduction,
        missing: &Mutex<String>,
    ) -> Result<Gathering<'_>, Parting> {
        let inbox = Inbox::new().map_err(|error| error.to_string())?;
        let infos = BTreeMap::from([(0, own.info())]);
        Ok(Gathering {
            listeners,
            own,
            missing,
            inbox,
            links: BTreeMap::new(),
            infos,
            came_by: BTreeMap::new(),
        })
    }

    fn run(
        mut self,
        secret: &Secret,
        protection: Protection,
        limit: Duration,
        note: &dyn Fn(&str),
        ends: &dyn Fn() -> Option<Parting>,
    ) -> Result<Met, Parting> {
        let until = Instant::now() + limit;
        let mut strangers = Strangers::default();
        let mut guests = Guests::new(secret.clone(), self.own.identity(), protection);
        while self.infos.len() < self.own.hosts {
            self.serve(&mut guests, &mut strangers, note)?;
            if let Some(parting) = self.hear(note).or_else(ends) {
                return Err(self.part(parting));
            }
            if Instant::now() >= until {
                return Err(give_up(&waited_for(&self.own, &self.infos), limit, self.links.values()).into());
            }
        }
        let late = Instant::now() + LATE;
        while guests.expects_one() && Instant::now() < late {
            self.serve(&mut guests, &mut strangers, note)?;
        }
        if let Some(why) = apart(&self.came_by, &self.infos) {
            return Err(self.part(why.into()));
        }
        let known = self.listeners.addresses.first().map_or(IpAddr::from([0, 0, 0, 0]), SocketAddr::ip);
        // What reaches this host from others also does from itself.
        let address = self.came_by.into_values().max_by_key(|address| !address.is_loopback());
        let plane = ControlPlane::new(0, self.infos.into_values().collect(), self.inbox, self.links);
        Ok(Met { plane, address: address.unwrap_or(known) })
    }

    /// Lets strangers and hosts come for a moment.
    fn serve(
        &mut self,
        guests: &mut Guests,
        strangers: &mut Strangers,
        note: &dyn Fn(&str),
    ) -> Result<(), String> {
        let left = guests.serve(&self.listeners.sockets, None, LOOK);
        for left in left.map_err(|error| error.to_string())? {
            match left {
                Ok(guest) => self.take_in(guest, note)?,
                Err((peer, why)) => strangers.note(&format!("{peer}: {why}"), note),
            }
        }
        Ok(())
    }

    /// Takes a host into the job, or tells it why not.
    fn take_in(&mut self, guest: Authenticated, note: &dyn Fn(&str)) -> Result<(), String> {
        let Ok((connection, socket, hello)) = guest.into_connection() else { return Ok(()) };
        let introduction = serde_json::from_slice::<Introduction>(&hello);
        let is_shown = |name: &str| !name.chars().any(char::is_control);
        let Some(introduction) = introduction.ok().filter(|introduction| is_shown(&introduction.name)) else {
            note("a launcher was refused: it did not introduce itself");
            return Ok(());
        };
        if let Some(reason) = refusal(&self.own, &introduction, &self.infos) {
            note(&format!("{} was refused: {reason}", introduction.name));
            tell_refused(connection, socket, reason);
            return Ok(());
        }
        let host = introduction.host;
        if let Ok(local) = socket.local_addr() {
            self.came_by.insert(host, local.ip().to_canonical());
        }
        let link = Link::new(connection, socket, host, &self.inbox).map_err(|error| error.to_string())?;
        self.links.insert(host, link);
        self.infos.insert(host, introduction.info());
        self.tell_missing();
        Ok(())
    }

    /// Takes the messages of hosts that have come; returns a request to stop. A host that has left again is waited for once more.
    fn hear(&mut self, note: &dyn Fn(&str)) -> Option<Parting> {
        let mut asked = None;
        for (host, arrival) in self.inbox.take() {
            let name = self.infos.get(&host).map_or(String::new(), |info| format!(" ({})", info.name));
            match arrival {
                Arrival::Message(Message::Stop) => {
                    asked = Some(Parting::Stopped(format!("host {host}{name} was asked to stop")));
                }
                Arrival::Closed(why) => {
                    note(&format!("host {host}{name} has left the rendezvous: {why}"));
                    self.links.remove(&host);
                    self.infos.remove(&host);
                    self.came_by.remove(&host);
                    self.tell_missing();
                }
                Arrival::Message(_) => {}
            }
        }
        asked
    }

    fn tell_missing(&self) {
        *self.missing.lock().unwrap_or_else(PoisonError::into_inner) = waited_for(&self.own, &self.infos);
    }

    /// Tells the hosts that have come why there is no job.
    fn part(&self, parting: Parting) -> Parting {
        let told = match &parting {
            Parting::Stopped(who) => Message::Stopped(who.clone()),
            other => Message::GivenUp(other.to_string()),
        };
        self.links.values().for_each(|link| link.send(told.encode(), false));
        parting
    }
}

/// Why the hosts could not reach each other although all have reached host 0: some by loopback, others by a network.
fn apart(came_by: &BTreeMap<usize, IpAddr>, infos: &BTreeMap<usize, HostInfo>) -> Option<String> {
    let (inside, outside): (Vec<_>, Vec<_>) = came_by.iter().partition(|(_, address)| address.is_loopback());
    let mut elsewhere = outside.into_iter().filter(|(host, _)| infos[*host].machine != infos[&0].machine);
    let ((here, loopback), (there, address)) = inside.first().copied().zip(elsewhere.next())?;
    Some(format!(
        "host {here} reached host 0 by {loopback} and host {there} by {address}, so they could not reach each other: give all hosts \
         the same --rendezvous, an address of host 0 that is not loopback"
    ))
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
    let missing = (1..own.hosts).filter(|host| !infos.contains_key(host)).collect::<Vec<_>>();
    named("host", &missing)
}

/// Why a host cannot be part of the job, to which those in `infos` have come.
fn refusal(own: &Introduction, other: &Introduction, infos: &BTreeMap<usize, HostInfo>) -> Option<String> {
    let Introduction { host, hosts, ranks, job, .. } = other;
    if *job != own.job {
        return Some(format!(
            "it comes for the run {job:?}, and host 0 is that of {:?}: give it the --rendezvous of its own job, or all hosts the same \
             --run",
            own.job
        ));
    }
    if *hosts != own.hosts {
        return Some(format!(
            "it expects {hosts} hosts, and host 0 {}: give all the same --nnodes",
            own.hosts
        ));
    }
    if *host == 0 || *host >= own.hosts {
        return Some(format!("it is host {host} (--node-rank) of {}", own.hosts));
    }
    if let Some(known) = infos.get(host) {
        return Some(format!(
            "there is a host {host} already ({}): give each host its own --node-rank",
            known.name
        ));
    }
    if *ranks == 0 {
        return Some("it runs no ranks".to_string());
    }
    let others: usize = infos.values().map(|info| info.ranks).sum();
    (*ranks > MAX_WORLD.saturating_sub(others))
        .then(|| format!("it runs {ranks} ranks, and the others {others}: a job has at most {MAX_WORLD}"))
}

/// Tells a host why it is refused, and waits on a thread of its own until it has heard it: bytes that nobody has read would make the
/// system discard the reason.
fn tell_refused(connection: Connection, socket: TcpStream, reason: String) {
    let tell = move || {
        let (mut sender, mut receiver) = connection.split();
        let until = Instant::now() + HEARS;
        if receiver.set_timeout(Some(HEARS)).is_err()
            || sender.send(&Message::Refused(reason).encode()).is_err()
        {
            return;
        }
        let _ = socket.shutdown(Shutdown::Write);
        while receiver.receive(secure::HANDSHAKE_MAX).is_ok() && Instant::now() < until {}
    };
    // Without a thread, it hears that its connection is closed.
    let _ = std::thread::Builder::new().name("refusal".into()).spawn(tell);
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
    note: &(dyn Fn(&str) + Sync),
) -> Result<Met, String> {
    let failed = Mutex::new("no answer yet".to_string());
    let describe = |waited: Duration| {
        let failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
        format!("waiting for host 0 at {host}:{port}: {failed}{}", so_far(waited, limit))
    };
    tell_while(note, &describe, || try_to_connect((host, port), secret, own, protection, limit, &failed))
}

/// The attempts; `failed` gets the reason of the last.
fn try_to_connect(
    (host, port): (&str, u16),
    secret: &dyn Fn() -> Result<Option<Secret>, String>,
    own: &Introduction,
    protection: Protection,
    limit: Duration,
    failed: &Mutex<String>,
) -> Result<Met, String> {
    let hello = serde_json::to_vec(own).map_err(|error| error.to_string())?;
    let until = Instant::now() + limit;
    // The secret with which the last handshakes were refused, and how many were.
    let mut refusals: (Option<Secret>, usize) = (None, 0);
    loop {
        let why = match (secret()?, resolve(host, port)) {
            (None, _) => "the secret is not there yet".to_string(),
            (_, Err(why)) => why,
            (Some(secret), Ok(addresses)) => match reach(&addresses, until) {
                Err(why) => why,
                Ok(socket) => match introduce(socket, &secret, own, &hello, protection) {
                    Ok((connection, socket)) => return meet(own, connection, socket),
                    Err(error) => {
                        if is_refusal(&error) {
                            let again = refusals.0.as_ref() == Some(&secret);
                            refusals = (Some(secret), if again { refusals.1 + 1 } else { 1 });
                        }
                        if refusals.1 >= REFUSALS {
                            return Err(refused(host, port, &error));
                        }
                        error.to_string()
                    }
                },
            },
        };
        if Instant::now() >= until {
            return Err(format!(
                "host 0 could not be reached at {host}:{port} within {} s: {why}; is `phalanx launch --node-rank 0` \
                 running there?",
                limit.as_secs()
            ));
        }
        *failed.lock().unwrap_or_else(PoisonError::into_inner) = why;
        std::thread::sleep(if refusals.1 > 0 { 5 * RETRY } else { RETRY });
    }
}

/// Returns whether host 0 refuses this host: it closes the connection. A host 0 that is busy, or flooded by strangers, answers
/// late or not.
fn is_refusal(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::PermissionDenied)
}

fn refused(host: &str, port: u16, why: &Error) -> String {
    format!(
        "host 0 at {host}:{port} and this host do not trust each other ({why}): the secret, the build of phalanx (`phalanx --version`) \
         or --plaintext differs"
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
            Err(error) => why = format!("{}: {error}", address.ip()),
        }
    }
    Err(why)
}

fn introduce(
    socket: TcpStream,
    secret: &Secret,
    own: &Introduction,
    hello: &[u8],
    protection: Protection,
) -> Result<(Connection, TcpStream), Error> {
    let copy = socket.try_clone()?;
    let until = Instant::now() + secure::HANDSHAKE_TIME;
    let connection = secure::connect(socket, secret, &own.identity(), hello, protection, until)?;
    Ok((connection, copy))
}

fn meet(own: &Introduction, connection: Connection, socket: TcpStream) -> Result<Met, String> {
    let failed = |error: std::io::Error| error.to_string();
    let address = socket.local_addr().map_err(failed)?.ip().to_canonical();
    let inbox = Inbox::new().map_err(failed)?;
    let link = Link::new(connection, socket, 0, &inbox).map_err(failed)?;
    let plane = ControlPlane::new(own.host, Vec::new(), inbox, BTreeMap::from([(0, link)]));
    Ok(Met { plane, address })
}
