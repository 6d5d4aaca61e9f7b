//! All connections of a launcher to the other launchers of its job.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use phalanx_collectives::Hosts;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::control::link::{Arrival, Inbox, Link};
use crate::control::message::Message;

/// A message of another launcher, or the loss of its connection. The launcher is named by the id of its host, which may run no
/// ranks of the job: [`ControlPlane::number`].
pub enum Event {
    /// A message of the launcher of a host.
    Message(usize, Message),
    /// The connection with the launcher of a host is lost; the reason.
    Lost(usize, String),
}

/// A host of the job, as its launcher introduced it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInfo {
    /// The name of the host.
    pub name: String,
    /// The number with which it came, by which it is named everywhere. Hosts that are lost or run no ranks leave gaps; the numbers of
    /// [`Hosts`] have none.
    pub id: usize,
    /// Identifier of the machine: several hosts may be one machine.
    pub machine: String,
    /// Number of ranks that it runs.
    pub ranks: usize,
    /// Description that its program gave when the host connected.
    #[serde(default)]
    pub about: String,
}

/// The connections of a launcher to the other launchers of its job: of host 0 to all, of the others to host 0.
pub struct ControlPlane {
    own_id: usize,
    /// The hosts of the job; those that run no ranks of it are not listed.
    hosts: Vec<HostInfo>,
    inbox: Inbox,
    /// By the id of the host.
    links: BTreeMap<usize, Link>,
    /// The names of all hosts that were ever known, by id.
    names: BTreeMap<usize, String>,
    /// Messages for the launchers' program that have come and were not taken yet, by the id of the host.
    for_program: Vec<(usize, Vec<u8>)>,
    /// Events that came behind a message for the program: what that message begins asks for them.
    kept: Vec<Event>,
}

impl ControlPlane {
    pub(crate) fn new(
        own_id: usize,
        hosts: Vec<HostInfo>,
        inbox: Inbox,
        links: BTreeMap<usize, Link>,
    ) -> ControlPlane {
        let names = hosts.iter().map(|host| (host.id, host.name.clone())).collect();
        ControlPlane { own_id, hosts, inbox, links, names, for_program: Vec::new(), kept: Vec::new() }
    }

    /// The id of this launcher's host.
    pub fn own_id(&self) -> usize {
        self.own_id
    }

    /// The number of this launcher's host among those of the job.
    ///
    /// # Panics
    /// When this host runs no ranks of the job.
    pub fn own_host(&self) -> usize {
        self.number(self.own_id).expect("this host runs ranks of the job")
    }

    /// The hosts of the job, as far as this launcher knows them: host 0's knows all of them.
    pub fn hosts(&self) -> &[HostInfo] {
        &self.hosts
    }

    /// Sets the hosts of the job that runs from now on.
    pub fn set_hosts(&mut self, hosts: Vec<HostInfo>) {
        self.names.extend(hosts.iter().map(|host| (host.id, host.name.clone())));
        self.hosts = hosts;
    }

    /// Which ranks run on which host.
    pub fn ranks(&self) -> Hosts {
        Hosts::new(self.hosts.iter().map(|host| host.ranks).collect())
    }

    /// The number of the host with this id among those of the job; None if it runs no ranks of it.
    pub fn number(&self, id: usize) -> Option<usize> {
        self.hosts.iter().position(|host| host.id == id)
    }

    /// The id of the host that runs a rank of the job.
    pub(crate) fn host_of(&self, rank: usize) -> usize {
        self.hosts[self.ranks().host_of(rank)].id
    }

    /// The ids of the hosts with which this launcher is connected.
    pub fn connected(&self) -> Vec<usize> {
        self.links.keys().copied().collect()
    }

    /// The host with this id, for messages: `host 1 (node2)`.
    pub fn describe(&self, id: usize) -> String {
        match self.names.get(&id) {
            Some(name) => format!("host {id} ({name})"),
            None => format!("host {id}"),
        }
    }

