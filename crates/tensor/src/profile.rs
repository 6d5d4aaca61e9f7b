//! Profile of a device: calls, seconds, operations and bytes of each kernel.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_plan::trace::{Rate, Stream};

/// One kernel, or one kind of copy between memories, at one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelKey {
    /// As in the trace: `linear`, `attention_backward`.
    pub name: &'static str,
    /// Operations of one call (of matrix products).
    pub flops: u64,
    /// Bytes read and written at least by one call; bytes copied by a copy between memories.
    pub bytes: u64,
    /// The rate that they count against.
    pub rate: Rate,
}

/// Measured times of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelTime {
    /// Number of calls.
    pub calls: u64,
    /// Time of all calls.
    pub time: Duration,
    /// Time of the fastest call.
    pub min: Duration,
}

/// A stretch of time in which a stream ran a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The stream.
    pub stream: Stream,
    /// Name of the kernel or copy.
    pub name: &'static str,
    /// Bytes that it reads and writes at least, or copies.
    pub bytes: u64,
    /// When the call began.
    pub start: Instant,
    /// Its time.
    pub time: Duration,
}

/// Times of kernels since it was made or last taken.
#[derive(Default)]
pub struct Profile {
    paused: AtomicBool,
    times: Mutex<BTreeMap<KernelKey, KernelTime>>,
    /// Calls one by one, while they are recorded.
    spans: Mutex<Option<Vec<Span>>>,
}

impl Profile {
    /// From here on kernels are not timed and cost nothing more than the question; or they are again.
    pub fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    /// Returns whether timing is paused.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Adds one call.
    pub fn add(&self, key: KernelKey, time: Duration) {
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = times.entry(key).or_default();
        entry.min = if entry.calls == 0 { time } else { entry.min.min(time) };
        entry.calls += 1;
        entry.time += time;
    }

    /// From here on, each call is also recorded with the time at which it ran, until [`Profile::take_spans`].
    pub fn record_spans(&self) {
        *self.lock_spans() = Some(Vec::new());
    }

    /// Ends the recording of [`Profile::record_spans`] and returns it, in the order in which calls ended.
    pub fn take_spans(&self) -> Vec<Span> {
        self.lock_spans().take().unwrap_or_default()
    }

    /// Records a call on `stream` that ends now, if calls are recorded.
    pub(crate) fn add_span(&self, stream: Stream, key: &KernelKey, time: Duration) {
        if let Some(spans) = &mut *self.lock_spans() {
            let now = Instant::now();
            let (KernelKey { name, bytes, .. }, start) = (*key, now.checked_sub(time).unwrap_or(now));
            spans.push(Span { stream, name, bytes, start, time });
        }
    }

    fn lock_spans(&self) -> MutexGuard<'_, Option<Vec<Span>>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the times measured so far, and starts again.
    pub fn take(&self) -> BTreeMap<KernelKey, KernelTime> {
        std::mem::take(&mut *self.times.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_one_price_add_up() {
        let profile = Profile::default();
        let key = KernelKey { name: "linear", flops: 6, bytes: 4, rate: Rate::Bandwidth };
        let ms = Duration::from_millis;
        for (key, time) in [(key, ms(3)), (KernelKey { flops: 12, ..key }, ms(9)), (key, ms(2)), (key, ms(4))]
        {
            profile.add(key, time);
        }
        let times = profile.take();
        assert_eq!(times.len(), 2);
        assert_eq!(times[&key], KernelTime { calls: 3, time: ms(9), min: ms(2) });
        assert!(profile.take().is_empty());
    }

    #[test]
    fn calls_are_recorded_one_by_one_from_when_they_are_wanted() {
        let profile = Profile::default();
        let key = KernelKey { name: "linear", flops: 6, bytes: 4, rate: Rate::Bandwidth };
        let add = |stream, ms| profile.add_span(stream, &key, Duration::from_millis(ms));
        add(Stream::Compute, 1);
        profile.record_spans();
        add(Stream::Disk, 2);
        add(Stream::Compute, 3);
        let spans = profile.take_spans();
        assert_eq!(spans.iter().map(|span| span.stream).collect::<Vec<_>>(), [Stream::Disk, Stream::Compute]);
        assert_eq!(spans[1].time, Duration::from_millis(3));
        assert!(profile.take_spans().is_empty());
    }
}
