//! cuBLASLt: products by NVIDIA's library, where the dynamic loader finds it.
//!
//! Each problem (shape, types, layouts, epilogue) has one algorithm for the life of the device: the library's first (or another that
//! was asked for) for addresses that are multiples of 16 bytes and a workspace of fixed size, without reductions by atomic operations.
//! So equal problems give equal bits, wherever their tensors lie.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUstream;
use libloading::Library;
use phalanx_tensor::DType;

use crate::error::Error;
use crate::search::{Folders, loaded_file};

/// Names that the dynamic loader is asked for.
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];

/// Multiples that the addresses of all matrices are.
pub(crate) const ALIGN: u64 = 16;

/// The oldest version: that of CUDA 12.0.
const VERSION_MIN: usize = 120_000;

/// Statuses of the library.
const SUCCESS: u32 = 0;
const NOT_SUPPORTED: u32 = 15;

/// `CUBLAS_COMPUTE_32F` and `CUBLAS_COMPUTE_32F_FAST_TF32`
const COMPUTE_F32: c_int = 68;
const COMPUTE_TF32: c_int = 77;

/// Attributes of operations: whether A and B are transposed, the epilogue and the address of the bias.
const TRANSPOSE: [u32; 2] = [3, 4];
const EPILOGUE: u32 = 7;
const BIAS: u32 = 8;

/// `CUBLASLT_EPILOGUE_BIAS`
const EPILOGUE_BIAS: u32 = 4;

/// Attributes of preferences: bytes of workspace, reduction schemes, alignments of A, B, C and D.
const WORKSPACE: u32 = 1;
const REDUCTIONS: u32 = 3;
const ALIGNMENTS: [u32; 4] = [5, 6, 7, 8];

/// Partial sums that are added in an order of their own: in the type of sums or of results, not in place.
const REDUCTIONS_IN_ORDER: u32 = 2 | 4;

/// Algorithms that the library may be asked for.
pub const ALGORITHMS: usize = 8;

/// A type as the library numbers it (`cudaDataType_t`).
fn code(element: DType) -> Option<c_int> {
    match element {
        DType::F32 => Some(0),
        DType::F16 => Some(2),
        DType::BF16 => Some(14),
        _ => None,
    }
}

/// An algorithm, opaque.
type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Found {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: u32,
    waves: f32,
    reserved: [c_int; 4],
}

/// Declares the library's functions that are used.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*);)*) => {
        /// The functions of the library. All return a status.
        #[allow(non_snake_case)]
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl Functions {
            fn load(library: &Library) -> Result<Functions, libloading::Error> {
                // SAFETY: the types are those of the functions in all versions since CUDA 11.
                unsafe { Ok(Functions { $($name: *library.get(stringify!($name).as_bytes())?,)* }) }
            }
        }
    };
}

/// A handle of the library: its own, a description's.
type Handle = *mut c_void;

functions! {
    cublasLtCreate: fn(*mut Handle);
    cublasLtDestroy: fn(Handle);
    cublasLtMatmulDescCreate: fn(*mut Handle, c_int, c_int);
    cublasLtMatmulDescDestroy: fn(Handle);
    cublasLtMatmulDescSetAttribute: fn(Handle, u32, *const c_void, usize);
    cublasLtMatrixLayoutCreate: fn(*mut Handle, c_int, u64, u64, i64);
    cublasLtMatrixLayoutDestroy: fn(Handle);
    cublasLtMatmulPreferenceCreate: fn(*mut Handle);
    cublasLtMatmulPreferenceDestroy: fn(Handle);
    cublasLtMatmulPreferenceSetAttribute: fn(Handle, u32, *const c_void, usize);
    cublasLtMatmulAlgoGetHeuristic: fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Found, *mut c_int);
    cublasLtMatmul: fn(
        Handle, Handle, *const f32, u64, Handle, u64, Handle, *const f32, u64, Handle, u64, Handle, *const Algorithm, u64, usize, CUstream
    );
}

/// `functions.call(...)` of the library, checked. Inside `unsafe`.
macro_rules! call {
    ($functions:expr, $name:ident($($argument:expr),* $(,)?)) => {
        check(($functions.$name)($($argument),*), stringify!($name))
    };
}

