//! Signals that ask for the end: the first asks a run to finish its step and save, the second ends the program at once (ranks
//! end with their launcher). Before there is anything to save, the first does too.
//!
//! Ctrl-C, SIGTERM and SIGHUP insist when they are repeated. SIGUSR1 and SIGUSR2, by which batch systems warn, and SIGXCPU, which
//! comes every second once the limit of CPU time is passed, only ask.
//!
//! A signal that this program was started to ignore stays ignored: SIGHUP under `nohup`, SIGINT in the background
//! of a shell without job control.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use anyhow::{Context, Result};
use phalanx_tensor::refused_thread;
use rustix::event::{EventfdFlags, eventfd};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
use signal_hook::iterator::Signals as Coming;

use crate::host::output;

/// Exit code of a run that was stopped: 128 + SIGINT, as in shells.
pub const STOPPED: u8 = 130;

/// The signals that ask for the end; those before [`INSISTING`] leave at once when they are repeated.
pub const STOPS: [i32; 6] = [SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU];

/// Number of signals that leave at once when they are repeated.
const INSISTING: usize = 3;

/// Effect of the first signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum First {
    /// It ends the program: there is nothing to save, and nobody waits for this program.
    Leaves,
    /// It is noted; the launchers of other hosts are told before this one ends.
    IsPassedOn,
    /// It asks to finish the step and save.
    Saves,
}

/// The signals that have arrived at this process.
pub struct Signals {
    state: Arc<State>,
}

struct State {
    asked: AtomicU32,
    stop: AtomicBool,
    /// A [`First`].
    first: AtomicU8,
    /// Readable from the first signal on.
    wake: OwnedFd,
    /// Actions before a signal ends the program at once; each lasts as long as its owner keeps it.
    farewells: Mutex<Vec<Weak<Farewell>>>,
}

/// Something that is done before a signal ends the program at once: then nothing is dropped.
pub type Farewell = dyn Fn() + Send + Sync;

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
            first: AtomicU8::new(First::Leaves as u8),
            wake,
            farewells: Mutex::default(),
        });
        let handler = Arc::clone(&state);
        on_stop(move |signal| handler.signal(signal))?;
        Ok(Signals { state })
    }

    /// From now on, whoever waits ends this program after the first signal.
    pub fn others_are_told(&self) {
        self.state.first.store(First::IsPassedOn as u8, Ordering::Relaxed);
    }

    /// From now on, the first signal asks to finish the step.
    pub fn training_starts(&self) {
        self.state.first.store(First::Saves as u8, Ordering::Relaxed);
    }

    /// Set when the run shall end after its current step.
    pub fn stop(&self) -> &AtomicBool {
        &self.state.stop
    }

    /// Begins something that must not outlive this program, and does the farewell that `begin` returns with it before a signal ends the
    /// program at once, as long as what is returned is kept. A signal that comes meanwhile waits until the farewell is known.
    ///
    /// # Errors
    /// Those of `begin`.
    pub fn before_leaving<T, F: Fn() + Send + Sync + 'static>(
        &self,
        begin: impl FnOnce() -> Result<(T, F)>,
    ) -> Result<(T, Arc<Farewell>)> {
        let mut farewells = self.state.farewells();
        let (begun, farewell) = begin()?;
        let farewell: Arc<Farewell> = Arc::new(farewell);
        farewells.push(Arc::downgrade(&farewell));
        Ok((begun, farewell))
    }

    /// Does what SIGTERM does, on behalf of who has started this program.
    pub fn ask(&self) -> impl Fn() + Send + use<> {
        let state = Arc::clone(&self.state);
        move || state.signal(SIGTERM)
    }

    /// Returns whether a signal has arrived.
    pub fn came(&self) -> bool {
        self.state.stop.load(Ordering::Relaxed)
    }

    /// The same for another thread.
    pub fn watched(&self) -> impl Fn() -> bool + Send + use<> {
        let state = Arc::clone(&self.state);
        move || state.stop.load(Ordering::Relaxed)
    }

    /// Readable from the first signal on.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.state.wake.as_fd()
    }
}

impl State {
    fn farewells(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Farewell>>> {
        self.farewells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn signal(&self, signal: i32) {
        let again = self.asked.fetch_add(1, Ordering::Relaxed) > 0;
        let first = self.first.load(Ordering::Relaxed);
        let leaves = if again { STOPS[..INSISTING].contains(&signal) } else { first == First::Leaves as u8 };
        if leaves {
            // Held until the end, so that nothing else begins.
            let farewells = self.farewells();
            farewells.iter().filter_map(Weak::upgrade).for_each(|farewell| farewell());
            std::process::exit(STOPPED.into());
        }
        if again {
            return;
        }
        self.stop.store(true, Ordering::Relaxed);
        // A nonzero value makes it readable; the counter never overflows.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        if first == First::Saves as u8 {
            let asked = asked_by(signal).map_or(String::new(), |name| format!("{name}: "));
            output::note(&format!("\n{asked}finishing this step and saving; Ctrl-C again leaves at once"));
        }
    }
}

/// A signal that no user sends by a key, in words.
fn asked_by(signal: i32) -> Option<&'static str> {
    match signal {
        SIGUSR1 => Some("SIGUSR1"),
        SIGUSR2 => Some("SIGUSR2"),
        SIGXCPU => Some("SIGXCPU, the limit of CPU time (ulimit -t) is reached"),
        _ => None,
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
    on_stop(move |signal| {
        let first = !handler.swap(true, Ordering::Relaxed);
        // The launcher has told its user about the others. This one comes to each process by itself.
        if let Some(name) = asked_by(signal).filter(|_| first && signal == SIGXCPU) {
            output::note(&format!("{name}: all ranks finish this step and save"));
        }
    })?;
    Ok(stop)
}

/// Calls `handler`, on a separate thread, for each stop signal that was not ignored when this program was started.
fn on_stop(mut handler: impl FnMut(i32) + Send + 'static) -> Result<()> {
    let ignored = ignored_mask();
    let taken = STOPS.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
    let mut coming = Coming::new(taken).context("the handlers of signals that ask for the end")?;
    let wait = move || coming.forever().for_each(&mut handler);
    let thread = std::thread::Builder::new().name("signals".into()).spawn(wait);
    thread.map_err(|error| refused_thread("the thread that waits for signals", &error))?;
    Ok(())
}

/// The signals that this process ignores, signal n as bit n - 1 (`SigIgn` of `/proc/self/status`); 0 if unknown.
fn ignored_mask() -> u64 {
    let status = phalanx_system::host::text("/proc/self/status").unwrap_or_default();
    let mask = phalanx_system::host::after(&status, "SigIgn:");
    mask.and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0)
}
