//! Why no placement of chunks fits a budget, and the smallest budget that would do.

use phalanx_plan::MemoryError;

/// A budget is too small for any placement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BudgetError {
    /// Device memory.
    #[error(
        "memory.placement = \"auto\": rank {rank} needs at least {min_bytes} bytes of device memory, with as much as possible \
         elsewhere, and its budget has {usable_bytes} ({budget_bytes} less a headroom of {headroom_percent}%); the smallest that \
         would do is memory.device_budget_mb = {}",
        mebibytes(*smallest_bytes)
    )]
    Device {
        /// The rank.
        rank: usize,
        /// The smallest peak of all placements.
        min_bytes: u64,
        /// The budget.
        budget_bytes: u64,
        /// What the headroom leaves of it.
        usable_bytes: u64,
        /// The headroom.
        headroom_percent: u64,
        /// The smallest budget that would do.
        smallest_bytes: u64,
    },
    /// Host memory, without a disk below.
    #[error(
        "memory.placement = \"auto\": rank {rank} needs {needed_bytes} bytes of host memory for what does not fit its device, and \
         its budget has {budget_bytes}; {}",
        host_advice(*smallest_bytes, *has_disk)
    )]
    Host {
        /// The rank.
        rank: usize,
        /// Bytes that it needs.
        needed_bytes: u64,
        /// The budget.
        budget_bytes: u64,
        /// The smallest budget that would do.
        smallest_bytes: u64,
        /// Whether a disk was given.
        has_disk: bool,
    },
    /// The trace cannot be planned: a bug of the engine.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl BudgetError {
    /// The error of several ranks that is reported: the one with the largest budget that would do for its rank, since that
    /// does for the others; device memory first.
    pub(crate) fn weight(&self) -> (u8, u64) {
        match self {
            BudgetError::Memory(_) => (2, 0),
            BudgetError::Device { smallest_bytes, .. } => (1, *smallest_bytes),
            BudgetError::Host { smallest_bytes, .. } => (0, *smallest_bytes),
        }
    }
}

/// Bytes as a value of a key in MiB, rounded up to a thousandth.
fn mebibytes(bytes: u64) -> String {
    let thousandths = (u128::from(bytes) * 1000).div_ceil(1 << 20);
    format!("{}.{:03}", thousandths / 1000, thousandths % 1000)
}

fn host_advice(smallest_bytes: u64, has_disk: bool) -> String {
    let mib = mebibytes(smallest_bytes);
    match has_disk {
        true => {
            format!("the smallest that would do, with all else on disk, is memory.host_budget_mb = {mib}")
        }
        false => format!("set memory.nvme_path for the rest, or memory.host_budget_mb = {mib}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_rounded_up_to_a_thousandth_of_a_mebibyte() {
        assert_eq!(
            [mebibytes(1 << 20), mebibytes((1 << 20) + 1), mebibytes(3 << 19)],
            ["1.000", "1.001", "1.500"]
        );
    }
}
