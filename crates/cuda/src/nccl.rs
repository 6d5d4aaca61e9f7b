//! NCCL: communication between cards by NVIDIA's library, where the dynamic loader finds it.
//!
//! It carries bytes and nothing else: sums have an order that the library does not promise (`links`). Communicators do not block: a call that
//! has not finished says so, and [`Communicator::poll`] tells when it has, so that a rank that waits can end when another one has failed.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use cudarc::driver::sys::CUstream;
use libloading::Library;
use phalanx_tensor::links::{INVITATION_BYTES, Invitation};

use crate::error::Error;
use crate::graphs::GRAPH_BYTES;
use crate::search::{Folders, loaded_file};

/// Error text for a missing NCCL where ranks are to communicate between cards.
pub const NO_NCCL: &str = "there is no NCCL 2.18 or newer (libnccl.so.2): `pip install nvidia-nccl-cu12` (for CUDA 13 `nvidia-nccl-cu13`; \
    its folder, nvidia/nccl/lib, can be given; for the program: PHALANX_NCCL), or install package `libnccl2` of NVIDIA's repository";

/// Names that the dynamic loader is asked for.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The oldest version: 2.18, whose communicators need not block in any call that is used here.
const VERSION_MIN: i32 = 21800;

/// Results of the library (`ncclResult_t`).
const SUCCESS: c_int = 0;
const INVALID_USAGE: c_int = 5;
const IN_PROGRESS: c_int = 7;

/// Blocks of a card that a communicator's kernels have at most: each takes memory for every other rank, and multiprocessors of the step.
const BLOCKS_MAX: c_int = 16;

/// Time in which an abort must return: it waits for streams of the library, and that may be for ever.
const ABORT: Duration = Duration::from_secs(5);

/// Bytes that a communicator of NCCL of so many ranks takes of a card, about: one rank took 538 MiB of an H200 (NCCL 2.28.3); the rest is
/// an allowance by what users of 8 H100 saw (NVIDIA/nccl#1685), and by what its authors say: beyond two hosts it no longer grows
/// (NVIDIA/nccl#986). What is taken is compared with it before the first step.
pub const fn communicator_bytes(ranks: usize) -> u64 {
    let others = if ranks < TWO_HOSTS { ranks } else { TWO_HOSTS } as u64 - 1;
    (576 << 20) + others * (410 << 20)
}

/// Cards of two hosts.
const TWO_HOSTS: usize = 16;

/// Bytes that the driver takes of a card after communicators are connected, about, for kernels, cuBLASLt and graphs.
pub(crate) const LATER_BYTES: u64 = (128 << 20) + GRAPH_BYTES;

/// `ncclUint8`: counts are bytes.
const BYTES: c_int = 1;

/// An invitation (`ncclUniqueId`), which the library takes by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([c_char; INVITATION_BYTES]);

/// `ncclConfig_t` as it was in 2.17: newer libraries take what follows as not given.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cluster_size: c_int,
    blocks_min: c_int,
    blocks_max: c_int,
    network: *const c_char,
}

impl Config {
    /// `NCCL_CONFIG_UNDEF_INT`: the library decides.
    const UNDEFINED: c_int = c_int::MIN;

    fn without_blocking() -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21700,
            blocking: 0,
            cluster_size: Config::UNDEFINED,
            blocks_min: Config::UNDEFINED,
            blocks_max: BLOCKS_MAX,
            network: std::ptr::null(),
        }
    }
}

/// A communicator of the library.
type Handle = *mut c_void;

/// Declares the library's functions that are used.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*);)*) => {
        /// The functions of the library. All return a result.
        #[allow(non_snake_case)]
        struct Functions {
            ncclGetErrorString: unsafe extern "C" fn(c_int) -> *const c_char,
            ncclGetLastError: unsafe extern "C" fn(Handle) -> *const c_char,
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            fn load(library: &Library) -> Result<Functions, libloading::Error> {
                // SAFETY: the types are those of the functions in all versions since 2.14.
                unsafe {
                    Ok(Functions {
                        ncclGetErrorString: *library.get(b"ncclGetErrorString")?,
                        ncclGetLastError: *library.get(b"ncclGetLastError")?,
                        $($name: *library.get(stringify!($name).as_bytes())?,)*
                    })
                }
            }
        }
    };
}

