//! A double of cuBLASLt: products of matrices with their epilogues, computed by the host's processor in the order of the
//! driver's streams, with the driver's checks of memory.
//!
//! Descriptions are checked as the library does: what it does not know is `INVALID_VALUE`, what it has no kernel for is
//! `NOT_SUPPORTED`. An algorithm may be used for the problem only for which it was found, with pointers that are aligned as
//! the preference said, and with the workspace that it asked for. Sums are exact to f64, so their last bits differ from a
//! card's. Batches, other orders than columns, 8-bit types and other pointer modes are not supported.

mod descriptions;
mod problem;

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use crate::driver;
use descriptions::{Layout, Operation, Preference};
use problem::{Addresses, Problem};

/// What a function of the library returns (`cublasStatus_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
#[allow(missing_docs)]
pub struct BlasStatus(pub u32);

#[allow(missing_docs)]
impl BlasStatus {
    pub const SUCCESS: Self = Self(0);
    pub const NOT_INITIALIZED: Self = Self(1);
    pub const INVALID_VALUE: Self = Self(7);
    pub const EXECUTION_FAILED: Self = Self(13);
    pub const NOT_SUPPORTED: Self = Self(15);
}

/// An algorithm (`cublasLtMatmulAlgo_t`): the problem that it is for, and what it needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Algorithm {
    /// The hash of the problem.
    pub problem: u64,
    /// Bytes of workspace.
    pub workspace: u64,
    /// What the addresses of A, B, C and D are multiples of.
    pub alignment: [u64; 4],
    unused: [u64; 2],
}

/// An algorithm that was found (`cublasLtMatmulHeuristicResult_t`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Found {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Bytes of workspace.
    pub workspace: usize,
    /// Whether it can be used.
    pub state: BlasStatus,
    /// Rounds of blocks on the card; not known here.
    pub waves: f32,
    reserved: [c_int; 4],
}

/// Objects of the library by handle.
enum Object {
    Library,
    Operation(Operation),
    Layout(Layout),
    Preference(Preference),
}

/// Handles are indices plus this.
const FIRST_HANDLE: usize = 0xb1a5_0000;

static OBJECTS: Mutex<Vec<Option<Object>>> = Mutex::new(Vec::new());

type Outcome<T> = Result<T, BlasStatus>;

fn with_objects<T>(body: impl FnOnce(&mut Vec<Option<Object>>) -> T) -> T {
    body(&mut OBJECTS.lock().unwrap_or_else(PoisonError::into_inner))
}

fn create(out: *mut usize, object: Object) -> Outcome<()> {
    let handle = with_objects(|objects| {
        objects.push(Some(object));
        FIRST_HANDLE + objects.len() - 1
    });
    put(out, handle)
}

fn destroy(handle: usize) -> Outcome<()> {
    with_objects(|objects| {
        let object = handle.checked_sub(FIRST_HANDLE).and_then(|index| objects.get_mut(index));
        object.and_then(Option::take).map(|_| ()).ok_or(BlasStatus::INVALID_VALUE)
    })
}

/// Looks at an object of a kind.
macro_rules! object {
    ($kind:ident, $handle:expr, |$object:ident| $body:expr) => {
        with_objects(|objects| {
            let index = $handle.checked_sub(FIRST_HANDLE).ok_or(BlasStatus::INVALID_VALUE)?;
            match objects.get_mut(index) {
                Some(Some(Object::$kind($object))) => $body,
                _ => Err(BlasStatus::INVALID_VALUE),
            }
        })
    };
}

fn library(handle: usize) -> Outcome<()> {
    with_objects(|objects| match handle.checked_sub(FIRST_HANDLE).and_then(|index| objects.get(index)) {
        Some(Some(Object::Library)) => Ok(()),
        _ => Err(BlasStatus::NOT_INITIALIZED),
    })
}

fn put<T>(out: *mut T, value: T) -> Outcome<()> {
    if out.is_null() {
        return Err(BlasStatus::INVALID_VALUE);
    }
    // SAFETY: callers of the library's functions promise that their result pointers are valid.
    unsafe { out.write(value) };
    Ok(())
}

/// The bytes of an attribute.
fn bytes<'a>(from: *const c_void, count: usize) -> Outcome<&'a [u8]> {
    if from.is_null() || count > 64 {
        return Err(BlasStatus::INVALID_VALUE);
    }
    // SAFETY: the caller gives a pointer to so many bytes, which are read before the call returns.
    Ok(unsafe { std::slice::from_raw_parts(from.cast(), count) })
}

/// The problem that descriptions pose.
fn problem(operation: usize, layouts: [usize; 4]) -> Outcome<Problem> {
    let operation = object!(Operation, operation, |operation| Ok(operation.clone()))?;
    let mut matrices = [Layout::default(); 4];
    for (matrix, handle) in matrices.iter_mut().zip(layouts) {
        *matrix = object!(Layout, handle, |layout| Ok(*layout))?;
    }
    Problem::new(operation, matrices)
}

/// Declares functions of the library.
macro_rules! entry_points {
    ($($(#[$meta:meta])* $name:ident($($arg:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// Pointers must be valid as the manual of the library says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $kind),*) -> BlasStatus {
            let body = || -> Outcome<()> { $body };
            body().err().unwrap_or(BlasStatus::SUCCESS)
        }
    )*};
}

