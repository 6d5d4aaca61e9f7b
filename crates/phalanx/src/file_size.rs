//! The limit on the size of files (`ulimit -f`).
//!
//! A write beyond it raises SIGXFSZ, which by default ends the program without a message. With a handler the write
//! fails as one to a full disk does, and the error says which limit it was.

use std::io::Error;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use signal_hook::consts::SIGXFSZ;

use crate::report::bytes;

/// Makes a write beyond the limit an error. Called once per program, before the first write.
///
/// # Errors
/// The system's.
pub fn fail_beyond_limit() -> Result<()> {
    // The flag is never read, because the write returns an error.
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))
        .context("the handler of SIGXFSZ")?;
    Ok(())
}

/// The text of an error, with the limit where a file was too large.
pub fn explain(text: String) -> String {
    let too_large = Error::from(Errno::FBIG).to_string();
    match getrlimit(Resource::Fsize).current {
        Some(limit) if text.contains(&too_large) && !text.contains("`ulimit -f`") => {
            format!("{text}\n`ulimit -f` limits files to {limit} bytes ({}): raise it", bytes(limit))
        }
        _ => text,
    }
}
