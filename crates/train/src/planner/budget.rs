//! Why no placement of chunks fits a budget, and the smallest budget that would do.

use phalanx_plan::MemoryError;

use crate::config::AutoPlacement;

/// Plans until budgets do.
const TRIES: usize = 6;

/// A budget is too small for any placement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BudgetError {
    /// Device memory.
    #[error(
        "memory.placement = \"auto\": rank {rank} needs at least {min_bytes} bytes of device memory, with as much as possible \
         elsewhere, and its budget has {usable_bytes} ({budget_bytes} less a headroom of {headroom_percent}%); the smallest that \
         would do is memory.device_budget_mb = {}{}",
        mebibytes(*smallest_bytes),
        beside("memory.host_budget_mb", *other_bytes)
    )]
    Device {
        /// The rank.
        rank: usize,
        /// The smallest peak of all placements.
        min_bytes: u64,
        /// The budget.
        budget_bytes: u64,
        /// Bytes of the budget without the headroom.
        usable_bytes: u64,
        /// The headroom.
        headroom_percent: u64,
        /// The smallest budget that would do.
        smallest_bytes: u64,
        /// The budget of host memory that it needs beside it, if the given one does not do.
        other_bytes: Option<u64>,
    },
    /// Host memory, without a disk below.
    #[error(
        "memory.placement = \"auto\": rank {rank} needs {needed_bytes} bytes of host memory for what does not fit its device, and \
         its budget has {budget_bytes}; {}{}",
        host_advice(*smallest_bytes, *has_disk),
        beside("memory.device_budget_mb", *other_bytes)
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
        /// The budget of device memory that it needs beside it, if the given one does not do.
        other_bytes: Option<u64>,
        /// True if a disk was given.
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

    /// The error with budgets that do: those that it names are tried by `plan`, and raised by what it refuses. `given` are the budgets
    /// that were refused.
    pub(crate) fn with_budgets_that_do(
        mut self,
        given: AutoPlacement,
        plan: impl Fn(AutoPlacement) -> Result<(), BudgetError>,
    ) -> BudgetError {
        let (mut raised, mut refusal) = (given, Some(self.clone()));
        for _ in 0..TRIES {
            match refusal {
                None => break,
                Some(BudgetError::Device { smallest_bytes, .. }) => {
                    raised.device_bytes = as_written(smallest_bytes)
                }
                Some(BudgetError::Host { smallest_bytes, .. }) => {
                    raised.host_bytes = Some(as_written(smallest_bytes))
                }
                Some(error @ BudgetError::Memory(_)) => return error,
            }
            refusal = plan(raised).err();
        }
        let changed = |now: Option<u64>, before: Option<u64>| now.filter(|_| now != before);
        let device = changed(Some(raised.device_bytes), Some(given.device_bytes));
        let host = changed(raised.host_bytes, given.host_bytes);
        match &mut self {
            BudgetError::Device { smallest_bytes, other_bytes, .. } => {
                (*smallest_bytes, *other_bytes) = (device.unwrap_or(*smallest_bytes), host);
            }
            BudgetError::Host { smallest_bytes, other_bytes, .. } => {
                (*smallest_bytes, *other_bytes) = (host.unwrap_or(*smallest_bytes), device);
            }
            BudgetError::Memory(_) => {}
        }
        self
    }
}

/// Bytes that a key in MiB gives, as [`mebibytes`] writes it.
fn as_written(bytes: u64) -> u64 {
    let mib: f64 = mebibytes(bytes).parse().expect("a number");
    (mib * f64::from(1 << 20)) as u64
}

/// Text about another key that must be changed as well.
fn beside(key: &str, bytes: Option<u64>) -> String {
    bytes.map_or(String::new(), |bytes| format!(", with {key} = {}", mebibytes(bytes)))
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
    fn what_is_written_covers_what_is_meant() {
        for bytes in [1, 1023, 1024, (1 << 20) - 1, 1 << 20, 123_456_789, (1 << 41) + 1] {
            let written = as_written(bytes);
            assert!((bytes..bytes + 1049).contains(&written), "{bytes}: {written}");
        }
    }

    #[test]
    fn bytes_are_rounded_up_to_a_thousandth_of_a_mebibyte() {
        assert_eq!(
            [mebibytes(1 << 20), mebibytes((1 << 20) + 1), mebibytes(3 << 19)],
            ["1.000", "1.001", "1.500"]
        );
    }
}
