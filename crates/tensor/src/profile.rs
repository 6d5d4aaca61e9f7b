//! Where the time of a device goes: calls, seconds, operations and bytes of each kernel.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use phalanx_trace::Rate;

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

/// What was measured of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelTime {
    /// Number of calls.
    pub calls: u64,
    /// Time of all calls.
    pub time: Duration,
    /// Time of the fastest call.
    pub min: Duration,
}

/// Times of kernels since it was made or last taken.
#[derive(Default)]
pub struct Profile {
    paused: AtomicBool,
    times: Mutex<BTreeMap<KernelKey, KernelTime>>,
}

impl Profile {
    /// From here on kernels are not timed and cost nothing more than the question; or they are again.
    pub fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    /// Whether kernels are not timed now.
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

    /// What was measured so far; starts again.
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
}
