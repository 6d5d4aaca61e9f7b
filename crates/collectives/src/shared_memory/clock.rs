//! The monotonic clock of the host.

/// Nanoseconds of the host's monotonic clock, the same in every process.
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The same in milliseconds.
pub(crate) fn now_ms() -> u64 {
    now_ns() / 1_000_000
}
