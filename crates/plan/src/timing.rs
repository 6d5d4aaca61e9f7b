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

use crate::clocks::Clocks;
use crate::machine::Machine;
use crate::meetings::Meetings;
use crate::phase_time::PhaseTime;
use crate::stretches::Stretch;
use crate::trace::{PhaseName, Trace};

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
