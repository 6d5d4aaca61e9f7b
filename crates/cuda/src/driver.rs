//! The driver: loading it, its errors, and one card.
//!
//! The driver is loaded when it is first asked for, so the program starts on machines without one. Calls go to cudarc's `sys`
//! layer: its safe layer records an event for each slice that a stream uses, and its pinned memory is write-combined.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};

use crate::error::{CAPABILITY_MIN, DRIVER_MIN, Error};

/// An error of the driver, unless the call succeeded.
pub(crate) fn check(result: CUresult, call: &'static str) -> Result<(), Error> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text_of = |get: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the driver is loaded, and writes the address of a static string, or null.
        let found = unsafe { get(result, &mut text) };
        if found != CUresult::CUDA_SUCCESS || text.is_null() {
            return "unknown".to_string();
        }
        // SAFETY: a static string that ends with 0.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(Error::Driver { call, name: text_of(sys::cuGetErrorName), text: text_of(sys::cuGetErrorString) })
}

/// `driver!(cuFunction(arguments))`: calls a function of the driver and checks its result. Inside `unsafe`.
macro_rules! driver {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::driver::check(cudarc::driver::sys::$function($($argument),*), stringify!($function))
    };
}
pub(crate) use driver;

/// Loads the driver, if it is not loaded yet.
///
/// # Errors
/// [`Error::NoDriver`] and [`Error::DriverTooOld`].
pub fn load() -> Result<(), Error> {
    // SAFETY: loading the driver runs its initialisers, which any program may do.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoDriver);
    }
    // The version needs no start, which an old driver may refuse.
    let version = version()?;
    if version < DRIVER_MIN {
        return Err(Error::DriverTooOld { version });
    }
    // SAFETY: the driver is present; the call may be made at any time, by any thread.
    match unsafe { driver!(cuInit(0)) } {
        Err(Error::Driver { name, .. }) if name == "CUDA_ERROR_NO_DEVICE" => {
            Err(Error::NoCard { index: 0, count: 0 })
        }
        started => started,
    }
}

/// The driver's version: 12040 for CUDA 12.4.
pub(crate) fn version() -> Result<i32, Error> {
    let mut version = 0;
    // SAFETY: the caller has found the driver; the call may be made at any time, by any thread.
    unsafe { driver!(cuDriverGetVersion(&mut version))? };
    Ok(version)
}

/// The driver's version, if there is a driver.
pub fn known_version() -> Option<i32> {
    // SAFETY: loading the driver runs its initialisers, which any program may do.
    if unsafe { sys::is_culib_present() } { version().ok() } else { None }
}

/// Number of cards that the driver finds.
///
/// # Errors
/// Those of [`load`], and the driver's.
pub fn count_cards() -> Result<usize, Error> {
    load()?;
    let mut count = 0;
    // SAFETY: the driver is loaded and initialised.
    unsafe { driver!(cuDeviceGetCount(&mut count))? };
    Ok(count as usize)
}

/// The highest clocks of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clocks {
    /// Clock of a multiprocessor, in kHz.
    pub multiprocessor_khz: u32,
    /// Clock of memory, in kHz; two transfers a clock.
    pub memory_khz: u32,
    /// Width of memory's bus.
    pub memory_bits: u32,
}

/// Properties of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its number, from 0.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Bytes of shared memory that a block may have.
    pub shared_bytes: u32,
    /// Maximum clock rates; None if the driver does not report them.
    pub clocks: Option<Clocks>,
    pub(crate) device: c_int,
}

