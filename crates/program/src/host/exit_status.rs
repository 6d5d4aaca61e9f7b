//! Meaning of the exit status of a rank's process, beyond that the rank failed.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

use phalanx_launch::Failure;

use crate::host::signals::{STOPS, Signals};

/// Exit code of a rank that cannot use the checkpoint that it is to resume from.
pub const CHECKPOINT_UNUSABLE: u8 = 3;

/// Returns whether the rank that failed could not use the checkpoint that it was to resume from.
pub fn is_of_checkpoint(failure: &Failure) -> bool {
    failure.status.and_then(|status| status.code()) == Some(CHECKPOINT_UNUSABLE.into())
}

/// Returns whether the signal that was to stop the run ended the rank before it had installed its handler.
pub fn is_interrupted(failure: &Failure, signals: &Signals) -> bool {
    let signal = failure.status.and_then(|status| status.signal());
    signals.came() && signal.is_some_and(|signal| STOPS.contains(&signal))
}

/// Describes a SIGKILL: whether memory ran out, by the count of out-of-memory kills before the ranks started and after
/// one was killed.
pub fn sigkill(before: &Option<(PathBuf, u64)>, after: &Option<(PathBuf, u64)>) -> String {
    let words = match (before, after) {
        (Some((file, before)), Some((_, after))) if after > before => format!(
            ", because memory ran out: oom_kill in {} rose from {before} to {after}; see `phalanx plan` for what needs less",
            file.display()
        ),
        (Some(_), Some((file, after))) => {
            format!(", and not because memory ran out: oom_kill in {} stays at {after}", file.display())
        }
        _ => ": out of memory? The kernel's log says so (`dmesg`)".to_string(),
    };
    format!("was killed by signal 9 (SIGKILL){words}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_of_kills_tells_whether_memory_ran_out() {
        let count = |kills| Some((PathBuf::from("/memory.events"), kills));
        assert!(sigkill(&count(3), &count(4)).contains("rose from 3 to 4"));
        assert!(sigkill(&count(3), &count(3)).contains("not because memory ran out"));
        assert!(sigkill(&None, &count(3)).contains("out of memory?"));
    }
}
