//! Checks of what a run needs from the system beside memory: room on its disks, and locked memory. They run before ranks start, so that a
//! refused run has changed nothing, and a warning about slow settings is printed once for all ranks.

use anyhow::{Result, bail};
use phalanx_train::config::DeviceKind;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use crate::plans::planned::Planned;

/// Checks the folders of disk memory and the limit of locked memory. Returns notes for the user.
///
/// # Errors
/// Folders that cannot hold the disk memory of all ranks; a limit of locked memory that is too small for
/// `memory.pin_memory = true`.
pub fn check(planned: &Planned) -> Result<Vec<String>> {
    let mut notes = planned.plan.disk_notes()?;
    notes.extend(check_locked(planned)?);
    Ok(notes)
}

/// Checks that the ranks can lock their host memory, if they are to.
fn check_locked(planned: &Planned) -> Result<Option<String>> {
    // A card's driver locks what is registered with it, beyond the limit of the process.
    let copies_by_itself = planned.config.device.kind == DeviceKind::Simulated;
    let wanted = planned.plan.spec.device.pin_host;
    let needed = planned.plan.ranks.iter().map(|rank| rank.host.arena_bytes).max().unwrap_or(0);
    let limit = getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX);
    let is_exempt = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    if !wanted.unwrap_or(copies_by_itself) || needed <= limit || is_exempt {
        return Ok(None);
    }
    let text = format!(
        "host memory cannot be locked: a rank needs {needed} bytes, and its limit (RLIMIT_MEMLOCK) is {limit}; raise it with \
         `ulimit -l unlimited`, LimitMEMLOCK= of systemd or --ulimit memlock=-1 of a container"
    );
    match wanted {
        Some(_) => bail!("memory.pin_memory = true: {text}, or leave out memory.pin_memory"),
        None => Ok(Some(format!("{text}; the run goes on without"))),
    }
}
