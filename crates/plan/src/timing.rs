//! The time of a phase on a machine: its trace, played on the streams of a rank.
//!
//! Each stream runs its work in order, beside the others. Work starts when the host has issued it and its stream is free;
//! events order streams, and the host waits where the trace says so. A call takes what the machine's rates allow at least,
//! and issuing takes no time. Where compute waits, the trace says for what: copies between memories, or collectives.
//!
//! If the device is the host's processor ([`Machine::computes_on_host`]), a call computes before the next one is issued. Copies,
//! operations of the host and collectives then run on the cores that compute: kernels lose their time. Transfers of the disk take
//! no cores.
//!
//! Each group of ranks has a queue of its own for its collectives, as communicators have. Several ranks may be played together, one of each
//! pipeline stage ([`phase_times`]): a message then arrives when its sender has sent it, and a collective of several of them begins when the
//! last has come ([`crate::meetings`]). A received message takes no queue: its receive was posted ahead.

use std::collections::HashMap;

use crate::trace::{Collective, CollectiveOp, Event, Phase, PhaseName, Rate, Stream, Trace};
use serde::Serialize;

use crate::machine::Machine;
use crate::meetings::{Meeting, Meetings};

/// The planned time of a phase on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PhaseTime {
    /// Seconds from the first call to the end of the last.
    pub seconds: f64,
    /// Seconds of all kernels.
    pub compute_s: f64,
    /// Seconds in which compute waited for copies between memories, at its end included.
    pub exposed_copy_s: f64,
    /// Seconds in which compute waited for operations of the host's processor, such as updates.
    pub exposed_host_s: f64,
    /// Seconds in which compute waited for collectives.
    pub exposed_collective_s: f64,
    /// Seconds in which compute waited for messages of other pipeline stages: the bubble.
    pub exposed_message_s: f64,
    /// Seconds of all copies from the host to the device.
    pub to_device_s: f64,
    /// Seconds of all copies from the device to the host.
    pub to_host_s: f64,
    /// Seconds of all transfers of the disk.
    pub disk_s: f64,
    /// Seconds of all operations of the host's processor.
    pub host_s: f64,
    /// Seconds of all collectives.
    pub collective_s: f64,
    /// Seconds of everything that the cores of the host do one after another, where the device is the host's processor; else 0.
    pub cores_s: f64,
}

impl PhaseTime {
    /// The shortest possible time if nothing waited: that of the busiest stream.
    pub fn floor_s(&self) -> f64 {
        self.streams().into_iter().map(|(seconds, _)| seconds).fold(0.0, f64::max)
    }

    /// The stream that gives the floor.
    pub fn limit(&self) -> &'static str {
        let longest = |a: (f64, &'static str), b: (f64, &'static str)| if b.0 > a.0 { b } else { a };
        self.streams().into_iter().reduce(longest).map_or("compute", |(_, name)| name)
    }

    fn streams(&self) -> [(f64, &'static str); 7] {
        [
            (self.compute_s, "compute"),
            (self.to_device_s, "copies to the device"),
            (self.to_host_s, "copies to the host"),
            (self.disk_s, "the disk"),
            (self.host_s, "the host's processor"),
            (self.collective_s, "collectives"),
            (self.cores_s, "the cores that compute and communicate"),
        ]
    }
}

/// Plays a phase of a trace. `None` if there is no such phase, or if it uses a disk or a transport whose rate the machine
/// does not have.
pub fn phase_time(trace: &Trace, phase: PhaseName, machine: &Machine) -> Option<PhaseTime> {
    played(trace, phase, machine).map(|clocks| clocks.end())
}

/// When each stream works, in seconds from the first call: for each of [`LANES`], stretches without a gap, ascending.
pub type Lanes = [Vec<(f64, f64)>; 6];

/// The streams of [`Lanes`], in order.
pub const LANES: [Stream; 6] =
    [Stream::Compute, Stream::Communication, Stream::ToDevice, Stream::ToHost, Stream::Disk, Stream::Host];

/// Spans of a phase in which each stream works, on a machine.
pub fn phase_lanes(trace: &Trace, phase: PhaseName, machine: &Machine) -> Option<Lanes> {
    played(trace, phase, machine).map(|clocks| clocks.lanes)
}

/// Times of a phase on several ranks, which wait for each other's messages, in the order of their traces.
pub fn phase_times(traces: &[&Trace], phase: PhaseName, machine: &Machine) -> Option<Vec<PhaseTime>> {
    let all = played_together(traces, phase, machine)?;
    Some(all.into_iter().map(Clocks::end).collect())
}

