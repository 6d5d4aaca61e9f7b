//! NVIDIA's libraries beside the driver: which are there, and which package has those that are missing.

use std::path::Path;

use crate::compiler::Compiler;
use crate::factory::Options;

/// A library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryState {
    /// Its name.
    pub name: &'static str,
    /// Its purpose.
    pub purpose: &'static str,
    /// The version that was found; None where it is missing.
    pub found: Option<String>,
    /// The file that was found.
    pub path: Option<String>,
    /// The package that has it.
    pub package: &'static str,
}

/// Looks for the libraries.
pub fn libraries(options: &Options) -> [LibraryState; 3] {
    let nvrtc = Compiler::load(options.nvrtc.as_deref(), &options.folders).ok();
    let cublas = options.find_blas().ok().flatten();
    let nccl = options.find_nccl().ok().flatten();
    let path = |path: &Path| path.display().to_string();
    [
        LibraryState {
            name: "NVRTC",
            purpose: "compiles the kernels: needed",
            found: nvrtc.as_ref().map(|nvrtc| format!("{}.{}", nvrtc.version().0, nvrtc.version().1)),
            path: nvrtc.map(|nvrtc| path(nvrtc.path())),
            package: "pip install nvidia-cuda-nvrtc-cu12 (nvidia-cuda-nvrtc for CUDA 13; PHALANX_NVRTC names its folder elsewhere than in Python's, nvidia/cuda_nvrtc/lib or nvidia/cu13/lib); or cuda-nvrtc-12-8 of the CUDA toolkit",
        },
        LibraryState {
            name: "cuBLASLt",
            purpose: "matrix products; without it, own kernels compute them",
            found: cublas
                .as_ref()
                .map(|(version, _)| format!("{}.{}", version / 10_000, version % 10_000 / 100)),
            path: cublas.map(|(_, file)| path(&file)),
            package: "pip install nvidia-cublas-cu12 (nvidia-cublas for CUDA 13; PHALANX_CUBLAS names its folder elsewhere than in Python's, nvidia/cublas/lib or nvidia/cu13/lib); or libcublas-12-8 of the CUDA toolkit",
        },
        LibraryState {
            name: "NCCL",
            purpose: "communication between cards; without it, ranks exchange data through host memory",
            found: nccl.as_ref().map(|(version, _)| nccl_version(*version)),
            path: nccl.map(|(_, file)| path(&file)),
            package: "pip install nvidia-nccl-cu12 (nvidia-nccl-cu13 for CUDA 13; PHALANX_NCCL names its folder elsewhere than in Python's, nvidia/nccl/lib); or libnccl2 of NVIDIA's package repository",
        },
    ]
}

/// 2.27.5 for 22705
pub fn nccl_version(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
}
