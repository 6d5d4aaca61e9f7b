//! The side of the rank: what its process does first.

use std::ffi::CString;
use std::io::{Error, ErrorKind, Result};

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Makes this process, which is the process of `rank`, end when the process `launcher` does, and names it for `ps`.
///
/// # Errors
/// When the launcher has ended already.
pub fn begin_rank(rank: usize, launcher: i32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() != Pid::from_raw(launcher) {
        return Err(Error::new(ErrorKind::NotConnected, format!("the launcher {launcher} has ended")));
    }
    name(rank);
    Ok(())
}

/// Sets the name of this process for `top`, `ps` and the kernel's log; otherwise it would be `exe`, the name of the
/// link that started it. The system keeps 15 bytes.
fn name(rank: usize) {
    let long = format!("phalanx-rank-{rank}");
    let name = if long.len() <= 15 { long } else { format!("phalanx-{rank}") };
    // If this fails, the process only has a worse name.
    let _ = CString::new(name).map(|name| rustix::thread::set_name(&name));
}
