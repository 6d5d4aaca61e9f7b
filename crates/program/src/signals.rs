//! Ctrl-C, SIGTERM and SIGHUP: the first asks a run to finish its step and save, the second ends the
//! program at once (ranks end with their launcher). Before there is anything to save, the first does too.
//!
//! A signal that this program was started to ignore stays ignored: SIGHUP under `nohup`, SIGINT in the background
//! of a shell without job control.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use anyhow::{Context, Result};
use phalanx_tensor::refused_thread;
use rustix::event::{EventfdFlags, eventfd};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals as Coming;

use crate::output;

/// Exit code of a run that was stopped: 128 + SIGINT, as in shells.
pub const STOPPED: u8 = 130;

/// The signals that have arrived at this process.
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
    /// Installs the signal handlers. Called once per program.
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
        on_stop(move || handler.signal())?;
        Ok(Signals { state })
    }

    /// From now on, the first signal asks to finish the step.
    pub fn training_starts(&self) {
        self.state.can_save.store(true, Ordering::Relaxed);
    }

    /// Set when the run shall end after its current step.
    pub fn stop(&self) -> &AtomicBool {
        &self.state.stop
    }

    /// Does what a signal does, on behalf of who has started this program.
    pub fn ask(&self) -> impl Fn() + Send + use<> {
        let state = Arc::clone(&self.state);
        move || state.signal()
    }

    /// Whether a signal has arrived.
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
        // A nonzero value makes it readable; the counter never overflows.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        output::note("\nfinishing this step and saving; Ctrl-C again leaves at once");
    }
}

/// For a rank of a job: every signal asks to finish the step. Only the launcher leaves at once, and the ranks end with
/// it.
///
/// # Errors
/// The system's.
pub fn stop_on_signal() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let handler = Arc::clone(&stop);
    on_stop(move || handler.store(true, Ordering::Relaxed))?;
    Ok(stop)
}

/// Calls `handler`, on a separate thread, for each stop signal that was not ignored when this program was started.
fn on_stop(mut handler: impl FnMut() + Send + 'static) -> Result<()> {
    let ignored = ignored_mask();
    let taken = [SIGHUP, SIGINT, SIGTERM].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
    let mut coming = Coming::new(taken).context("the handlers of Ctrl-C, SIGTERM and SIGHUP")?;
    let wait = move || coming.forever().for_each(|_| handler());
    let thread = std::thread::Builder::new().name("signals".into()).spawn(wait);
    thread.map_err(|error| refused_thread("the thread that waits for signals", &error))?;
    Ok(())
}

/// The signals that this process ignores, signal n as bit n - 1 (`SigIgn` of `/proc/self/status`); 0 if unknown.
fn ignored_mask() -> u64 {
    let status = phalanx_host::text("/proc/self/status").unwrap_or_default();
    let mask = phalanx_host::after(&status, "SigIgn:");
    mask.and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0)
}
