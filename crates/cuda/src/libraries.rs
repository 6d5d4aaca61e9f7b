//! NVIDIA's libraries beside the driver: which are there, and which package has those that are missing.

use libloading::Library;

use crate::blas;
use crate::compiler::Compiler;
use crate::factory::Options;

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
    let loads = |names: &[&str]| {
        // SAFETY: the initialisers of these libraries have no requirements.
        names.iter().find(|name| unsafe { Library::new(**name) }.is_ok()).map(|name| name.to_string())
    };
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
            purpose: "communication between cards; not used yet, ranks exchange data through host memory",
            found: loads(&["libnccl.so.2"]),
            package: "pip install nvidia-nccl-cu13; or libnccl2 of NVIDIA's package repository",
        },
    ]
}
