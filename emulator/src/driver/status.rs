//! Status codes and their names.

use std::ffi::{CStr, c_char};

use super::put;

/// What a function of the driver returns (`CUresult`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Status(pub u32);

/// All names but that of success have `ERROR_` in them.
macro_rules! status_prefix {
    (SUCCESS) => {
        ""
    };
    ($name:ident) => {
        "ERROR_"
    };
}

macro_rules! statuses {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        impl Status {
            $(#[doc = $text] pub const $name: Self = Self($code);)*
        }

        /// Code, name and text.
        const NAMES: &[(u32, &CStr, &CStr)] = &[
            $(($code, match CStr::from_bytes_with_nul(concat!("CUDA_", status_prefix!($name), stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            }, match CStr::from_bytes_with_nul(concat!($text, "\0").as_bytes()) {
                Ok(text) => text,
                Err(_) => c"",
            }),)*
        ];
    };
}

statuses! {
    SUCCESS = 0, "no error";
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "initialization error";
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_IMAGE = 200, "device kernel image is invalid";
    INVALID_CONTEXT = 201, "invalid device context";
    ECC_UNCORRECTABLE = 214, "uncorrectable ECC error encountered";
    INVALID_PTX = 218, "a PTX JIT compilation failed";
    UNSUPPORTED_PTX_VERSION = 222, "the provided PTX was compiled with an unsupported toolchain.";
    INVALID_HANDLE = 400, "invalid resource handle";
    ILLEGAL_STATE = 401, "the operation cannot be performed in the present state";
    NOT_FOUND = 500, "named symbol not found";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701, "too many resources requested for launch";
    LAUNCH_TIMEOUT = 702, "the launch timed out and was terminated";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    MISALIGNED_ADDRESS = 716, "misaligned address";
    LAUNCH_FAILED = 719, "unspecified launch failure";
    NOT_SUPPORTED = 801, "operation not supported";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE = 902, "operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED = 903, "capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED = 904, "capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905, "dependency created on uncaptured work in another stream";
}

fn entry(status: u32) -> Option<&'static (u32, &'static CStr, &'static CStr)> {
    NAMES.iter().find(|(code, _, _)| *code == status)
}

/// The name of a status.
///
/// # Safety
/// The pointer must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(status: u32, out: *mut *const c_char) -> Status {
    let Some((_, name, _)) = entry(status) else { return Status::INVALID_VALUE };
    put(out, name.as_ptr()).err().unwrap_or(Status::SUCCESS)
}

/// The text of a status.
///
/// # Safety
/// The pointer must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(status: u32, out: *mut *const c_char) -> Status {
    let Some((_, _, text)) = entry(status) else { return Status::INVALID_VALUE };
    put(out, text.as_ptr()).err().unwrap_or(Status::SUCCESS)
}
