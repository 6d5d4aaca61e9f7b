//! `Hooks`: callbacks of a launcher to its caller, which knows more about the ranks.

use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Callbacks of a launcher to its caller, which knows more about the ranks. Every method has a default.
pub trait Hooks {
    /// A descriptor that becomes readable when the ranks are to finish early. They get SIGTERM then, once.
    fn stop_event(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Describes a process that SIGKILL has ended, which the launcher did not send: "was killed by signal 9 (SIGKILL)",
    /// and the likely reason.
    fn killed(&self) -> String {
        "was killed by signal 9 (SIGKILL): out of memory? The kernel's log says so (`dmesg`)".to_string()
    }

    /// The ranks of this host that other processes have started and that are lost with those.
    fn lost_ranks(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Describes the event that a sleeping rank waits for, if the caller knows: "its standard error to be read".
    fn waits_for(&self, _rank: usize) -> Option<String> {
        None
    }

    /// Takes a line for the user about what does not end the job.
    fn note(&self, _line: &str) {}

    /// The setting that limits how long a rank may stand still, for error messages.
    fn timeout_setting(&self, timeout: Duration) -> String {
        format!("the timeout is {timeout:?}")
    }
}

/// A launcher that knows nothing more about its ranks.
impl Hooks for () {}