functions! {
    ncclGetUniqueId: fn(*mut UniqueId);
    ncclCommInitRankConfig: fn(*mut Handle, c_int, UniqueId, c_int, *mut Config);
    ncclCommGetAsyncError: fn(Handle, *mut c_int);
    ncclCommFinalize: fn(Handle);
    ncclCommDestroy: fn(Handle);
    ncclCommAbort: fn(Handle);
    ncclAllGather: fn(*const c_void, *mut c_void, usize, c_int, Handle, CUstream);
    ncclBroadcast: fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, CUstream);
    ncclSend: fn(*const c_void, usize, c_int, c_int, Handle, CUstream);
    ncclRecv: fn(*mut c_void, usize, c_int, c_int, Handle, CUstream);
    ncclGroupStart: fn();
    ncclGroupEnd: fn();
}

/// NCCL, loaded.
pub(crate) struct Nccl {
    functions: Functions,
    /// Declared last: unloaded after all that is of it.
    _library: Library,
}

impl Nccl {
    /// Loads the library, from `place`, a file or a folder that has one, or else from the first of `folders`. None where there is no library that is new enough.
    ///
    /// # Errors
    /// A `place` without one.
    pub(crate) fn load(place: Option<&Path>, folders: &Folders) -> Result<Option<Arc<Nccl>>, Error> {
        let opened = find(place, folders)?;
        Ok(opened.map(|Opened { functions, library, .. }| Arc::new(Nccl { functions, _library: library })))
    }

    /// An invitation to a new communicator.
    pub(crate) fn invite(&self) -> Result<Invitation, Error> {
        let mut id = UniqueId([0; INVITATION_BYTES]);
        // SAFETY: the id is there to be written.
        let result = unsafe { (self.functions.ncclGetUniqueId)(&mut id) };
        self.check(result, "ncclGetUniqueId", std::ptr::null_mut())?;
        Ok(id.0.map(|byte| byte as u8))
    }

    /// Begins to make this rank's part of a communicator on the card of the current context; [`Communicator::poll`] says when it is made.
    pub(crate) fn join(
        self: &Arc<Nccl>,
        invitation: &Invitation,
        rank: usize,
        ranks: usize,
    ) -> Result<Communicator, Error> {
        let (mut handle, mut config) = (std::ptr::null_mut(), Config::without_blocking());
        let id = UniqueId(invitation.map(|byte| byte as c_char));
        let (rank, ranks) = (rank as c_int, ranks as c_int);
        // SAFETY: the handle is there to be written; the configuration says which version of it this is, and is read before the call returns.
        let result =
            unsafe { (self.functions.ncclCommInitRankConfig)(&mut handle, ranks, id, rank, &mut config) };
        self.check(result, "ncclCommInitRankConfig", handle)?;
        let handle = NonNull::new(handle).ok_or(Error::Nccl {
            call: "ncclCommInitRankConfig",
            result,
            text: "no communicator".to_string(),
        })?;
        Ok(Communicator { nccl: Arc::clone(self), handle })
    }

    /// The error of a result. A call that goes on is none.
    fn check(&self, result: c_int, call: &'static str, communicator: Handle) -> Result<(), Error> {
        if result == SUCCESS || result == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: both functions may be called at any time, the second also without a communicator; they return static texts, or null.
        let texts = unsafe {
            [(self.functions.ncclGetErrorString)(result), (self.functions.ncclGetLastError)(communicator)]
        };
        let text = |text: *const c_char| {
            // SAFETY: a text that ends with 0.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let words: Vec<String> =
            texts.into_iter().filter_map(text).map(|text| text.trim().to_string()).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).filter(|word| !word.is_empty()).collect();
        Err(Error::Nccl { call, result, text: words.join("; ") })
    }
}

