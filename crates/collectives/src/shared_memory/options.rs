//! Options of the groups of an endpoint.

use std::sync::Arc;
use std::time::Duration;

use phalanx_simd::Isa;

/// Options of the groups of an endpoint.
#[derive(Clone)]
pub struct Options {
    /// True if calls run beside the submitter, on a thread of the group; otherwise submitting waits.
    pub overlap: bool,
    /// The instruction set to sum and copy with, at most what the processor has. The bits are the same with all.
    pub isa: Isa,
    /// Time for which a peer may be missing before the job ends.
    pub deadline: Duration,
    /// Time for which a peer may be missing before the user is told.
    pub notice_after: Duration,
    /// Called with one line for the user when a peer is missing; does nothing by default.
    pub notice: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            overlap: true,
            isa: Isa::detect(),
            deadline: Duration::from_secs(300),
            notice_after: Duration::from_secs(10),
            notice: Arc::new(|_| ()),
        }
    }
}