fn played(trace: &Trace, phase: PhaseName, machine: &Machine) -> Option<Clocks> {
    played_together(&[trace], phase, machine)?.pop()
}

/// Plays the ranks in turn, each until it waits for another. Where all wait for each other, which ranks of a checked plan do not, the first
/// goes on as if it were alone.
fn played_together(traces: &[&Trace], phase: PhaseName, machine: &Machine) -> Option<Vec<Clocks>> {
    let mut meetings = Meetings::of(traces.iter().map(|trace| trace.rank).collect());
    let (mut all, mut phases) = (Vec::new(), Vec::new());
    for trace in traces {
        let at = trace.phases.iter().position(|p| p.name == phase)?;
        let earlier = trace.phases[..at].iter().map(|p| p.collectives().count()).sum();
        all.push(Clocks { rank: trace.rank, first_collective: earlier, ..Clocks::default() });
        phases.push(&trace.phases[at]);
    }
    loop {
        let mut went_on = false;
        for (clocks, phase) in all.iter_mut().zip(&phases) {
            let before = clocks.next;
            clocks.play(phase, machine, &mut meetings)?;
            went_on |= clocks.next > before;
        }
        let Some(waiting) = (0..all.len()).find(|rank| all[*rank].next < phases[*rank].events.len()) else {
            return Some(all);
        };
        if !went_on {
            all[waiting].waits_for_nobody = true;
        }
    }
}

/// Adds a stretch of work behind those of a lane; it continues the last one if that ends no more than `gap` seconds before.
pub fn add_to_lane(lane: &mut Vec<(f64, f64)>, (start, end): (f64, f64), gap: f64) {
    match lane.last_mut() {
        Some(last) if start <= last.1 + gap => last.1 = last.1.max(end),
        _ => lane.push((start, end)),
    }
}

/// Why a stream would be idle.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    Copies,
    Host,
    Collectives,
    Messages,
}