impl Card {
    /// Describes a card.
    ///
    /// # Errors
    /// Those of [`load`]; a card that is not there or too old; the driver's.
    pub fn open(index: usize) -> Result<Card, Error> {
        let count = count_cards()?;
        if index >= count {
            return Err(Error::NoCard { index, count: count as i32 });
        }
        let (mut device, mut name, mut memory_bytes) = (0, [0 as c_char; 256], 0usize);
        // SAFETY: the driver is initialised; each call writes what it is given, the name at most 256 bytes with its end.
        let name = unsafe {
            driver!(cuDeviceGet(&mut device, index as c_int))?;
            driver!(cuDeviceGetName(name.as_mut_ptr(), 256, device))?;
            driver!(cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
            CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
        };
        let attribute = |attribute| attribute_of(device, attribute);
        use CUdevice_attribute as Attribute;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if capability < CAPABILITY_MIN {
            return Err(Error::CardTooOld { index, name, capability });
        }
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let shared_bytes =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32;
        let memory_bytes = memory_bytes as u64;
        let clocks = clocks_of(device);
        Ok(Card { index, name, capability, multiprocessors, memory_bytes, shared_bytes, clocks, device })
    }

    /// The architecture for which its kernels are compiled, such as `sm_90`.
    pub fn architecture(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }
}

/// The cards that are new enough: at least one.
///
/// # Errors
/// No driver, no card, or only older ones.
pub fn usable_cards() -> Result<Vec<Card>, Error> {
    let count = count_cards()?;
    let opened: Vec<_> = (0..count).map(Card::open).collect();
    let mut first = Error::NoCard { index: 0, count: count as i32 };
    let mut cards = Vec::new();
    for (index, card) in opened.into_iter().enumerate() {
        match card {
            Ok(card) => cards.push(card),
            Err(error) if index == 0 => first = error,
            Err(_) => {}
        }
    }
    if cards.is_empty() { Err(first) } else { Ok(cards) }
}

fn clocks_of(device: c_int) -> Option<Clocks> {
    use CUdevice_attribute as Attribute;
    let positive =
        |attribute| u32::try_from(attribute_of(device, attribute).ok()?).ok().filter(|value| *value > 0);
    Some(Clocks {
        multiprocessor_khz: positive(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
        memory_khz: positive(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?,
        memory_bits: positive(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?,
    })
}

fn attribute_of(device: c_int, attribute: CUdevice_attribute) -> Result<i32, Error> {
    let mut value = 0;
    // SAFETY: the device is one that the driver gave.
    unsafe { driver!(cuDeviceGetAttribute(&mut value, attribute, device))? };
    Ok(value)
}

/// Counts of what devices have asked the driver to make and to launch so far. A step makes nothing once its kernels are
/// loaded.
#[derive(Debug, Default)]
pub struct Made {
    allocations: AtomicU64,
    objects: AtomicU64,
    launches: AtomicU64,
    graph_launches: AtomicU64,
    from_graphs: AtomicU64,
    waits: AtomicU64,
    follows: AtomicU64,
    host_operations: AtomicU64,
    linked_bytes: AtomicU64,
}

/// Numbers of launches on streams of kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launches {
    /// Kernels, products of the library and copies that were issued one by one.
    pub single: u64,
    /// Graphs.
    pub graphs: u64,
    /// Kernels, products of the library and copies that graphs have issued.
    pub in_graphs: u64,
}

impl Made {
    /// Allocations and registrations of memory.
    pub fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    /// Modules, streams, events and graphs.
    pub fn objects(&self) -> u64 {
        self.objects.load(Ordering::Relaxed)
    }

    /// Numbers of launches on streams of kernels.
    pub fn launches(&self) -> Launches {
        let [single, graphs, in_graphs] = [&self.launches, &self.graph_launches, &self.from_graphs]
            .map(|count| count.load(Ordering::Relaxed));
        Launches { single, graphs, in_graphs }
    }

    /// Number of times that a thread of the host was blocked until work of a card, or of the host's stream beside it,
    /// had finished.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Operations that threads of the host's streams were given.
    pub fn host_operations(&self) -> u64 {
        self.host_operations.load(Ordering::Relaxed)
    }

    pub(crate) fn count_host_operation(&self) {
        self.host_operations.fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes of cards that NCCL has taken when it connected them.
    pub fn linked_bytes(&self) -> u64 {
        self.linked_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn note_linked(&self, bytes: u64) {
        self.linked_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Number of times that the stream of kernels, instead of the host, waited for a call between cards.
    pub fn follows(&self) -> u64 {
        self.follows.load(Ordering::Relaxed)
    }

    pub(crate) fn count_follow(&self) {
        self.follows.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_launches(&self, steps: usize) {
        self.launches.fetch_add(steps as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_graph(&self, steps: usize) {
        self.graph_launches.fetch_add(1, Ordering::Relaxed);
        self.from_graphs.fetch_add(steps as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_allocation(&self) {
        self.allocations.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_object(&self) {
        self.objects.fetch_add(1, Ordering::Relaxed);
    }
}

/// Time for which a wait polls without sleeping, and its sleep between two polls after that.
const SPIN: Duration = Duration::from_millis(1);
const NAP: Duration = Duration::from_micros(50);

/// The primary context of a card, held.
pub(crate) struct Context {
    pub(crate) card: Card,
    pub(crate) made: Arc<Made>,
    context: sys::CUcontext,
    /// Why nothing may be asked of it any more: what was started may never end, and whoever waits for it, or frees its memory, waits for ever.
    stuck: OnceLock<Error>,
    /// True if running work may wait for other cards: waits of the host then check whether the context was given up.
    is_linked: AtomicBool,
}

// SAFETY: a context may be used by any thread; `enter` makes it the current one of the thread that calls.
unsafe impl Send for Context {}
// SAFETY: as above; the driver has its own locks.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn new(card: Card, made: &Arc<Made>) -> Result<Context, Error> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the device is one that the driver gave.
        unsafe { driver!(cuDevicePrimaryCtxRetain(&mut context, card.device))? };
        let context = Context {
            card,
            made: Arc::clone(made),
            context,
            stuck: OnceLock::new(),
            is_linked: AtomicBool::new(false),
        };
        context.enter()?;
        Ok(context)
    }

    /// Nothing is asked of the context from here on, and all that is of it stays until the process ends.
    pub(crate) fn give_up(&self, why: Error) {
        // The first reason counts.
        let _ = self.stuck.set(why);
    }

    /// Declares that from here on running work may wait for other cards.
    pub(crate) fn link(&self) {
        self.is_linked.store(true, Ordering::Relaxed);
    }

    /// Blocks until `query` says that something is over, or the context is given up. `wait` blocks for that alone.
    pub(crate) fn wait(
        &self,
        query: impl Fn() -> CUresult,
        wait: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        if !self.is_linked.load(Ordering::Relaxed) {
            return wait();
        }
        let since = Instant::now();
        loop {
            self.enter()?;
            match query() {
                CUresult::CUDA_ERROR_NOT_READY if since.elapsed() < SPIN => std::thread::yield_now(),
                CUresult::CUDA_ERROR_NOT_READY => std::thread::sleep(NAP),
                result => return check(result, "a wait for the card"),
            }
        }
    }

    /// Makes this the context of the calling thread.
    pub(crate) fn enter(&self) -> Result<(), Error> {
        if let Some(why) = self.stuck.get() {
            return Err(Error::GivenUp(why.to_string()));
        }
        // SAFETY: the context is retained until it is dropped.
        unsafe { driver!(cuCtxSetCurrent(self.context)) }
    }

    /// Bytes of the card's memory that are free, and all.
    pub(crate) fn memory(&self) -> Result<(u64, u64), Error> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the context is current.
        unsafe { driver!(cuMemGetInfo_v2(&mut free, &mut total))? };
        Ok((free as u64, total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.stuck.get().is_some() {
            return;
        }
        // SAFETY: retained once, in `new`. What was made in the context holds it, and is gone. A failure leaves it retained.
        let _ = unsafe { driver!(cuDevicePrimaryCtxRelease_v2(self.card.device)) };
    }
}
