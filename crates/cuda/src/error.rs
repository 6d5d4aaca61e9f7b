//! Why there is no device, or why it failed: each error names the package or the setting that helps.

use std::path::PathBuf;

/// Is told what a device does without, and what is no error.
pub(crate) type Notice = dyn Fn(&str) + Send + Sync;

/// The oldest driver: the one of CUDA 12.0.
pub const DRIVER_MIN: i32 = 12000;

/// The oldest card: compute capability 8.0 (A100), which has bf16 and asynchronous copies into shared memory.
pub const CAPABILITY_MIN: (i32, i32) = (8, 0);

/// Error of a card, its driver, or the compiler of its kernels.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The dynamic loader finds no driver.
    #[error(
        "no CUDA driver: the dynamic loader finds no libcuda.so. It belongs to NVIDIA's driver (Debian and Ubuntu: package \
         `nvidia-driver` or `libcuda1`; containers: run them with the NVIDIA Container Toolkit, `--gpus all`)"
    )]
    NoDriver,
    /// The driver is too old.
    #[error(
        "the CUDA driver is of CUDA {}.{}, and {}.{} or newer is needed: update NVIDIA's driver",
        version / 1000, version % 1000 / 10, DRIVER_MIN / 1000, DRIVER_MIN % 1000 / 10
    )]
    DriverTooOld {
        /// As the driver gives it: 12040 for CUDA 12.4.
        version: i32,
    },
    /// The driver knows no such card.
    #[error("{}", no_card(*index, *count))]
    NoCard {
        /// The number that was asked for.
        index: usize,
        /// Cards that the driver finds.
        count: i32,
    },
    /// The card is too old.
    #[error(
        "card {index} ({name}) has compute capability {}.{}; {}.{} or newer is needed (A100, RTX 30 and later)",
        capability.0, capability.1, CAPABILITY_MIN.0, CAPABILITY_MIN.1
    )]
    CardTooOld {
        /// Its number.
        index: usize,
        /// Its name.
        name: String,
        /// Its compute capability.
        capability: (i32, i32),
    },
    /// There is no compiler of kernels.
    #[error(
        "no NVRTC, which compiles the kernels: looked for {looked}. Install it with `pip install {}` \
         (elsewhere than in these folders, give that of libnvrtc.so, {} within the packages; for the program: PHALANX_NVRTC), or install the CUDA \
         toolkit (Debian and Ubuntu: package `cuda-nvrtc-12-8` or newer)",
        nvrtc_package(*driver).0, nvrtc_package(*driver).1
    )]
    NoCompiler {
        /// The names and paths that were tried.
        looked: String,
        /// The driver's version, if there is one: 12040 for CUDA 12.4.
        driver: Option<i32>,
    },
    /// The compiler does not know the card.
    #[error(
        "NVRTC {}.{} does not compile for {architecture}, the architecture of the card: install a newer one (`pip install --upgrade \
         nvidia-cuda-nvrtc`, or a newer CUDA toolkit) and give the folder of libnvrtc.so (for the program: PHALANX_NVRTC)",
        version.0, version.1
    )]
    CompilerTooOld {
        /// NVRTC's version.
        version: (i32, i32),
        /// For instance `sm_90`.
        architecture: String,
    },
    /// The library that was found is not NVRTC as it should be.
    #[error("{path} is no NVRTC that can be used: {reason}")]
    UnusableCompiler {
        /// Which library.
        path: String,
        /// Why not.
        reason: String,
    },
    /// A program did not compile.
    #[error(
        "{program} does not compile for {architecture} with NVRTC {}.{}; another version of it may (`pip install nvidia-cuda-nvrtc`):\n{log}",
        version.0, version.1
    )]
    Compile {
        /// The program with its definitions.
        program: String,
        /// For instance `sm_90`.
        architecture: String,
        /// NVRTC's version.
        version: (i32, i32),
        /// Log of NVRTC.
        log: String,
    },
    /// The driver does not understand what NVRTC makes.
    #[error(
        "the driver, of CUDA {}.{}, is older than NVRTC {}.{} and takes neither its instructions nor its PTX: update NVIDIA's driver, or install \
         an NVRTC of the driver's version (`pip install nvidia-cuda-nvrtc-cu12` for CUDA 12) and give the folder of libnvrtc.so (for the program: PHALANX_NVRTC); or \
         compute on the processor (for the program: --set device.kind=cpu)",
        driver / 1000, driver % 1000 / 10, version.0, version.1
    )]
    CompilerTooNew {
        /// NVRTC's version.
        version: (i32, i32),
        /// The driver's: 12040 for CUDA 12.4.
        driver: i32,
    },
    /// The card has too little free memory.
    #[error(
        "card {index} has {free_bytes} of {total_bytes} bytes free, and {needed_bytes} are needed for {purpose}: end other \
         programs on the card (`nvidia-smi` lists them), or change the plan so that it needs less (`phalanx plan CONFIG \
         --device-memory` says how)"
    )]
    OutOfMemory {
        /// The card.
        index: usize,
        /// Bytes that are needed.
        needed_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
        /// Bytes of the card.
        total_bytes: u64,
        /// Purpose of the bytes.
        purpose: &'static str,
    },
    /// The device may not take what its plan needs.
    #[error(
        "a rank needs {needed_bytes} bytes of its card (its plan, scratch of kernels, and about {} for the driver), and may take \
         {limit_bytes}: raise device.memory_mb, or change the plan so that it needs less",
        crate::CONTEXT_BYTES
    )]
    Limit {
        /// Bytes that are needed.
        needed_bytes: u64,
        /// Bytes that it may take.
        limit_bytes: u64,
    },
    /// A call of cuBLASLt failed.
    #[error(
        "{call}: status {status} of cuBLASLt (`cublasStatus_t`); without the library, kernels of Phalanx compute the products (for \
         the program: PHALANX_CUBLAS=off)"
    )]
    Blas {
        /// The function.
        call: &'static str,
        /// Status that it returned.
        status: u32,
    },
    /// There is no cuBLASLt where it was said to be.
    #[error(
        "there is no cuBLASLt of CUDA 12.0 or newer at {}: give a file or the folder of libcublasLt.so (nvidia/cublas/lib within Python's \
         packages; for CUDA 13 nvidia/cu13/lib), leave it out, or switch the \
         library off (for the program: PHALANX_CUBLAS, which may be \"off\")",
        place.display()
    )]
    NoBlas {
        /// The file or folder that was given.
        place: PathBuf,
    },
    /// A call of NCCL failed.
    #[error(
        "{call}: {text} (result {result} of NCCL, `ncclResult_t`; NCCL_DEBUG=WARN says more); without the library, ranks exchange data through \
         host memory (for the program: device.communication = \"host\")"
    )]
    Nccl {
        /// The function, or what it was part of.
        call: &'static str,
        /// Result that it returned.
        result: i32,
        /// Text of the library for this error.
        text: String,
    },
    /// There is no NCCL where it was said to be.
    #[error(
        "there is no NCCL 2.18 or newer at {}: give a file or the folder of libnccl.so.2, or leave it out (for the program: PHALANX_NCCL)",
        place.display()
    )]
    NoNccl {
        /// The file or folder that was given.
        place: PathBuf,
    },
    /// NCCL has left less of a card than the run still needs.
    #[error(
        "card {index} has {free_bytes} bytes left after NCCL has connected it, and {needed_bytes} are still needed for kernels and graphs: \
         NCCL has taken {taken_bytes}, and {planned_bytes} were planned. Change the plan so that it needs less (device.memory_mb lowers \
         what it may), or let ranks exchange data through host memory (for the program: device.communication = \"host\")"
    )]
    TakenByLinks {
        /// The card.
        index: usize,
        /// Bytes that are gone since before the first communicator.
        taken_bytes: u64,
        /// Bytes that were planned for communicators.
        planned_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
        /// Bytes that the driver still takes, about.
        needed_bytes: u64,
    },
    /// Work that was started on a card may never end.
    #[error("nothing more can be asked of the card: {0}")]
    GivenUp(String),
    /// Cards cannot be connected.
    #[error("{0}")]
    NotConnected(String),
    /// A call of the driver failed.
    #[error("{call}: {name} ({text}){}", advice(name))]
    Driver {
        /// The function of the driver.
        call: &'static str,
        /// The name of its error.
        name: String,
        /// Text of the driver for this error.
        text: String,
    },
    /// The system refused memory.
    #[error("the system refuses {bytes} bytes of addresses for device memory: {error}")]
    Addresses {
        /// Number of bytes that were requested.
        bytes: u64,
        /// Its answer.
        error: std::io::Error,
    },
    /// The system starts no further thread.
    #[error("{0}")]
    Thread(std::io::Error),
    /// None of several libraries of one kind can be used.
    #[error("{first}\nneither do the others that were found: {}", others.join("; "))]
    NoneOfSeveral {
        /// Error of the first.
        first: Box<Error>,
        /// The others, with their reasons.
        others: Vec<String>,
    },
    /// An operation that this device cannot compute.
    #[error("{0}")]
    Unsupported(String),
}

