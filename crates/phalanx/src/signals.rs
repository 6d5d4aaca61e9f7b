//! Ctrl-C, SIGTERM and SIGHUP: the first asks a run to finish its step and save, the second ends the
//! program at once (ranks end with their launcher). Before there is anything to save, the first does too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, eventfd};

/// Exit code of a run that was stopped: 128 + SIGINT, as shells have it.
pub const STOPPED: u8 = 130;

/// What the signals of this process have asked for.
pub struct Signals {
    state: Arc<State>,
}

struct State {
    asked: AtomicU32,
    stop: AtomicBool,
    can_save: AtomicBool,
    /// Readable from the first signal on.
    wake: OwnedFd,
}

impl Signals {
    /// Takes the signals over: once in a program.
    ///
    /// # Errors
    /// The system's.
    pub fn take_over() -> Result<Signals> {
        let wake =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("an event descriptor")?;
        let state = Arc::new(State {
            asked: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            can_save: AtomicBool::new(false),
            wake,
        });
        let handler = Arc::clone(&state);
        ctrlc::set_handler(move || handler.signal()).context("the handler of Ctrl-C")?;
        Ok(Signals { state })
    }

    /// From here on the first signal asks to finish the step.
    pub fn training_starts(&self) {
        self.state.can_save.store(true, Ordering::Relaxed);
    }

    /// Set when the run is to end after its current step.
    pub fn stop(&self) -> &AtomicBool {
        &self.state.stop
    }

    /// Whether a signal came.
    pub fn came(&self) -> bool {
        self.state.stop.load(Ordering::Relaxed)
    }

    /// Readable from the first signal on.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.state.wake.as_fd()
    }
}

impl State {
    fn signal(&self) {
        let again = self.asked.fetch_add(1, Ordering::Relaxed) > 0;
        if again || !self.can_save.load(Ordering::Relaxed) {
            std::process::exit(STOPPED.into());
        }
        self.stop.store(true, Ordering::Relaxed);
        // Eight bytes that are not zero make it readable; it is never so full that this fails.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        eprintln!("\nfinishing this step and saving; Ctrl-C again leaves at once");
    }
}

/// In a rank of a job: every signal asks to finish the step. Leaving at once is the launcher's to do, with
/// which the ranks end.
///
/// # Errors
/// The system's.
pub fn stop_on_signal() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let handler = Arc::clone(&stop);
    ctrlc::set_handler(move || handler.store(true, Ordering::Relaxed)).context("the handler of Ctrl-C")?;
    Ok(stop)
}
