//! What the launcher of a host says of its processor's kernels to that of host 0.

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
    /// Whether its environment chose them.
    #[serde(default)]
    pub is_chosen: bool,
}

impl HostKernels {
    /// What a host has said of itself.
    pub fn of(host: &HostInfo) -> Option<HostKernels> {
        serde_json::from_str(&host.about).ok()
    }

    /// The text by which a host says it.
    pub fn to_text(self) -> String {
        serde_json::to_string(&self).unwrap_or_default()
    }
}
