//! Statistics of a group's collectives.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Sums since the last [`crate::Group::take_statistics`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Collectives completed.
    pub calls: u64,
    /// Bytes that the peers read from this rank.
    pub sent_bytes: u64,
    /// Seconds in which a caller was blocked in a wait: communication that was not overlapped. Where a card waits in the caller's
    /// place, only the time until the call was issued; the card's time is not measured.
    pub exposed_s: f64,
    /// Seconds from the start to the end of transfers, waiting for peers included.
    pub busy_s: f64,
}

impl std::ops::Add for Statistics {
    type Output = Statistics;

    fn add(self, other: Statistics) -> Statistics {
        Statistics {
            calls: self.calls + other.calls,
            sent_bytes: self.sent_bytes + other.sent_bytes,
            exposed_s: self.exposed_s + other.exposed_s,
            busy_s: self.busy_s + other.busy_s,
        }
    }
}

/// The counters behind [`Statistics`], to which threads add.
#[derive(Default)]
pub(crate) struct Tally {
    calls: AtomicU64,
    sent_bytes: AtomicU64,
    exposed_ns: AtomicU64,
    busy_ns: AtomicU64,
}

impl Tally {
    pub(crate) fn completed(&self, sent_bytes: u64, busy: Duration) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.sent_bytes.fetch_add(sent_bytes, Ordering::Relaxed);
        self.busy_ns.fetch_add(busy.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn blocked(&self, exposed: Duration) {
        self.exposed_ns.fetch_add(exposed.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn take(&self) -> Statistics {
        Statistics {
            calls: self.calls.swap(0, Ordering::Relaxed),
            sent_bytes: self.sent_bytes.swap(0, Ordering::Relaxed),
            exposed_s: self.exposed_ns.swap(0, Ordering::Relaxed) as f64 / 1e9,
            busy_s: self.busy_ns.swap(0, Ordering::Relaxed) as f64 / 1e9,
        }
    }
}
