//! Standard output and standard error: everything that this program writes to them goes through this file.
//!
//! Standard output is the result of a command, so a write that fails is an error of the command, and its exit code is not 0. The result of
//! a training run is its run folder: the run reports once that its reader is gone, and goes on ([`TrainOutput`]). Standard error is for
//! people, who may have closed their terminal: a failed write to it ([`note`]) changes nothing.
//!
//! Bytes go straight to the descriptor. `std::io::Stdout` keeps text back until a line ends, and reports success
//! for a descriptor that cannot be written at all.
#![allow(clippy::disallowed_methods, reason = "the one file that may write to the standard streams")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use anyhow::Result;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;

use crate::host::colour::{self, wrapped};
use crate::host::environment;

/// Exit code of a command whose output is no longer read: 128 + SIGPIPE, as shells show it for other programs.
pub const READER_GONE: u8 = 141;

/// Text that may wait for a slow reader of a training run, in bytes: some 50,000 steps.
const MAX_WAITING: usize = 16 << 20;

/// Standard output could not be written.
#[derive(Debug, thiserror::Error)]
#[error("standard output could not be written: {0}")]
pub struct OutputError(io::Error);

impl OutputError {
    /// Returns whether the reader has closed its end (`| head`), which is no error to report.
    pub fn reader_is_gone(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Writes `text` to standard output.
///
/// # Errors
/// A closed reader, a full disk.
pub fn print(text: &str) -> Result<(), OutputError> {
    let stdout = io::stdout().lock();
    write_all(stdout.as_fd(), text.as_bytes()).map_err(OutputError)
}

/// Writes `text` and an end of line to standard output.
///
/// # Errors
/// As for [`print()`].
pub fn print_line(text: &str) -> Result<(), OutputError> {
    print(&line(text))
}

/// A line for standard output; for a terminal, it breaks between words.
fn line(text: &str) -> String {
    let text = terminal_width().map_or_else(|| text.to_string(), |width| wrapped(text, width));
    text + "\n"
}

/// Writes JSON for people and scripts to standard output.
///
/// # Errors
/// As for [`print()`].
pub fn print_json(value: &impl Serialize) -> Result<()> {
    Ok(print(&(serde_json::to_string_pretty(value)? + "\n"))?)
}

/// Writes a message to standard error; on a terminal, lines break between words. A failure is ignored: there is no other
/// place to report it, and nothing depends on it.
pub fn note(line: &str) {
    match stderr_width() {
        Some(width) => write_note(&wrapped(line, width)),
        None => write_note(line),
    }
}

/// Writes an error like [`note`], on a terminal in colour.
pub fn note_error(text: &str) {
    match stderr_width() {
        Some(width) if environment::colours() => write_note(&colour::error(&wrapped(text, width))),
        _ => note(text),
    }
}

fn write_note(line: &str) {
    let stderr = io::stderr().lock();
    let _ = write_all(stderr.as_fd(), format!("{line}\n").as_bytes());
}

/// Writes messages of the command line parser: help and version to standard output, errors to standard error.
///
/// # Errors
/// As [`print()`]; none for standard error.
pub fn print_usage(said: &clap::Error) -> Result<(), OutputError> {
    match said.print() {
        Err(error) if !said.use_stderr() => Err(OutputError(error)),
        _ => Ok(()),
    }
}

/// Width of the terminal, if standard output is one.
pub fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|width| *width > 0)
}

/// Columns of the terminal that standard error is, if it is one.
pub fn stderr_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stderr()).ok()?;
    Some(usize::from(size.ws_col)).filter(|width| *width > 0)
}

/// Returns whether a write to standard error would block because nobody reads it.
pub fn stderr_is_unread() -> bool {
    let stderr = io::stderr();
    let mut fds = [PollFd::from_borrowed_fd(stderr.as_fd(), PollFlags::OUT)];
    // An event, even an error, lets a write return.
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0)
}

fn write_all(to: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            // Another process that shares the descriptor has made it non-blocking: wait as with a blocking one.
            Err(Errno::AGAIN) => wait_writable(to)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn wait_writable(to: BorrowedFd<'_>) -> io::Result<()> {
    match poll(&mut [PollFd::from_borrowed_fd(to, PollFlags::OUT)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Standard output of a training run. The run neither ends nor waits if nobody reads it.
///
/// A thread writes, so that a blocked reader (a pager) does not delay a step. When a write fails, or more than 16 MiB
/// wait, the run reports this once on standard error and writes nothing more.
#[derive(Clone, Default)]
pub struct TrainOutput {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    text: Vec<u8>,
    /// Writing has stopped.
    gone: bool,
    /// The text is complete.
    complete: bool,
    /// Started with the first text.
    writer: Option<JoinHandle<()>>,
}

impl TrainOutput {
    /// Passes `text` to the writer.
    pub fn print(&self, text: &str) {
        self.write(text.as_bytes());
    }

    /// Passes `text` and an end of line to the writer.
    pub fn print_line(&self, text: &str) {
        self.print(&line(text));
    }

    /// Passes bytes to the writer.
    pub fn write(&self, bytes: &[u8]) {
        let mut waiting = self.shared.lock();
        if waiting.gone {
            return;
        }
        if waiting.text.len() + bytes.len() > MAX_WAITING {
            return waiting.give_up("its reader does not read");
        }
        waiting.text.extend_from_slice(bytes);
        if waiting.writer.is_none() {
            let shared = Arc::clone(&self.shared);
            let writer = Builder::new().name("output".into()).spawn(move || shared.write_until_complete());
            match writer {
                Ok(writer) => waiting.writer = Some(writer),
                Err(error) => waiting.give_up(&format!("no thread for it: {error}")),
            }
        }
        self.shared.changed.notify_one();
    }

    /// Waits until everything is written, or cannot be.
    pub fn finish(&self) {
        let writer = {
            let mut waiting = self.shared.lock();
            waiting.complete = true;
            self.shared.changed.notify_one();
            // A writer with a blocked reader is abandoned; the run has already reported this.
            waiting.writer.take().filter(|_| !waiting.gone)
        };
        if let Some(writer) = writer {
            let _ = writer.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_until_complete(&self) {
        loop {
            let idle = |waiting: &mut Waiting| waiting.text.is_empty() && !waiting.complete && !waiting.gone;
            let mut waiting =
                self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
            let text = std::mem::take(&mut waiting.text);
            if waiting.gone || text.is_empty() {
                return;
            }
            drop(waiting);
            let stdout = io::stdout().lock();
            let written = write_all(stdout.as_fd(), &text);
            if let Err(error) = written {
                return self.lock().give_up(&error.to_string());
            }
        }
    }
}

impl Waiting {
    /// Reports once that nothing more is written, and discards the waiting text.
    fn give_up(&mut self, why: &str) {
        if !self.gone {
            note(&format!(
                "standard output is gone ({why}): training goes on, and metrics.jsonl in the run folder has everything"
            ));
        }
        self.gone = true;
        self.text = Vec::new();
    }
}
