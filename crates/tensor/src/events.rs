//! Moments in the streams of a device, and its failures.

use phalanx_plan::trace::{Site, Stream};

/// The end of everything that was issued to a stream up to some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamEvent {
    /// The stream.
    pub stream: Stream,
    /// Its number, as the backend counts.
    pub number: u64,
}

/// Work on the device failed. The first failure is kept: nothing runs after it, and every synchronisation returns it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{call}` at {site} failed on the {device} device: {reason}")]
pub struct DeviceError {
    /// Name of the device.
    pub device: &'static str,
    /// Name of the operation, the copy or the access by the host.
    pub call: &'static str,
    /// Call site.
    pub site: Site,
    /// Description of the failure.
    pub reason: String,
}
