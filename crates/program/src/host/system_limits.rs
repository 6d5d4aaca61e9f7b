//! The limits of the shell on files (`ulimit -f`) and memory (`ulimit -d`, `ulimit -v`), named in the error that they cause.
//!
//! A write beyond the size of files raises SIGXFSZ, whose default is to end the program without a word. With a handler the
//! write fails as one to a full disk does.

use std::io::Error;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use phalanx_checkpoint::CheckpointError;
use phalanx_data::DataError;
use phalanx_train::RunError;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use signal_hook::consts::SIGXFSZ;

use phalanx_drawing::report::bytes;

/// Makes a write beyond the limit an error: once in a program, before it writes.
///
/// # Errors
/// The system's.
pub fn fail_beyond_limit() -> Result<()> {
    // The flag is not read: the failed write reports the limit.
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))
        .context("the handler of SIGXFSZ")?;
    Ok(())
}

/// The text of an error, with the limit where a file was too large or the system gave no memory.
pub fn explain(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    let caused_by = |errno: Errno| error.chain().filter_map(of_system).any(|cause| is(cause, errno));
    if caused_by(Errno::NOMEM) && !text.contains("`ulimit -d`") {
        return format!("{text}\n`ulimit -d` and `ulimit -v` limit the memory of this program: raise them");
    }
    match getrlimit(Resource::Fsize).current {
        Some(limit) if caused_by(Errno::FBIG) => {
            format!("{text}\n`ulimit -f` limits files to {limit} bytes ({}): raise it", bytes(limit))
        }
        _ => text,
    }
}

fn is(error: &Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// The system's error in a link of the chain. The errors of checkpoints, of data and of runs have it as a part of their text, and
/// not as their source.
fn of_system<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Error> {
    let of_checkpoint = |error: &'a CheckpointError| match error {
        CheckpointError::Write { cause, .. } => Some(cause),
        _ => None,
    };
    let of_data = |error: &'a DataError| match error {
        DataError::Write { cause, .. } => Some(cause),
        _ => None,
    };
    match error.downcast_ref::<RunError>() {
        Some(RunError::Checkpoint(error)) => return of_checkpoint(error),
        Some(RunError::Data(error)) => return of_data(error),
        Some(RunError::Write { cause, .. }) => return Some(cause),
        _ => {}
    }
    error
        .downcast_ref::<Error>()
        .or_else(|| error.downcast_ref().and_then(of_checkpoint))
        .or_else(|| error.downcast_ref().and_then(of_data))
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn the_cause_is_found_in_every_error_of_a_write() {
        let system = || Error::from_raw_os_error(Errno::FBIG.raw_os_error());
        let path = std::path::PathBuf::from("a");
        let checkpoint = || CheckpointError::Write { path: path.clone(), cause: system() };
        let data = || DataError::Write { path: path.clone(), cause: system() };
        let errors: [anyhow::Error; 6] = [
            system().into(),
            checkpoint().into(),
            data().into(),
            RunError::from(checkpoint()).into(),
            RunError::from(data()).into(),
            RunError::Write { path: path.clone(), cause: system() }.into(),
        ];
        for error in errors {
            let outer = Err::<(), _>(error).context("outer").unwrap_err();
            assert!(outer.chain().filter_map(of_system).any(|cause| is(cause, Errno::FBIG)), "{outer:?}");
        }
        let full = anyhow::Error::from(Error::from_raw_os_error(Errno::NOSPC.raw_os_error()));
        assert!(!full.chain().filter_map(of_system).any(|cause| is(cause, Errno::FBIG)));
    }
}