fn check(status: u32, call: &'static str) -> Result<(), Error> {
    if status == SUCCESS { Ok(()) } else { Err(Error::Blas { call, status }) }
}

/// A matrix, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
    /// True if the product uses its transpose.
    pub(crate) transposed: bool,
}

/// Description of a product, by which an algorithm is chosen: `to = a · b (+ to or another matrix) (+ bias)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Problem {
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    pub(crate) to: Matrix,
    pub(crate) element: DType,
    pub(crate) result: DType,
    pub(crate) has_bias: bool,
    pub(crate) tf32: bool,
    pub(crate) workspace_bytes: usize,
}

/// Addresses of the matrices of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Addresses {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) to: u64,
    pub(crate) bias: Option<u64>,
    /// Added to the result; may be the result itself.
    pub(crate) add: Option<u64>,
    pub(crate) workspace: u64,
}

/// cuBLASLt, loaded.
pub(crate) struct Blas {
    functions: Functions,
    handle: Handle,
    /// By problem; none where the library has no algorithm.
    plans: Mutex<HashMap<Problem, Option<Plan>>>,
    /// True if the library computes the even part of a product with an extent that is no multiple of 16 bytes, and a
    /// kernel of this crate the rest.
    pub(crate) splits_odd: bool,
    /// Which of the algorithms that the library names a problem has; the last where there are fewer.
    pub(crate) algorithm: usize,
    /// Declared last: unloaded after all that is of it.
    _library: Library,
}

// SAFETY: the library may be called by any thread in which the context is current; its handles are never used by two threads at
// once, because descriptions are used under the lock of `plans`.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// Descriptions of a problem, and its algorithm. The library multiplies by columns: its A is the right factor, its B the left.
struct Plan {
    operation: Handle,
    right: Handle,
    left: Handle,
    to: Handle,
    algorithm: Algorithm,
    was_used: bool,
}

impl Blas {
    /// Loads the library, from `place`, a file or a folder that has one, or else from the first of `folders`. The context is current. None where there
    /// is no library that is new enough.
    ///
    /// # Errors
    /// A `place` without one, and a library that does not start.
    pub(crate) fn load(place: Option<&Path>, folders: &Folders) -> Result<Option<Blas>, Error> {
        find(place, folders, |Opened { library, functions, .. }| {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the handle is there to be written.
            unsafe { call!(functions, cublasLtCreate(&mut handle))? };
            let plans = Mutex::default();
            Ok(Blas { functions, handle, plans, splits_odd: true, algorithm: 0, _library: library })
        })
    }

    /// Returns whether a product like this was asked for before.
    pub(crate) fn knows(&self, problem: &Problem) -> bool {
        self.lock().contains_key(problem)
    }

