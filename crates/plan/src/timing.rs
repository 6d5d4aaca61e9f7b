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

use serde::Serialize;

use crate::clocks::Clocks;
use crate::machine::Machine;
use crate::meetings::Meetings;
use crate::stretches::Stretch;
use crate::trace::{PhaseName, Trace};

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
    phase_times(&[trace], phase, machine)?.pop()
}

/// Times of a phase on several ranks, which wait for each other's messages, in the order of their traces.
pub fn phase_times(traces: &[&Trace], phase: PhaseName, machine: &Machine) -> Option<Vec<PhaseTime>> {
    let all = played_together(traces, phase, machine, false)?;
    Some(all.into_iter().map(Clocks::end).collect())
}

/// The pieces of work of the same ranks.
pub fn phase_stretches(traces: &[&Trace], phase: PhaseName, machine: &Machine) -> Option<Vec<Vec<Stretch>>> {
    let mut all = played_together(traces, phase, machine, true)?;
    Some(all.iter_mut().map(Clocks::take_stretches).collect())
}

/// Plays the ranks in turn, each until it waits for another. Where all wait for each other, which ranks of a checked plan do not, the first
/// goes on as if it were alone.
fn played_together(
    traces: &[&Trace],
    phase: PhaseName,
    machine: &Machine,
    keeps_stretches: bool,
) -> Option<Vec<Clocks>> {
    let mut meetings = Meetings::of(traces.iter().map(|trace| trace.rank).collect());
    let (mut all, mut phases) = (Vec::new(), Vec::new());
    for trace in traces {
        let at = trace.phases.iter().position(|p| p.name == phase)?;
        let earlier = trace.phases[..at].iter().map(|p| p.collectives().count()).sum();
        all.push(Clocks::new(trace.rank, earlier, keeps_stretches));
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
