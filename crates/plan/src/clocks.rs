//! Plays the events of a phase on the streams of one rank.
//!
//! Groups of a rank have queues of their own, but their collectives use the same links: what is issued later sends in the time that earlier
//! ones leave ([`crate::links::Busy`]).

use std::collections::HashMap;

use crate::collective_times::LinkUse;
use crate::links::Busy;
use crate::machine::Machine;
use crate::meetings::{Meeting, Meetings};
use crate::phase_time::PhaseTime;
use crate::stretches::Stretch;
use crate::trace::{Collective, CollectiveOp, Event, Phase, Rate, Stream};

/// Why a stream would be idle.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    Copies,
    Host,
    Collectives,
    Messages,
}

/// The clocks of a rank while its events are played.
#[derive(Default)]
pub(crate) struct Clocks {
    rank: usize,
    /// Number of the next event.
    pub(crate) next: usize,
    /// True if the next event is not to wait for another rank.
    pub(crate) waits_for_nobody: bool,
    /// When the queue of each group is free.
    groups: HashMap<&'static str, f64>,
    /// When the host issues the next call, and what it waited for last.
    host: (f64, Option<Cause>),
    /// When each stream has finished what was issued, in the order of [`slot`].
    free: [f64; 6],
    /// Times of recorded events, with what whoever waits for one waits for.
    events: HashMap<u32, (f64, Option<Cause>)>,
    /// For each stream: true if it waited for the host's processor last, so that an event that waits for the stream waits for the
    /// host.
    delayed_by_host: [bool; 6],
    /// Ends of the collectives of this phase, with what whoever waits for one waits for.
    collectives: Vec<(f64, Cause)>,
    /// Collectives of earlier phases.
    first_collective: usize,
    /// What collectives take of the links, by what decides it.
    uses: HashMap<UseKey, Option<LinkUse>>,
    /// When each level of links works for the rank.
    links: Vec<Busy>,
    /// Pieces of work, if they are wanted.
    stretches: Option<Vec<Stretch>>,
    time: PhaseTime,
}

/// What decides how long a collective takes: its operation, the address of its members, elements, their type's bytes, and the bytes that the
/// rank sends.
type UseKey = (CollectiveOp, usize, u64, usize, u64);

fn slot(stream: Stream) -> usize {
    stream as usize
}

fn cause(stream: Stream) -> Option<Cause> {
    match stream {
        Stream::Compute => None,
        Stream::Communication => Some(Cause::Collectives),
        Stream::Host => Some(Cause::Host),
        Stream::ToDevice | Stream::ToHost | Stream::Disk => Some(Cause::Copies),
    }
}

impl Clocks {
    /// The clocks of a rank whose earlier phases have issued so many collectives; `keeps_stretches`: each piece of work is noted.
    pub(crate) fn new(rank: usize, first_collective: usize, keeps_stretches: bool) -> Clocks {
        let stretches = keeps_stretches.then(Vec::new);
        Clocks { rank, first_collective, stretches, ..Clocks::default() }
    }

    /// The pieces of work that were noted.
    pub(crate) fn take_stretches(&mut self) -> Vec<Stretch> {
        self.stretches.take().unwrap_or_default()
    }

    /// Plays events up to the end of the phase, or to one that waits for another rank.
    pub(crate) fn play(&mut self, phase: &Phase, machine: &Machine, meetings: &mut Meetings) -> Option<()> {
        while let Some(event) = phase.events.get(self.next) {
            if !self.take(event, machine, meetings)? {
                break;
            }
            self.next += 1;
            // The thread that issues calls is the one that computes.
            if machine.computes_on_host && self.free[0] > self.host.0 {
                self.host = (self.free[0], None);
            }
        }
        Some(())
    }