    /// Returns whether the library has an algorithm for a product.
    pub(crate) fn computes(&self, problem: &Problem) -> Result<bool, Error> {
        let mut plans = self.lock();
        let plan = match plans.entry(*problem) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.plan(problem)?),
        };
        Ok(plan.is_some())
    }

    /// Returns whether a product like this was issued before.
    pub(crate) fn has_computed(&self, problem: &Problem) -> bool {
        self.lock().get(problem).is_some_and(|plan| plan.as_ref().is_some_and(|plan| plan.was_used))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Problem, Option<Plan>>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Issues a product which the library computes.
    ///
    /// # Safety
    /// The context is current; the matrices have the sizes of the problem and stay valid and ordered until the stream has run the
    /// product, as does the workspace, which nothing else uses meanwhile.
    pub(crate) unsafe fn multiply(
        &self,
        problem: &Problem,
        addresses: Addresses,
        stream: CUstream,
    ) -> Result<(), Error> {
        let mut plans = self.lock();
        let plan =
            plans.get_mut(problem).and_then(Option::as_mut).expect("a product that the library computes");
        let Addresses { a, b, to, bias, add, workspace } = addresses;
        let (one, factor) = (1f32, if add.is_some() { 1f32 } else { 0.0 });
        let add = add.unwrap_or(to);
        if let Some(bias) = bias {
            set(self.functions.cublasLtMatmulDescSetAttribute, plan.operation, BIAS, bias)?;
        }
        // SAFETY: the descriptions are those of the problem; the caller vouches for the rest.
        unsafe {
            call!(
                self.functions,
                cublasLtMatmul(
                    self.handle,
                    plan.operation,
                    &one,
                    b,
                    plan.right,
                    a,
                    plan.left,
                    &factor,
                    add,
                    plan.to,
                    to,
                    plan.to,
                    &plan.algorithm,
                    workspace,
                    problem.workspace_bytes,
                    stream,
                )
            )?;
        }
        plan.was_used = true;
        Ok(())
    }

    /// Describes a problem and takes the algorithm that is wanted; none if it has none.
    fn plan(&self, problem: &Problem) -> Result<Option<Plan>, Error> {
        let (Some(element), Some(result)) = (code(problem.element), code(problem.result)) else {
            return Ok(None);
        };
        let null = std::ptr::null_mut();
        let mut plan =
            Plan { operation: null, right: null, left: null, to: null, algorithm: [0; 8], was_used: false };
        let found =
            self.describe(problem, &mut plan, [element, result]).and_then(|()| self.find(problem, &plan));
        match found {
            Ok(Some(algorithm)) => Ok(Some(Plan { algorithm, ..plan })),
            Ok(None) => {
                self.destroy(&plan);
                Ok(None)
            }
            Err(error) => {
                self.destroy(&plan);
                Err(error)
            }
        }
    }

    fn describe(
        &self,
        problem: &Problem,
        plan: &mut Plan,
        [element, result]: [c_int; 2],
    ) -> Result<(), Error> {
        let functions = &self.functions;
        let compute = if problem.tf32 { COMPUTE_TF32 } else { COMPUTE_F32 };
        // SAFETY: handles are there to be written.
        unsafe { call!(functions, cublasLtMatmulDescCreate(&mut plan.operation, compute, 0))? };
        let set_operation = functions.cublasLtMatmulDescSetAttribute;
        for (attribute, matrix) in TRANSPOSE.into_iter().zip([problem.b, problem.a]) {
            set(set_operation, plan.operation, attribute, u32::from(matrix.transposed))?;
        }
        if problem.has_bias {
            set(set_operation, plan.operation, EPILOGUE, EPILOGUE_BIAS)?;
            // Algorithms are looked for with an address; each product sets its own.
            set(set_operation, plan.operation, BIAS, ALIGN)?;
        }
        let layouts = [
            (&mut plan.right, problem.b, element),
            (&mut plan.left, problem.a, element),
            (&mut plan.to, problem.to, result),
        ];
        for (layout, Matrix { rows, columns, stride, .. }, element) in layouts {
            // Rows that lie one behind the other are the columns of the transpose.
            let (rows, columns) = (columns as u64, rows as u64);
            // SAFETY: handles are there to be written.
            unsafe {
                call!(functions, cublasLtMatrixLayoutCreate(layout, element, rows, columns, stride as i64))?
            };
        }
        Ok(())
    }

    fn find(&self, problem: &Problem, plan: &Plan) -> Result<Option<Algorithm>, Error> {
        let functions = &self.functions;
        let mut preference = std::ptr::null_mut();
        // SAFETY: the handle is there to be written.
        unsafe { call!(functions, cublasLtMatmulPreferenceCreate(&mut preference))? };
        let set_preference = functions.cublasLtMatmulPreferenceSetAttribute;
        let mut is_set = set(set_preference, preference, WORKSPACE, problem.workspace_bytes as u64)
            .and_then(|()| set(set_preference, preference, REDUCTIONS, REDUCTIONS_IN_ORDER));
        for attribute in ALIGNMENTS {
            is_set = is_set.and_then(|()| set(set_preference, preference, attribute, ALIGN as u32));
        }
        let (mut found, mut count) = ([Found::default(); ALGORITHMS], 0);
        let wanted = self.algorithm.min(ALGORITHMS - 1) + 1;
        let Plan { operation, right, left, to, .. } = *plan;
        // SAFETY: all handles are of this library; there is room for the results that are asked for.
        let status = unsafe {
            let status = (functions.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                operation,
                right,
                left,
                to,
                to,
                preference,
                wanted as c_int,
                found.as_mut_ptr(),
                &mut count,
            );
            (functions.cublasLtMatmulPreferenceDestroy)(preference);
            status
        };
        is_set?;
        if status == NOT_SUPPORTED {
            return Ok(None);
        }
        check(status, "cublasLtMatmulAlgoGetHeuristic")?;
        Ok(last(&found[..(count as usize).min(wanted)]))
    }

    /// Ends the descriptions of a plan that there are.
    fn destroy(&self, plan: &Plan) {
        let functions = &self.functions;
        // SAFETY: each handle was made by the matching function, and is not used again.
        unsafe {
            if !plan.operation.is_null() {
                (functions.cublasLtMatmulDescDestroy)(plan.operation);
            }
            for layout in [plan.right, plan.left, plan.to] {
                if !layout.is_null() {
                    (functions.cublasLtMatrixLayoutDestroy)(layout);
                }
            }
        }
    }
}

