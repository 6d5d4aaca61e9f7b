//! The driver's C interface: what `libcuda.so` exports, for one device or several that share a memory.
//!
//! One lock guards the whole driver; calls are short, except those that wait, which do the waited-for work themselves.
//! Files are by family of functions. Handles are numbers that no memory has.

mod config;
mod context;
mod events;
mod functions;
mod graphs;
mod handles;
mod host_memory;
mod launches;
mod memory;
mod modules;
mod regions;
mod status;
mod streams;
mod transfers;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::checks::Finding;
use crate::memory::DeviceMemory;
use crate::module::LoadedModule;
use crate::queues::{CaptureError, Exchange, Graph, Product, Queues, ReadyGraph, StreamId, Work};

pub use config::Config;
pub use context::*;
pub use events::*;
pub use functions::*;
pub use graphs::*;
pub use host_memory::*;
pub use launches::*;
pub use memory::*;
pub use modules::*;
pub use regions::*;
pub use status::*;
pub use streams::*;
pub use transfers::*;

use events::Event;
use handles::Handles;
use modules::Function;

/// The driver and its device.
pub struct Driver {
    config: Config,
    queues: Queues,
    is_initialized: bool,
    /// Bytes of each device's memory that are allocated.
    used: Vec<usize>,
    /// Streams that each device was given so far.
    streams_made: Vec<usize>,
    modules: Handles<LoadedModule>,
    functions: Handles<Function>,
    events: Handles<Event>,
    graphs: Handles<Graph>,
    ready_graphs: Handles<Arc<ReadyGraph>>,
    /// What the last question about the capture of each stream was answered with: handles of nodes.
    captured: HashMap<usize, Vec<usize>>,
    /// Pinned host memory: address to size.
    pinned: BTreeMap<usize, usize>,
    /// How many reports were printed.
    printed: usize,
    /// Calls that use the device so far.
    uses: u64,
}

static DRIVER: Mutex<Option<Driver>> = Mutex::new(None);

thread_local! {
    /// The current context of the thread, 0 if there is none.
    static CONTEXT: Cell<usize> = const { Cell::new(0) };
}

impl Driver {
    fn new(config: Config) -> Option<Self> {
        let memory = DeviceMemory::new(config.address_space).ok()?;
        Some(Self {
            queues: Queues::new(memory, config.seed, config.checks),
            config,
            is_initialized: false,
            used: vec![0; config.cards],
            streams_made: vec![0; config.cards],
            modules: Handles::new(0x1_0000),
            functions: Handles::new(0x2_0000_0000),
            events: Handles::new(0x3_0000_0000),
            graphs: Handles::new(0x4_0000_0000),
            ready_graphs: Handles::new(0x5_0000_0000),
            captured: HashMap::new(),
            pinned: BTreeMap::new(),
            printed: 0,
            uses: 0,
        })
    }

    /// Whether the device has failed, as the code that all calls return from then on.
    fn check(&self) -> Result<(), Status> {
        if self.config.lost_at.is_some_and(|call| self.uses >= call) {
            return Err(Status::ECC_UNCORRECTABLE);
        }
        match self.queues.failure() {
            None => Ok(()),
            Some(finding) => Err(status_of(finding)),
        }
    }

    /// The stream of a handle. 1 is the default stream under its own name.
    fn stream(&self, handle: usize) -> Result<StreamId, Status> {
        let id = if handle == 1 { 0 } else { handle as StreamId };
        if self.queues.has_stream(id) { Ok(id) } else { Err(Status::INVALID_HANDLE) }
    }

    fn in_context(&mut self, body: impl FnOnce(&mut Driver) -> Result<(), Status>) -> Result<(), Status> {
        self.card()?;
        self.uses += 1;
        self.check()?;
        body(self)?;
        self.check()
    }

    /// The number of the current context's device.
    fn card(&self) -> Result<usize, Status> {
        let card = CONTEXT.get().checked_sub(context::PRIMARY).filter(|card| *card < self.config.cards);
        card.ok_or(Status::INVALID_CONTEXT)
    }

    /// Prints reports that are new to standard error, where a test's output shows them.
    fn print_reports(&mut self) {
        #[expect(
            clippy::disallowed_methods,
            reason = "reports of a test double go where its test's output goes"
        )]
        let mut out = std::io::stderr();
        for report in &self.queues.reports.all()[self.printed..] {
            // Whoever closed standard error does not read reports.
            let _ = writeln!(out, "cuda-emulator: {report}");
        }
        self.printed = self.queues.reports.all().len();
    }
}

/// The status of a finding that ended the work of the device.
fn status_of(finding: Finding) -> Status {
    match finding {
        Finding::OutOfBounds | Finding::UseAfterFree => Status::ILLEGAL_ADDRESS,
        Finding::Misaligned => Status::MISALIGNED_ADDRESS,
        Finding::Endless => Status::LAUNCH_TIMEOUT,
        _ => Status::LAUNCH_FAILED,
    }
}

impl From<CaptureError> for Status {
    fn from(error: CaptureError) -> Self {
        match error {
            CaptureError::IllegalState => Self::ILLEGAL_STATE,
            CaptureError::Unsupported => Self::STREAM_CAPTURE_UNSUPPORTED,
            CaptureError::Merge => Self::STREAM_CAPTURE_MERGE,
            CaptureError::Unmatched => Self::STREAM_CAPTURE_UNMATCHED,
            CaptureError::Unjoined => Self::STREAM_CAPTURE_UNJOINED,
            CaptureError::Isolation => Self::STREAM_CAPTURE_ISOLATION,
            CaptureError::Invalidated => Self::STREAM_CAPTURE_INVALIDATED,
        }
    }
}