    /// Plays one event; false if it waits for another rank.
    fn take(&mut self, event: &Event, machine: &Machine, meetings: &mut Meetings) -> Option<bool> {
        match event {
            Event::Kernel { name, bytes, rate: Rate::Host, .. } => {
                let seconds = machine.kernel_s(name, 0, *bytes, Rate::Host);
                self.run(Stream::Host, (name, *bytes), seconds);
                self.time.host_s += seconds;
                self.take_cores(seconds, Cause::Host, machine);
            }
            Event::Kernel { name, flops, bytes, rate, .. } => {
                let seconds = machine.kernel_s(name, *flops, *bytes, *rate);
                self.compute_from(self.host.0, self.host.1);
                self.free[0] += seconds;
                self.note(Stream::Compute, (name, *bytes), seconds);
                self.time.compute_s += seconds;
                self.time.cores_s += if machine.computes_on_host { seconds } else { 0.0 };
            }
            Event::Copy { name, from, to, bytes, stream, .. } => {
                let seconds = machine.copy_s([*from, *to], *bytes)?;
                self.copy(*stream, (name, *bytes), seconds, machine);
            }
            Event::Collective(collective) => return self.collective(collective, machine, meetings),
            Event::Wait { collective } => {
                let own = (*collective as usize).checked_sub(self.first_collective);
                let end = own.and_then(|number| self.collectives.get(number)).copied();
                let (end, cause) = end.unwrap_or((0.0, Cause::Collectives));
                self.compute_from(end, Some(cause));
            }
            Event::Record { number, stream } => {
                let delayed = self.delayed_by_host[slot(*stream)];
                let cause = if delayed { Some(Cause::Host) } else { cause(*stream) };
                self.events.insert(*number, (self.free[slot(*stream)], cause));
            }
            Event::StreamWait { number, stream } => {
                if let Some(event) = self.events.get(number).copied() {
                    self.stream_wait(slot(*stream), event);
                }
            }
            Event::HostWait { number } => {
                let event = self.events.get(number).copied();
                self.host = event.filter(|(at, _)| *at > self.host.0).unwrap_or(self.host);
            }
            Event::Alloc { .. }
            | Event::Free { .. }
            | Event::Counted { .. }
            | Event::Step { .. }
            | Event::Use { .. } => {}
        }
        Some(true)
    }

    /// Plays a collective: it begins when its inputs are there, its group's queue is free and the other played ranks have come.
    fn collective(
        &mut self,
        collective: &Collective,
        machine: &Machine,
        meetings: &mut Meetings,
    ) -> Option<bool> {
        let used = self.links_of(collective, machine)?;
        let queued = self.groups.get(collective.group).copied().unwrap_or(0.0);
        let ready = self.free[0].max(self.host.0);
        let alone = std::mem::take(&mut self.waits_for_nobody);
        let meeting = if alone { Meeting::Alone } else { meetings.of_collective(self.rank, collective) };
        let cause = match (&meeting, collective.op) {
            (Meeting::Message(_) | Meeting::None, CollectiveOp::Recv) => Cause::Messages,
            _ => Cause::Collectives,
        };
        let start = match meeting {
            Meeting::None => return Some(false),
            // It was on its way when its receive was reached.
            Meeting::Message(arrived) => {
                self.collectives.push((arrived.max(self.host.0), cause));
                return Some(true);
            }
            Meeting::Alone => ready.max(queued),
            Meeting::With(key) => match meetings.meet(key, self.rank, ready.max(queued)) {
                Some(start) => start,
                None => return Some(false),
            },
        };
        let end = self.send(&used, start, ready);
        let seconds = used.seconds();
        if collective.op == CollectiveOp::Send {
            meetings.send(self.rank, collective, end);
        }
        self.groups.insert(collective.group, end);
        let free = &mut self.free[slot(Stream::Communication)];
        *free = free.max(end);
        if let Some(stretches) = &mut self.stretches {
            let (name, group) = (collective.op.name(), collective.group);
            let bytes = collective.count * collective.dtype.bytes() as u64;
            stretches.push(Stretch { stream: Stream::Communication, group, name, bytes, start, end });
        }
        self.collectives.push((end, cause));
        self.time.collective_s += seconds;
        self.take_cores(seconds, cause, machine);
        Some(true)
    }

    /// What a collective takes of the links; `None` where the machine does not know it.
    fn links_of(&mut self, collective: &Collective, machine: &Machine) -> Option<LinkUse> {
        let Collective { op, members, count, dtype, sent_bytes, .. } = collective;
        let key = (*op, members.as_ptr().addr(), *count, dtype.bytes(), *sent_bytes);
        self.uses.entry(key).or_insert_with(|| machine.link_use(collective)).clone()
    }