/// One rank's part of a communicator. It is ended by [`Communicator::abort`] or [`Communicator::destroy`].
pub(crate) struct Communicator {
    nccl: Arc<Nccl>,
    handle: NonNull<c_void>,
}

// SAFETY: a communicator may be used by any thread in which the context of its card is current, one at a time: `&mut self`.
unsafe impl Send for Communicator {}

impl Communicator {
    fn handle(&self) -> Handle {
        self.handle.as_ptr()
    }

    /// Returns whether the last call is done: it may be followed by another, or by events.
    pub(crate) fn poll(&mut self) -> Result<bool, Error> {
        let mut state = SUCCESS;
        // SAFETY: the communicator was not ended; the state is there to be written.
        let result = unsafe { (self.nccl.functions.ncclCommGetAsyncError)(self.handle(), &mut state) };
        self.nccl.check(result, "ncclCommGetAsyncError", self.handle())?;
        self.nccl.check(state, "communication between cards", self.handle()).map_err(
            |error| match error {
                Error::Nccl { call, result, text } if result == INVALID_USAGE => {
                    let text = format!("{text}; each rank needs a card of its own");
                    Error::Nccl { call, result, text }
                }
                error => error,
            },
        )?;
        Ok(state == SUCCESS)
    }

    /// Part r of `whole` becomes the `bytes` at `part` of rank r.
    ///
    /// # Safety
    /// The context of the card is current. The memory stays valid and ordered until the stream has run the call, or the communicator was ended.
    pub(crate) unsafe fn all_gather(
        &mut self,
        part: u64,
        whole: u64,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        let result = unsafe {
            let (part, whole) = (on_card(part), on_card(whole));
            (self.nccl.functions.ncclAllGather)(part, whole, bytes, BYTES, self.handle(), stream)
        };
        self.nccl.check(result, "ncclAllGather", self.handle())
    }

    /// The `bytes` at `buffer` become those of `root`.
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`].
    pub(crate) unsafe fn broadcast(
        &mut self,
        buffer: u64,
        bytes: usize,
        root: usize,
        stream: CUstream,
    ) -> Result<(), Error> {
        let buffer = on_card(buffer);
        // SAFETY: the caller's promise.
        let result = unsafe {
            (self.nccl.functions.ncclBroadcast)(
                buffer,
                buffer,
                bytes,
                BYTES,
                root as c_int,
                self.handle(),
                stream,
            )
        };
        self.nccl.check(result, "ncclBroadcast", self.handle())
    }

    /// Messages, all at once: the other rank, whether it is sent, address and length.
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`].
    pub(crate) unsafe fn exchange(
        &mut self,
        messages: impl Iterator<Item = (usize, bool, u64, usize)>,
        stream: CUstream,
    ) -> Result<(), Error> {
        let Functions { ncclGroupStart, ncclGroupEnd, ncclSend, ncclRecv, .. } = &self.nccl.functions;
        // SAFETY: the caller's promise. A group that has begun is ended whatever fails within.
        unsafe {
            self.nccl.check(ncclGroupStart(), "ncclGroupStart", self.handle())?;
            let mut issued = Ok(());
            for (peer, is_sent, address, bytes) in messages {
                let (address, peer) = (on_card(address), peer as c_int);
                let (result, call) = if is_sent {
                    (ncclSend(address, bytes, BYTES, peer, self.handle(), stream), "ncclSend")
                } else {
                    (ncclRecv(address, bytes, BYTES, peer, self.handle(), stream), "ncclRecv")
                };
                issued = issued.and(self.nccl.check(result, call, self.handle()));
            }
            let ended = self.nccl.check(ncclGroupEnd(), "ncclGroupEnd", self.handle());
            issued.and(ended)
        }
    }

    /// Begins to end the communicator in agreement with the other ranks; [`Communicator::poll`] says when that is done, and
    /// [`Communicator::destroy`] follows.
    pub(crate) fn finalize(&mut self) -> Result<(), Error> {
        // SAFETY: the communicator was not ended.
        let result = unsafe { (self.nccl.functions.ncclCommFinalize)(self.handle()) };
        self.nccl.check(result, "ncclCommFinalize", self.handle())
    }

    /// Ends the communicator with what is in flight.
    ///
    /// # Errors
    /// If the library does not return in time. Then what is in flight may use memory until the process ends.
    pub(crate) fn abort(self) -> Result<(), Error> {
        let (address, nccl) = (self.handle().expose_provenance(), self.nccl);
        let ended = within(ABORT, move || {
            // SAFETY: ended once, here. A failure leaves it to the end of the process.
            let _ = unsafe { (nccl.functions.ncclCommAbort)(on_card(address as u64)) };
        });
        if ended {
            return Ok(());
        }
        let text = format!(
            "a communicator has not ended within {} s: what it has started may use the card until this process ends",
            ABORT.as_secs()
        );
        Err(Error::Nccl { call: "ncclCommAbort", result: IN_PROGRESS, text })
    }

    /// Frees a communicator that was finalized.
    pub(crate) fn destroy(self) {
        // SAFETY: ended once, here. A failure leaves it to the end of the process.
        let _ = unsafe { (self.nccl.functions.ncclCommDestroy)(self.handle()) };
    }
}

