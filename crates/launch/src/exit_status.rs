//! Describes how a rank's process ended when it failed.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Describes how a process ended; `None` when it succeeded. `done`: it had reported that its work is done. `killed`
/// describes an end by SIGKILL.
pub(crate) fn unexpected_end(
    status: ExitStatus,
    done: bool,
    killed: impl FnOnce() -> String,
) -> Option<String> {
    match (status.success(), done) {
        (true, true) => None,
        (true, false) => Some("ended with exit code 0 before its work was done".into()),
        (false, _) if status.signal() == Some(9) => Some(killed()),
        (false, _) => Some(death(status)),
    }
}

/// Describes a signal or exit code that ended a process.
fn death(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(7), _) => {
            "was killed by signal 7 (SIGBUS): shared memory could not be allocated; is memory full?".into()
        }
        (Some(6), _) => {
            "was ended by signal 6 (SIGABRT): an allocation failed, or a panic could not be reported; its message is above; \
             `ulimit -v` and `ulimit -d` limit memory"
                .into()
        }
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(101)) => "panicked; its message is above".into(),
        (None, code) => format!("ended with exit code {}", code.unwrap_or(-1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_leaves_in_good_order_before_its_work_is_done_has_failed() {
        let status = ExitStatus::from_raw;
        let end = |raw, done| unexpected_end(status(raw), done, || "SIGKILL".to_string());
        assert_eq!(end(0, true), None);
        assert!(end(0, false).unwrap().contains("before its work was done"));
        // A rank that dies after its work is done may have lost output.
        for (raw, words) in [(9, "SIGKILL"), (101 << 8, "panicked"), (3 << 8, "exit code 3")] {
            for done in [false, true] {
                assert!(end(raw, done).unwrap().contains(words));
            }
        }
    }
}