/// The version of the first library that can be loaded, 120800 for 12.8, and its file.
///
/// # Errors
/// A `place` without one.
pub(crate) fn version(place: Option<&Path>, folders: &Folders) -> Result<Option<(usize, PathBuf)>, Error> {
    find(place, folders, |opened| Ok((opened.version, opened.path)))
}

/// The library with its functions.
struct Opened {
    functions: Functions,
    version: usize,
    path: PathBuf,
    library: Library,
}

/// Returns the result of `make` for the first library with which it succeeds. If a `place` is given, a library must be
/// there.
fn find<T>(
    place: Option<&Path>,
    folders: &Folders,
    make: impl Fn(Opened) -> Result<T, Error>,
) -> Result<Option<T>, Error> {
    let mut failed = Vec::new();
    for opened in folders.candidates(&NAMES, place).iter().filter_map(|path| open(path)) {
        match make(opened) {
            Ok(made) => return Ok(Some(made)),
            Err(error) => failed.push(error),
        }
    }
    match place {
        _ if !failed.is_empty() => Err(Error::first_of(failed)),
        Some(place) => Err(Error::NoBlas { place: place.to_path_buf() }),
        None => Ok(None),
    }
}

/// A library that is new enough and has all functions.
fn open(path: &Path) -> Option<Opened> {
    // SAFETY: the library's initialisers have no requirements.
    let library = unsafe { Library::new(path) }.ok()?;
    // SAFETY: the type is that of the function in every version.
    let version = unsafe { library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion").ok()?() };
    let functions = Functions::load(&library).ok()?;
    (version >= VERSION_MIN).then(|| Opened { functions, version, path: loaded_file(path), library })
}

/// The last algorithm that can be used.
fn last(found: &[Found]) -> Option<Algorithm> {
    found.iter().rfind(|found| found.state == SUCCESS).map(|found| found.algorithm)
}

/// Sets an attribute of a description by the function for its kind.
fn set<T>(
    function: unsafe extern "C" fn(Handle, u32, *const c_void, usize) -> u32,
    of: Handle,
    attribute: u32,
    value: T,
) -> Result<(), Error> {
    // SAFETY: the description is one of the library's; the value is read before the call returns.
    let status = unsafe { function(of, attribute, (&raw const value).cast(), size_of::<T>()) };
    check(status, "setting an attribute of cuBLASLt")
}

impl Drop for Blas {
    fn drop(&mut self) {
        let plans = std::mem::take(&mut *self.plans.lock().unwrap_or_else(PoisonError::into_inner));
        plans.values().flatten().for_each(|plan| self.destroy(plan));
        // SAFETY: the handle was made by `of`, and is not used again. A failure leaves it to the end of the process.
        let _ = unsafe { (self.functions.cublasLtDestroy)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_algorithm_that_can_be_used_is_taken() {
        let found = [(1, SUCCESS), (2, SUCCESS), (3, NOT_SUPPORTED)];
        let found = found.map(|(number, state)| Found { algorithm: [number; 8], state, ..Found::default() });
        assert_eq!(last(&found), Some([2; 8]));
        assert_eq!(last(&found[..1]), Some([1; 8]));
        assert_eq!(last(&found[2..]), None);
    }

    #[test]
    fn a_place_without_the_library_is_refused() {
        let refused = version(Some(Path::new("/nonexistent")), &Folders::default()).unwrap_err().to_string();
        assert!(refused.contains("/nonexistent") && refused.contains("\"off\""), "{refused}");
        assert!(Blas::load(Some(Path::new("/nonexistent")), &Folders::default()).is_err());
    }
}