/// Runs `body` on a thread of its own; whether it was over within a time. One that is not goes on.
fn within(time: Duration, body: impl FnOnce() + Send + 'static) -> bool {
    let (done, wait) = channel();
    let run = move || {
        body();
        // Nobody waits any more.
        let _ = done.send(());
    };
    let started = std::thread::Builder::new().name("nccl-abort".to_string()).spawn(run);
    started.is_ok() && wait.recv_timeout(time).is_ok()
}

/// An address of the card as the library takes it.
fn on_card(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// The version of the library that [`Nccl::load`] would load, 22705 for 2.27.5, and its file.
///
/// # Errors
/// A `place` without one.
pub(crate) fn version(place: Option<&Path>, folders: &Folders) -> Result<Option<(i32, PathBuf)>, Error> {
    Ok(find(place, folders)?.map(|opened| (opened.version, opened.path)))
}

/// The library with its functions.
struct Opened {
    functions: Functions,
    version: i32,
    path: PathBuf,
    library: Library,
}

/// The first library that can be used; a `place` that was given must have one.
fn find(place: Option<&Path>, folders: &Folders) -> Result<Option<Opened>, Error> {
    match (folders.candidates(&NAMES, place).iter().find_map(|path| open(path)), place) {
        (None, Some(place)) => Err(Error::NoNccl { place: place.to_path_buf() }),
        (found, _) => Ok(found),
    }
}

/// A library that is new enough and has all functions.
fn open(path: &Path) -> Option<Opened> {
    // SAFETY: the library's initialisers have no requirements.
    let library = unsafe { Library::new(path) }.ok()?;
    let mut version = 0;
    // SAFETY: the type is that of the function in every version; the version is there to be written.
    let result = unsafe {
        library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion").ok()?(&mut version)
    };
    let functions = Functions::load(&library).ok()?;
    (result == SUCCESS && version >= VERSION_MIN).then(|| Opened {
        functions,
        version,
        path: loaded_file(path),
        library,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_without_the_library_is_refused() {
        let refused = version(Some(Path::new("/nonexistent")), &Folders::default()).unwrap_err().to_string();
        assert!(refused.contains("/nonexistent") && refused.contains("PHALANX_NCCL"), "{refused}");
        assert!(Nccl::load(Some(Path::new("/nonexistent")), &Folders::default()).is_err());
    }

    #[test]
    fn what_does_not_return_is_waited_for_no_longer_than_its_time() {
        assert!(within(Duration::from_secs(60), || {}));
        let (go, wait) = channel::<()>();
        assert!(!within(Duration::from_millis(20), move || wait.recv().unwrap_or(())));
        drop(go);
    }

    #[test]
    fn kernels_of_a_communicator_leave_multiprocessors_to_the_step() {
        assert!((8..=16).contains(&Config::without_blocking().blocks_max));
    }
}
