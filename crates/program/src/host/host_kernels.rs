//! Message from the launcher of a host to that of host 0 about its processor's kernels.

use phalanx_launch::HostInfo;
use phalanx_train::config::KernelChoice;
use serde::{Deserialize, Serialize};

/// The kernels of one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostKernels {
    /// Those that its ranks would use by themselves.
    pub uses: KernelChoice,
    /// The best that its processor has.
    pub has: KernelChoice,
    /// True if its environment chose them.
    #[serde(default)]
    pub is_chosen: bool,
}

impl HostKernels {
    /// Reads the kernels from a host's description of itself.
    pub fn of(host: &HostInfo) -> Option<HostKernels> {
        serde_json::from_str(&host.about).ok()
    }

    /// The text by which a host says it.
    pub fn to_text(self) -> String {
        serde_json::to_string(&self).unwrap_or_default()
    }
}