    /// The end of a collective that begins at `start`. No later one begins before `now`.
    fn send(&mut self, used: &LinkUse, start: f64, now: f64) -> f64 {
        self.links.resize_with(self.links.len().max(used.levels.len()), Busy::default);
        let levels = self.links.iter_mut().zip(&used.levels);
        let ends = levels.map(|(link, seconds)| link.take(start, *seconds, now));
        ends.fold(start, f64::max) + used.steps_s
    }

    fn copy(&mut self, stream: Stream, of: (&'static str, u64), seconds: f64, machine: &Machine) {
        self.run(stream, of, seconds);
        match stream {
            Stream::ToDevice => self.time.to_device_s += seconds,
            Stream::ToHost => self.time.to_host_s += seconds,
            _ => self.time.disk_s += seconds,
        }
        if stream != Stream::Disk {
            self.take_cores(seconds, Cause::Copies, machine);
        }
    }

    /// The stream of a slot continues when an event has happened.
    fn stream_wait(&mut self, stream: usize, (at, cause): (f64, Option<Cause>)) {
        match stream {
            0 => self.compute_from(at, cause),
            _ if at > self.free[stream] => {
                self.free[stream] = at;
                self.delayed_by_host[stream] = cause == Some(Cause::Host);
            }
            _ => {}
        }
    }

    /// Work beside compute that takes its cores, where the device is the host's processor. While compute would wait for that work anyway, it
    /// loses nothing: it then waits for so much less.
    fn take_cores(&mut self, seconds: f64, cause: Cause, machine: &Machine) {
        if machine.computes_on_host {
            self.time.cores_s += seconds;
            // The work begins when the host does, not before.
            self.compute_from(self.host.0, self.host.1);
            self.compute_from(self.free[0] + seconds, Some(cause));
        }
    }

    /// Work of a stream, with its name and bytes.
    fn run(&mut self, stream: Stream, of: (&'static str, u64), seconds: f64) {
        let free = &mut self.free[slot(stream)];
        if self.host.0 > *free {
            self.delayed_by_host[slot(stream)] = self.host.1 == Some(Cause::Host);
        }
        *free = free.max(self.host.0) + seconds;
        self.note(stream, of, seconds);
    }

    /// Notes work of a stream that ends when the stream is free.
    fn note(&mut self, stream: Stream, (name, bytes): (&'static str, u64), seconds: f64) {
        if let Some(stretches) = &mut self.stretches {
            let end = self.free[slot(stream)];
            stretches.push(Stretch { stream, group: "", name, bytes, start: end - seconds, end });
        }
    }

    /// Compute continues at `at` at the earliest; the time until then was spent waiting.
    fn compute_from(&mut self, at: f64, cause: Option<Cause>) {
        let waited = at - self.free[0];
        if waited > 0.0 {
            self.free[0] = at;
            self.expose(waited, cause);
        }
    }

    fn expose(&mut self, seconds: f64, cause: Option<Cause>) {
        match cause {
            Some(Cause::Copies) => self.time.exposed_copy_s += seconds,
            Some(Cause::Host) => self.time.exposed_host_s += seconds,
            Some(Cause::Collectives) => self.time.exposed_collective_s += seconds,
            Some(Cause::Messages) => self.time.exposed_message_s += seconds,
            None => {}
        }
    }

    /// The time of the phase, when all its events have been played.
    pub(crate) fn end(mut self) -> PhaseTime {
        let copies = [Stream::ToDevice, Stream::ToHost, Stream::Disk].map(|stream| self.free[slot(stream)]);
        let copied = copies.into_iter().fold(0.0, f64::max);
        let mut ends = [
            (copied, Cause::Copies),
            (self.free[slot(Stream::Host)], Cause::Host),
            (self.free[slot(Stream::Communication)], Cause::Collectives),
        ];
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        ends.into_iter().for_each(|(at, cause)| self.compute_from(at, Some(cause)));
        self.compute_from(self.host.0, self.host.1);
        self.time.seconds = self.free[0];
        self.time
    }
}