    /// Readable when something has come.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.inbox.wake()
    }

    /// The messages for the program that have come, by the id of the host.
    pub(crate) fn take_for_program(&mut self) -> Vec<(usize, Vec<u8>)> {
        std::mem::take(&mut self.for_program)
    }

    /// Takes all events that have come, but for messages for the program. Host 0 passes on those that concern the others.
    pub fn events(&mut self) -> Vec<Event> {
        self.arrived(false)
    }

    /// The same for who waits for a message for the program: what a host has sent behind one is left to the next who asks.
    pub(crate) fn events_before_program(&mut self) -> Vec<Event> {
        self.arrived(true)
    }

    /// Who asks to stop, of the users of other launchers, while nobody waits for anything else.
    pub fn stop_asked(&mut self) -> Option<String> {
        let mut asked = None;
        for event in self.events_before_program() {
            match event {
                Event::Message(host, Message::Stop) => {
                    asked = Some(format!("{} was asked to stop", self.describe(host)))
                }
                other => self.kept.push(other),
            }
        }
        asked
    }

    /// Closes all connections, when what waits to be sent is on its way.
    pub fn close(&mut self) {
        self.links.clear();
    }

    /// Returns whether all connections have ended. Their last messages may not have been taken yet.
    #[cfg(test)]
    pub(crate) fn links_have_ended(&self) -> bool {
        self.links.values().all(Link::has_ended)
    }

    /// Leaves an event to the next who asks.
    pub(crate) fn keep(&mut self, event: Event) {
        self.kept.push(event);
    }

    fn arrived(&mut self, only_before_program: bool) -> Vec<Event> {
        // What was kept behind a message for the program stays there until that is taken.
        let for_program = &self.for_program;
        let is_behind = |event: &mut Event| {
            let (Event::Message(id, _) | Event::Lost(id, _)) = event;
            only_before_program && for_program.iter().any(|(from, _)| from == id)
        };
        let mut events: Vec<Event> = self.kept.extract_if(.., |event| !is_behind(event)).collect();
        for (id, arrival) in self.inbox.take() {
            let event = match arrival {
                Arrival::Message(Message::Program(bytes)) => {
                    self.for_program.push((id, bytes));
                    continue;
                }
                Arrival::Message(message) if self.own_id == 0 => {
                    let Some(message) = self.checked(id, message) else { continue };
                    self.send_to(|other| other != id, &message);
                    Event::Message(id, message)
                }
                Arrival::Message(message) => Event::Message(id, message),
                // A host that was given up closes its side later.
                Arrival::Closed(_) if self.links.remove(&id).is_none() => continue,
                Arrival::Closed(why) => Event::Lost(id, why),
            };
            match only_before_program && self.for_program.iter().any(|(from, _)| *from == id) {
                true => self.kept.push(event),
                false => events.push(event),
            }
        }
        events
    }

    /// Returns the part of a message that a host's launcher may send to host 0, which passes it on: reports about its own host.
    /// The rest is from an earlier start of the ranks, or from no launcher.
    fn checked(&self, id: usize, message: Message) -> Option<Message> {
        let own = || Some(self.ranks().ranks(self.number(id)?));
        match message {
            Message::Activity(mut states) => {
                let own = own()?;
                states.retain(|(rank, _)| own.contains(rank));
                Some(Message::Activity(states))
            }
            Message::Failed(report) => {
                let is_known = report.rank < self.ranks().world_size() && self.number(id).is_some();
                (report.reporter == id && is_known).then_some(Message::Failed(report))
            }
            Message::RanksEnded(host, well) => {
                (host == id && self.number(id).is_some()).then_some(Message::RanksEnded(host, well))
            }
            Message::Stop => Some(Message::Stop),
            Message::Alive
            | Message::Program(_)
            | Message::Refused(_)
            | Message::GivenUp(_)
            | Message::Stopped(_) => None,
        }
    }

    /// Waits for something to come, for `limit` at most.
    pub fn wait(&self, limit: Duration) {
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Whether interrupted or timed out, the caller looks.
        let _ = poll(&mut [PollFd::from_borrowed_fd(self.inbox.wake(), PollFlags::IN)], Some(&limit));
    }

    /// Sends to all that this launcher is connected with; host 0 passes it on.
    pub fn broadcast(&self, message: &Message) {
        self.send_to(|_| true, message);
    }

    /// Sends to the launcher of the host with this id.
    pub fn send(&self, id: usize, message: &Message) {
        self.send_to(|other| other == id, message);
    }

    fn send_to(&self, to: impl Fn(usize) -> bool, message: &Message) {
        let may_be_left_out = matches!(message, Message::Activity(_));
        let bytes = message.encode();
        for (_, link) in self.links.iter().filter(|(host, _)| to(**host)) {
            link.send(bytes.clone(), may_be_left_out);
        }
    }

    /// The ids of the hosts that have not been heard for `limit`, with the time.
    pub fn silent(&self, limit: Duration) -> Vec<(usize, Duration)> {
        let silent = self.links.iter().map(|(id, link)| (*id, link.silent_for()));
        silent.filter(|(_, time)| *time >= limit).collect()
    }

    /// Closes the connection with the host with this id.
    pub fn give_up(&mut self, id: usize) {
        self.links.remove(&id);
    }
}
