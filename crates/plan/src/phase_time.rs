//! The time of a phase on one rank, and what it is made of.

use serde::Serialize;

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