entry_points! {
    /// Makes a handle of the library. The thread needs a context.
    cublasLtCreate(out: *mut usize) {
        if !driver::has_context() {
            return Err(BlasStatus::NOT_INITIALIZED);
        }
        create(out, Object::Library)
    }

    /// Ends a handle.
    cublasLtDestroy(handle: usize) { library(handle).and_then(|()| destroy(handle)) }

    /// Describes an operation: types of sums and factors.
    cublasLtMatmulDescCreate(out: *mut usize, compute: c_int, scale: c_int) {
        create(out, Object::Operation(Operation::new(compute, scale)?))
    }

    /// Ends a description.
    cublasLtMatmulDescDestroy(operation: usize) { destroy(operation) }

    /// Sets an attribute of an operation.
    cublasLtMatmulDescSetAttribute(operation: usize, attribute: u32, from: *const c_void, count: usize) {
        let value = bytes(from, count)?;
        object!(Operation, operation, |operation| operation.set(attribute, value))
    }

    /// Describes a matrix by its columns.
    cublasLtMatrixLayoutCreate(out: *mut usize, kind: c_int, rows: u64, columns: u64, leading: i64) {
        create(out, Object::Layout(Layout::new(kind, rows, columns, leading)?))
    }

    /// Ends a description.
    cublasLtMatrixLayoutDestroy(layout: usize) { destroy(layout) }

    /// Sets an attribute of a matrix.
    cublasLtMatrixLayoutSetAttribute(layout: usize, attribute: u32, from: *const c_void, count: usize) {
        let value = bytes(from, count)?;
        object!(Layout, layout, |layout| layout.set(attribute, value))
    }

    /// Describes which algorithms are wanted.
    cublasLtMatmulPreferenceCreate(out: *mut usize) { create(out, Object::Preference(Preference::default())) }

    /// Ends a description.
    cublasLtMatmulPreferenceDestroy(preference: usize) { destroy(preference) }

    /// Sets an attribute of a preference.
    cublasLtMatmulPreferenceSetAttribute(preference: usize, attribute: u32, from: *const c_void, count: usize) {
        let value = bytes(from, count)?;
        object!(Preference, preference, |preference| preference.set(attribute, value))
    }

    /// Finds algorithms, the best first: one that needs workspace, if there may be any, and one that needs none.
    cublasLtMatmulAlgoGetHeuristic(
        handle: usize, operation: usize, a: usize, b: usize, c: usize, d: usize, preference: usize,
        wanted: c_int, out: *mut Found, count: *mut c_int,
    ) {
        library(handle)?;
        put(count, 0)?;
        if wanted < 1 {
            return Err(BlasStatus::INVALID_VALUE);
        }
        let problem = problem(operation, [a, b, c, d])?;
        let preference = object!(Preference, preference, |preference| Ok(*preference))?;
        let partial_sums = problem.partial_sums_bytes();
        let sizes = [partial_sums, 0].into_iter().filter(|&bytes| bytes == 0 || bytes <= preference.workspace);
        let mut found = 0;
        for workspace in sizes.take(wanted as usize) {
            let alignment = preference.alignment;
            let algorithm = Algorithm { problem: problem.hash(), workspace, alignment, ..Algorithm::default() };
            let (state, reserved) = (BlasStatus::SUCCESS, [0; 4]);
            let result = Found { algorithm, workspace: workspace as usize, state, waves: 1.0, reserved };
            // The caller gives room for as many results as it wants.
            put(out.wrapping_add(found), result)?;
            found += 1;
        }
        put(count, found as c_int)
    }

    /// Queues a product. Without an algorithm, the library chooses one that fits.
    cublasLtMatmul(
        handle: usize, operation: usize, alpha: *const f32, a: u64, a_layout: usize, b: u64, b_layout: usize,
        beta: *const f32, c: u64, c_layout: usize, d: u64, d_layout: usize, algorithm: *const Algorithm,
        workspace: u64, workspace_bytes: usize, stream: usize,
    ) {
        library(handle)?;
        let problem = problem(operation, [a_layout, b_layout, c_layout, d_layout])?;
        if alpha.is_null() || beta.is_null() {
            return Err(BlasStatus::INVALID_VALUE);
        }
        // SAFETY: the caller gives pointers to factors in host memory, and to an algorithm or none.
        let (factors, algorithm) = unsafe { ([*alpha, *beta], algorithm.as_ref().copied()) };
        let addresses = Addresses { matrices: [a, b, c, d], workspace, workspace_bytes };
        let product = problem.product(factors, addresses, algorithm)?;
        driver::queue_product(stream, product).map_err(|_| BlasStatus::EXECUTION_FAILED)
    }
}

/// The version of the library: 12.8.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    120_800
}

/// The name of a status.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusName(status: BlasStatus) -> *const c_char {
    let name = match status {
        BlasStatus::SUCCESS => c"CUBLAS_STATUS_SUCCESS",
        BlasStatus::NOT_INITIALIZED => c"CUBLAS_STATUS_NOT_INITIALIZED",
        BlasStatus::INVALID_VALUE => c"CUBLAS_STATUS_INVALID_VALUE",
        BlasStatus::EXECUTION_FAILED => c"CUBLAS_STATUS_EXECUTION_FAILED",
        BlasStatus::NOT_SUPPORTED => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"unknown status",
    };
    name.as_ptr()
}

/// The text of a status.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(status: BlasStatus) -> *const c_char {
    cublasLtGetStatusName(status)
}