#[derive(Default)]
struct Clocks {
    rank: usize,
    /// Number of the next event.
    next: usize,
    /// True if the next event is not to wait for another rank.
    waits_for_nobody: bool,
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
    lanes: Lanes,
    time: PhaseTime,
}

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
    /// Plays events up to the end of the phase, or to one that waits for another rank.
    fn play(&mut self, phase: &Phase, machine: &Machine, meetings: &mut Meetings) -> Option<()> {
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
                self.run(Stream::Host, seconds);
                self.time.host_s += seconds;
                self.take_cores(seconds, Cause::Host, machine);
            }
            Event::Kernel { name, flops, bytes, rate, .. } => {
                let seconds = machine.kernel_s(name, *flops, *bytes, *rate);
                self.compute_from(self.host.0, self.host.1);
                self.free[0] += seconds;
                self.note(Stream::Compute, seconds);
                self.time.compute_s += seconds;
                self.time.cores_s += if machine.computes_on_host { seconds } else { 0.0 };
            }
            Event::Copy { from, to, bytes, stream, .. } => {
                let seconds = machine.copy_s([*from, *to], *bytes)?;
                self.copy(*stream, seconds, machine);
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
        let seconds = machine.collective_s(collective)?;
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
        let end = start + seconds;
        if collective.op == CollectiveOp::Send {
            meetings.send(self.rank, collective, end);
        }
        self.groups.insert(collective.group, end);
        let free = &mut self.free[slot(Stream::Communication)];
        *free = free.max(end);
        add_to_lane(&mut self.lanes[slot(Stream::Communication)], (start, end), 0.0);
        self.collectives.push((end, cause));
        self.time.collective_s += seconds;
        self.take_cores(seconds, cause, machine);
        Some(true)
    }

    fn copy(&mut self, stream: Stream, seconds: f64, machine: &Machine) {
        self.run(stream, seconds);
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

    /// Work of a stream; returns its end.
    fn run(&mut self, stream: Stream, seconds: f64) -> f64 {
        let free = &mut self.free[slot(stream)];
        if self.host.0 > *free {
            self.delayed_by_host[slot(stream)] = self.host.1 == Some(Cause::Host);
        }
        *free = free.max(self.host.0) + seconds;
        self.note(stream, seconds);
        self.free[slot(stream)]
    }

    /// Notes work of a stream that ends when the stream is free.
    fn note(&mut self, stream: Stream, seconds: f64) {
        let end = self.free[slot(stream)];
        add_to_lane(&mut self.lanes[slot(stream)], (end - seconds, end), 0.0);
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

    fn end(mut self) -> PhaseTime {
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

#[cfg(test)]
mod tests {
    use crate::trace::{Memory, Rate};

    use super::*;
    use crate::transfer::TransferRate;

    /// A second for 10^9 bytes of a kernel, of a copy, and 2 s on disk.
    fn machine() -> Machine {
        let rate = |gb_per_s| TransferRate::Line { latency_us: 0.0, gb_per_s };
        let rates = serde_json::json!({
            "name": "test", "memory_bytes": 1, "host_bytes": 1, "memory_gb_per_s": 1.0, "host_gb_per_s": 0.25,
            "copy": rate(1.0), "disk_read": rate(0.5), "tflops": {},
        });
        serde_json::from_value(rates).unwrap()
    }

    const GB: u64 = 1_000_000_000;

    fn kernel(gb: u64) -> Event {
        Event::Kernel { name: "k", flops: 0, bytes: gb * GB, rate: Rate::Bandwidth, again: false }
    }

    fn copy(from: Memory, to: Memory, gb: u64, stream: Stream) -> Event {
        Event::Copy { name: "c", from, to, bytes: gb * GB, rate: Rate::of_copy([from, to]), stream }
    }

    fn time(events: Vec<Event>) -> Option<PhaseTime> {
        time_on(events, &machine())
    }

    fn time_on(events: Vec<Event>, machine: &Machine) -> Option<PhaseTime> {
        let phases = vec![Phase { name: PhaseName::Step, events }];
        phase_time(&Trace { rank: 0, phases, faults: Vec::new() }, PhaseName::Step, machine)
    }

    #[test]
    fn a_copy_runs_beside_kernels_and_is_waited_for_where_they_need_it() {
        let stream = Stream::ToDevice;
        let events = vec![
            copy(Memory::Host, Memory::Device, 5, stream),
            Event::Record { number: 0, stream },
            kernel(3),
            Event::StreamWait { number: 0, stream: Stream::Compute },
            kernel(1),
        ];
        let time = time(events).unwrap();
        assert_eq!(
            [time.seconds, time.compute_s, time.to_device_s, time.exposed_copy_s],
            [6.0, 4.0, 5.0, 2.0]
        );
        assert_eq!((time.floor_s(), time.limit()), (5.0, "copies to the device"));
    }

    #[test]
    fn lanes_show_when_each_stream_works() {
        let stream = Stream::ToDevice;
        let events = vec![
            copy(Memory::Host, Memory::Device, 5, stream),
            Event::Record { number: 0, stream },
            kernel(1),
            kernel(2),
            Event::StreamWait { number: 0, stream: Stream::Compute },
            kernel(1),
        ];
        let phases = vec![Phase { name: PhaseName::Step, events }];
        let trace = Trace { rank: 0, phases, faults: Vec::new() };
        let lanes = phase_lanes(&trace, PhaseName::Step, &machine()).unwrap();
        assert_eq!(lanes[slot(Stream::Compute)], [(0.0, 3.0), (5.0, 6.0)]);
        assert_eq!(lanes[slot(stream)], [(0.0, 5.0)]);
        assert!(LANES.iter().enumerate().all(|(number, stream)| slot(*stream) == number));
        assert!(lanes[slot(Stream::Disk)].is_empty());
    }

    #[test]
    fn what_the_host_waits_for_delays_all_later_calls() {
        let (disk, up) = (Stream::Disk, Stream::ToDevice);
        let events = vec![
            copy(Memory::Disk, Memory::Host, 1, disk),
            Event::Record { number: 7, stream: disk },
            kernel(1),
            Event::HostWait { number: 7 },
            copy(Memory::Host, Memory::Device, 1, up),
            kernel(1),
        ];
        let time = time(events).unwrap();
        // 2 s of the disk; then the copy and the kernel side by side.
        assert_eq!([time.seconds, time.exposed_copy_s, time.disk_s], [3.0, 1.0, 2.0]);
    }

    #[test]
    fn the_host_computes_beside_the_device() {
        let update = Event::Kernel { name: "u", flops: 0, bytes: GB, rate: Rate::Host, again: false };
        let events = vec![
            update,
            Event::Record { number: 0, stream: Stream::Host },
            kernel(3),
            Event::HostWait { number: 0 },
        ];
        let time = time(events).unwrap();
        assert_eq!([time.seconds, time.compute_s, time.host_s, time.exposed_host_s], [4.0, 3.0, 4.0, 1.0]);
        assert_eq!(time.limit(), "the host's processor");
        // A copy behind the update waits for it, and so does a kernel that needs the copy.
        let up = Stream::ToDevice;
        let update = Event::Kernel { name: "u", flops: 0, bytes: GB, rate: Rate::Host, again: false };
        let events = vec![
            update,
            Event::Record { number: 0, stream: Stream::Host },
            Event::StreamWait { number: 0, stream: up },
            copy(Memory::Host, Memory::Device, 1, up),
            Event::Record { number: 1, stream: up },
            Event::StreamWait { number: 1, stream: Stream::Compute },
            kernel(1),
        ];
        let behind = self::time(events).unwrap();
        assert_eq!([behind.seconds, behind.exposed_host_s, behind.exposed_copy_s], [6.0, 5.0, 0.0]);
    }

    /// Kernels, then an update that reads its states from disk and writes them back.
    fn update_behind_kernels() -> Vec<Event> {
        let stream = Stream::Disk;
        vec![
            kernel(3),
            copy(Memory::Disk, Memory::Device, 1, stream),
            Event::Record { number: 0, stream },
            Event::StreamWait { number: 0, stream: Stream::Compute },
            kernel(1),
            copy(Memory::Disk, Memory::Device, 1, stream),
            kernel(3),
        ]
    }

    /// A device computes what was issued while the disk reads ahead; the processor issues a read when it has computed what comes before.
    #[test]
    fn on_the_processor_a_transfer_begins_behind_the_kernels_before_it() {
        let device = time(update_behind_kernels()).unwrap();
        assert_eq!([device.seconds, device.exposed_copy_s, device.disk_s], [7.0, 0.0, 4.0]);
        let processor = Machine { computes_on_host: true, ..machine() };
        // 3 s, the read of 2 s, 1 s, and the second read beside the last 3 s.
        let time = time_on(update_behind_kernels(), &processor).unwrap();
        assert_eq!([time.seconds, time.compute_s, time.exposed_copy_s], [9.0, 7.0, 2.0]);
        assert_eq!((time.floor_s(), time.cores_s, device.cores_s), (7.0, 7.0, 0.0));
    }

    /// Copies between memories, updates of the host and collectives run on the cores that compute.
    #[test]
    fn on_the_processor_other_work_takes_the_time_of_kernels() {
        let processor = Machine { computes_on_host: true, ..machine() };
        let (up, host) = (Stream::ToDevice, Stream::Host);
        let update = Event::Kernel { name: "u", flops: 0, bytes: GB, rate: Rate::Host, again: false };
        let events = vec![
            copy(Memory::Host, Memory::Device, 2, up),
            Event::Record { number: 0, stream: up },
            update,
            Event::Record { number: 1, stream: host },
            kernel(5),
            Event::StreamWait { number: 0, stream: Stream::Compute },
            Event::HostWait { number: 1 },
            kernel(1),
        ];
        // A device of its own does 4 s of the update and 2 s of the copy beside the kernels.
        assert_eq!(time(events.clone()).unwrap().seconds, 6.0);
        let shared = time_on(events, &processor).unwrap();
        assert_eq!([shared.seconds, shared.compute_s, shared.cores_s], [12.0, 6.0, 12.0]);
        assert_eq!([shared.exposed_copy_s, shared.exposed_host_s], [2.0, 4.0]);
        assert_eq!(shared.limit(), "the cores that compute and communicate");
        // What compute waits for anyway is not counted twice.
        let waited = vec![
            copy(Memory::Host, Memory::Device, 2, up),
            Event::Record { number: 0, stream: up },
            Event::StreamWait { number: 0, stream: Stream::Compute },
            kernel(1),
        ];
        let waited = time_on(waited, &processor).unwrap();
        assert_eq!([waited.seconds, waited.exposed_copy_s], [3.0, 2.0]);
    }

    #[test]
    fn copies_behind_the_last_kernel_are_exposed_and_unknown_rates_give_no_time() {
        let down = |gb| copy(Memory::Device, Memory::Host, gb, Stream::ToHost);
        let ended = time(vec![kernel(1), down(3)]).unwrap();
        assert_eq!([ended.seconds, ended.exposed_copy_s], [3.0, 2.0]);
        assert_eq!(time(vec![copy(Memory::Host, Memory::Disk, 1, Stream::Disk)]), None);
    }
}