impl Error {
    /// Combines the errors of several libraries, all of which have failed.
    pub(crate) fn first_of(mut failed: Vec<Error>) -> Error {
        let first = Box::new(failed.remove(0));
        let others: Vec<String> = failed.iter().map(Error::to_string).collect();
        if others.is_empty() { *first } else { Error::NoneOfSeveral { first, others } }
    }
}

fn no_card(index: usize, count: i32) -> String {
    let limits = "(CUDA_VISIBLE_DEVICES limits which)";
    match count {
        0 => format!("the driver finds no card {limits}"),
        _ => format!("there is no card number {index}: the driver finds {count}, counted from 0 {limits}"),
    }
}

/// The package of NVRTC for a driver, and the folder of the library within it. Without one, that of CUDA 12, which newer drivers take as
/// well.
fn nvrtc_package(driver: Option<i32>) -> (&'static str, &'static str) {
    if driver.is_some_and(|version| version >= 13000) {
        ("nvidia-cuda-nvrtc", "nvidia/cu13/lib")
    } else {
        ("nvidia-cuda-nvrtc-cu12", "nvidia/cuda_nvrtc/lib")
    }
}

/// Returns advice for an error of the driver, if there is some.
fn advice(name: &str) -> &'static str {
    match name {
        "CUDA_ERROR_DEVICE_UNAVAILABLE" => {
            ": another process has the card for itself (`nvidia-smi -q -d COMPUTE` shows the mode; `nvidia-smi -c 0` shares it)"
        }
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" | "CUDA_ERROR_SYSTEM_NOT_READY" => {
            ": the kernel's driver and libcuda.so differ, or a service is missing (restart after an update of the driver; on NVSwitch \
             machines start nvidia-fabricmanager)"
        }
        "CUDA_ERROR_ECC_UNCORRECTABLE" | "CUDA_ERROR_HARDWARE_STACK_ERROR" | "CUDA_ERROR_CONTAINED" => {
            ": the card is faulty or must be reset (`nvidia-smi -q -d ECC`, the kernel's log for Xid)"
        }
        "CUDA_ERROR_LAUNCH_FAILED" | "CUDA_ERROR_ILLEGAL_ADDRESS" | "CUDA_ERROR_MISALIGNED_ADDRESS" => {
            ": a kernel failed, and the card is lost to this process; please report it with the output of `phalanx doctor`"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_package_is_that_of_the_driver() {
        let text = |driver| Error::NoCompiler { looked: String::new(), driver }.to_string();
        assert!(text(Some(12040)).contains("`pip install nvidia-cuda-nvrtc-cu12`"), "{}", text(Some(12040)));
        assert!(text(Some(13000)).contains("`pip install nvidia-cuda-nvrtc`"), "{}", text(Some(13000)));
    }

    #[test]
    fn no_card_at_all_has_no_number() {
        assert!(Error::NoCard { index: 0, count: 0 }.to_string().starts_with("the driver finds no card"));
        assert!(
            Error::NoCard { index: 2, count: 1 }.to_string().contains("card number 2: the driver finds 1")
        );
    }
}
