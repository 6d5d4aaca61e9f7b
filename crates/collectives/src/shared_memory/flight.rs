//! The flight record: what a rank did last, in shared memory, so that it can be read when the rank is gone.
//!
//! A ring of [`EVENTS`] events. An event is a few words: the call sites of a program are few, so they lie in a table
//! beside the ring. The rank's threads write; the launcher reads when they have stopped, or accepts that an event which
//! is being written is not whole.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use phalanx_plan::trace::{CollectiveOp, Site};
use serde::{Deserialize, Serialize};

use crate::shared_memory::clock::now_ns;
use crate::shared_memory::descriptor::{DTYPES, Descriptor};
use crate::shared_memory::text::Text;

/// Events that a rank's record holds.
pub(crate) const EVENTS: usize = 1000;
/// Call sites that a rank's record can name.
const SITES: usize = 256;

/// One thing that a rank did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightEvent {
    /// Microseconds of the host's monotonic clock.
    pub at_us: u64,
    /// Text of the event: `step 7`, `begin all_reduce of 1024 f32 (call 3 of group data) at src/x.rs:10`, `end ...`.
    pub event: String,
}

/// The record of one rank.
#[repr(C, align(128))]
pub(crate) struct FlightRecord {
    /// Events so far.
    events: AtomicU64,
    ring: [EventCell; EVENTS],
    sites: [SiteCell; SITES],
}

#[repr(C)]
struct EventCell {
    /// Nanoseconds of the monotonic clock.
    at_ns: AtomicU64,
    /// Kind, op, type, flags, channel, site: a byte each but for the last two, which have two.
    what: AtomicU64,
    /// Elements of a call, or a step.
    count: AtomicU64,
    sequence: AtomicU32,
    /// 1 + the other end of a message.
    peer: AtomicU32,
}

#[repr(C)]
struct SiteCell {
    /// Identifies the site in the rank's own process; 0: free.
    key: AtomicU64,
    text: Text<15>,
}

const STEP: u8 = 1;
const BEGIN: u8 = 2;
const END: u8 = 3;

/// Identifies a call site in one process, by its address and line; never 0.
pub(crate) fn key(site: Site) -> u64 {
    (site.file.as_ptr().addr() as u64) << 20 ^ u64::from(site.line) | 1 << 63
}

impl FlightRecord {
    /// Notes that a step begins.
    pub(crate) fn step(&self, step: u64) {
        self.write(now_ns(), [STEP, 0, 0, 0], [0, u16::MAX], step, [0, 0]);
    }

    /// Notes that a call begins.
    pub(crate) fn begin(&self, at_ns: u64, channel: usize, d: &Descriptor, site: Site) {
        self.call(at_ns, BEGIN, channel, d, self.site(site));
    }

    /// Notes that a call has ended.
    pub(crate) fn end(&self, channel: usize, d: &Descriptor) {
        self.call(now_ns(), END, channel, d, u16::MAX);
    }

    fn call(&self, at_ns: u64, kind: u8, channel: usize, d: &Descriptor, site: u16) {
        let dtype = DTYPES.iter().position(|dtype| *dtype == d.dtype).expect("all types are listed") as u8;
        let peer = d.root.map_or(0, |root| root as u32 + 1);
        let bytes = [kind, d.op as u8, dtype, d.accumulate.into()];
        self.write(at_ns, bytes, [channel as u16, site], d.count, [d.sequence as u32, peer]);
    }

    fn write(
        &self,
        at_ns: u64,
        bytes: [u8; 4],
        [channel, site]: [u16; 2],
        count: u64,
        [sequence, peer]: [u32; 2],
    ) {
        let number = self.events.fetch_add(1, Ordering::Relaxed);
        let cell = &self.ring[number as usize % EVENTS];
        let what = u64::from(u32::from_le_bytes(bytes)) << 32 | u64::from(channel) << 16 | u64::from(site);
        cell.at_ns.store(at_ns, Ordering::Relaxed);
        cell.what.store(what, Ordering::Relaxed);
        cell.count.store(count, Ordering::Relaxed);
        cell.sequence.store(sequence, Ordering::Relaxed);
        cell.peer.store(peer, Ordering::Relaxed);
    }

    /// The place of a site in the table, which is written at its first use; `u16::MAX` when the table is full. Only this process writes.
    fn site(&self, site: Site) -> u16 {
        let key = key(site);
        let first = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize;
        for place in (0..SITES).map(|i| (first + i) % SITES) {
            let cell = &self.sites[place];
            match cell.key.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    cell.text.write(site.file, site.line);
                    return place as u16;
                }
                Err(known) if known == key => return place as u16,
                Err(_) => {}
            }
        }
        u16::MAX
    }

    /// Number of events so far.
    pub(crate) fn count(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// The events, oldest first. `group` gives the name of a channel's group.
    pub(crate) fn read(&self, group: &dyn Fn(usize) -> String) -> Vec<FlightEvent> {
        let events = self.events.load(Ordering::Acquire);
        let first = events.saturating_sub(EVENTS as u64);
        (first..events).filter_map(|number| self.event(&self.ring[number as usize % EVENTS], group)).collect()
    }

    /// None for an event that is not whole: the numbers come from the rank.
    fn event(&self, cell: &EventCell, group: &dyn Fn(usize) -> String) -> Option<FlightEvent> {
        let what = cell.what.load(Ordering::Relaxed);
        let [kind, op, dtype, accumulate] = ((what >> 32) as u32).to_le_bytes();
        let (channel, site) = ((what >> 16) as u16, what as u16);
        let count = cell.count.load(Ordering::Relaxed);
        let at_us = cell.at_ns.load(Ordering::Relaxed) / 1000;
        if kind == STEP {
            return Some(FlightEvent { at_us, event: format!("step {count}") });
        }
        let (op, dtype) = (CollectiveOp::from_number(op)?, DTYPES.get(usize::from(dtype))?);
        let verb = match kind {
            BEGIN => "begin",
            END => "end",
            _ => return None,
        };
        let peer = match (op, cell.peer.load(Ordering::Relaxed)) {
            (_, 0) => String::new(),
            (CollectiveOp::Send, peer) => format!(" to member {}", peer - 1),
            (CollectiveOp::Recv, peer) => format!(" from member {}", peer - 1),
            (_, root) => format!(" with root {}", root - 1),
        };
        let accumulate = if accumulate != 0 { ", accumulating" } else { "" };
        let site = self.sites.get(usize::from(site)).map(|cell| format!(" at {}", cell.text.read()));
        let event = format!(
            "{verb} {}{peer} of {count} {}{accumulate} (call {} of group {}){}",
            op.name(),
            dtype.name(),
            cell.sequence.load(Ordering::Relaxed),
            group(channel.into()),
            site.unwrap_or_default()
        );
        Some(FlightEvent { at_us, event })
    }
}
