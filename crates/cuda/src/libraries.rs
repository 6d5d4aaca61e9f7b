//! NVIDIA's libraries beside the driver: which are there, and which package has those that are missing.

use crate::blas;
use crate::compiler::Compiler;
use crate::factory::Options;
use crate::nccl;

/// A library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryState {
    /// Its name.
    pub name: &'static str,
    /// What it is for.
    pub purpose: &'static str,
    /// What was found; None where it is missing.
    pub found: Option<String>,
    /// The package that has it.
    pub package: &'static str,
}

/// Looks for the libraries.
pub fn libraries(options: &Options) -> [LibraryState; 3] {
    let nvrtc = Compiler::load(options.nvrtc.as_deref()).ok().map(|compiler| compiler.version());
    let cublas = if options.library_products { blas::version(options.cublas.as_deref()) } else { Ok(None) };
    let cublas = cublas.ok().flatten();
    let nccl = nccl::version(options.nccl.as_deref()).ok().flatten();
    [
        LibraryState {
            name: "NVRTC",
            purpose: "compiles the kernels: needed",
            found: nvrtc.map(|(major, minor)| format!("{major}.{minor}")),
            package: "pip install nvidia-cuda-nvrtc-cu12 (nvidia-cuda-nvrtc for CUDA 13), with its folder as PHALANX_NVRTC; or cuda-nvrtc-12-8 of the CUDA toolkit",
        },
        LibraryState {
            name: "cuBLASLt",
            purpose: "matrix products; without it, own kernels compute them",
            found: cublas.map(|version| format!("{}.{}", version / 10_000, version % 10_000 / 100)),
            package: "pip install nvidia-cublas-cu12 (nvidia-cublas for CUDA 13), with its folder as PHALANX_CUBLAS; or libcublas-12-8 of the CUDA toolkit",
        },
        LibraryState {
            name: "NCCL",
            purpose: "communication between cards; without it, ranks exchange data through host memory",
            found: nccl.map(nccl_version),
            package: "pip install nvidia-nccl-cu12 (nvidia-nccl-cu13 for CUDA 13), with its folder as PHALANX_NCCL; or libnccl2 of NVIDIA's package repository",
        },
    ]
}

/// 2.27.5 for 22705
pub fn nccl_version(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
}