/// Runs a call under the lock, whether the driver is initialised or not.
fn call_early(body: impl FnOnce(&mut Driver) -> Result<(), Status>) -> Status {
    let mut guard = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    if guard.is_none() {
        *guard = Driver::new(Config::from_environment());
    }
    let Some(driver) = guard.as_mut() else { return Status::OUT_OF_MEMORY };
    let result = body(driver);
    driver.print_reports();
    match result {
        Ok(()) => Status::SUCCESS,
        Err(status) => status,
    }
}

/// Runs a call that needs an initialised driver.
fn call(body: impl FnOnce(&mut Driver) -> Result<(), Status>) -> Status {
    call_early(|driver| if driver.is_initialized { body(driver) } else { Err(Status::NOT_INITIALIZED) })
}

/// Runs a call that needs a current context and a device that has not failed.
fn call_in_context(body: impl FnOnce(&mut Driver) -> Result<(), Status>) -> Status {
    call(|driver| {
        let result = driver.in_context(body);
        if driver.queues.take_stuck().is_some() {
            let what =
                "the call waits for another device or for the host; here only calls that synchronise may";
            driver.queues.report(Finding::Deadlock, "a call of the driver", None, what.to_string());
        }
        result
    })
}

/// Runs such a call that waits, again and again as long as it waits for another device.
fn call_waiting(mut body: impl FnMut(&mut Driver) -> Result<(), Status>) -> Status {
    loop {
        let mut is_stuck = false;
        let status = call(|driver| {
            let result = driver.in_context(&mut body);
            is_stuck = driver.queues.take_stuck().is_some();
            result
        });
        if !is_stuck || status != Status::SUCCESS {
            return status;
        }
        std::thread::sleep(STUCK);
    }
}

/// Runs a call that copies, and waits as long as its copy waits for another device or for the host.
fn call_copying(body: impl FnOnce(&mut Driver) -> Result<(), Status>) -> Status {
    let mut stuck = None;
    let mut status = call(|driver| {
        let result = driver.in_context(body);
        stuck = driver.queues.take_stuck();
        result
    });
    while let (Status::SUCCESS, Some(stream)) = (status, stuck) {
        std::thread::sleep(STUCK);
        status = call(|driver| {
            driver.queues.synchronize(stream);
            stuck = driver.queues.take_stuck();
            driver.check()
        });
    }
    status
}

/// Time between two looks at an exchange with another device.
const STUCK: Duration = Duration::from_micros(50);

/// The number of the device whose context the thread has, if it has one.
pub(crate) fn current_card() -> Option<usize> {
    let context = CONTEXT.get();
    (context != 0).then(|| context.wrapping_sub(context::PRIMARY))
}

/// Queues an exchange of a library, like a call of the driver.
pub(crate) fn queue_exchange(stream: usize, exchange: Exchange) -> Result<(), Status> {
    let status = call_in_context(|driver| {
        let stream = driver.stream(stream)?;
        Ok(driver.queues.enqueue_exchange(stream, exchange)?)
    });
    if status == Status::SUCCESS { Ok(()) } else { Err(status) }
}

/// Takes memory of the current context's device for a connection of NCCL: how many bytes.
pub(crate) fn take_for_connection() -> Result<usize, Status> {
    let mut taken = 0;
    let status = call(|driver| {
        taken = driver.config.nccl;
        driver.take_memory(taken)
    });
    if status == Status::SUCCESS { Ok(taken) } else { Err(status) }
}

/// Gives such memory of a device back.
pub(crate) fn give_back(card: usize, bytes: usize) {
    call(|driver| {
        driver.give_memory(card, bytes);
        Ok(())
    });
}

/// The settings, for libraries.
pub(crate) fn config() -> Config {
    let mut config = Config::default();
    call_early(|driver| {
        config = driver.config;
        Ok(())
    });
    config
}

/// Whether the thread has a context.
pub(crate) fn has_context() -> bool {
    CONTEXT.get() != 0
}

/// Queues a product of a library, like a call of the driver.
pub(crate) fn queue_product(stream: usize, product: Product) -> Result<(), Status> {
    let status = call_in_context(|driver| {
        let stream = driver.stream(stream)?;
        Ok(driver.queues.enqueue(stream, Work::Product(Box::new(product)))?)
    });
    if status == Status::SUCCESS { Ok(()) } else { Err(status) }
}

/// Writes a result through a pointer of the caller.
fn put<T>(out: *mut T, value: T) -> Result<(), Status> {
    if out.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: callers of the driver's functions promise that their result pointers are valid.
    unsafe { out.write(value) };
    Ok(())
}

/// Declares functions of the driver. Each runs its body by the named way of calling.
macro_rules! entry_points {
    ($($(#[$meta:meta])* $name:ident($($arg:ident: $kind:ty),* $(,)?) $call:ident |$driver:ident| $body:block)*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// Pointers must be valid as the manual of the driver says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $kind),*) -> Status {
            $call(|$driver| $body)
        }
    )*

        /// The functions of this file with their names.
        pub(super) fn table() -> Vec<(&'static str, *const ())> {
            vec![$((stringify!($name), $name as *const ())),*]
        }
    };
}

use entry_points;
