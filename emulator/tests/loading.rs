//! The emulator as a program finds it: by the dynamic loader, under the name of the driver, through cudarc.
//!
//! The loader reads `LD_LIBRARY_PATH` when a process begins, so each test runs itself again in a process of its own.

#![cfg(target_os = "linux")]

use std::process::{Output, Stdio};

use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

use crate::process::{command, finish};

const PTX: &str = include_str!("kernels/sequences.ptx");

/// Tells a test that it runs in its own process.
const INSIDE: &str = "PHALANX_EMULATOR_INSIDE";

/// Runs a test of this file again, where the emulator is `libcuda.so`.
fn inside(test: &str, seed: &str) -> Output {
    let program = std::env::current_exe().unwrap();
    let library = program.with_file_name("libphalanx_cuda_emulator.so");
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(&library, folder.path().join("libcuda.so")).unwrap();
    let child = command(&program)
        .args(["--exact", &format!("loading::{test}"), "--nocapture"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env("PHALANX_EMULATOR_SEED", seed)
        .env("PHALANX_EMULATOR_MEMORY_MB", "64")
        .env(INSIDE, "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    finish(child.unwrap())
}

fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Adds in two streams that events order; with `fault` the kernel runs beyond its data.
fn program(fault: bool) -> Result<Vec<f32>, cudarc::driver::DriverError> {
    let context = CudaContext::new(0)?;
    assert_eq!(context.name()?, "Phalanx CUDA emulator");
    assert_eq!(context.compute_capability()?, (8, 0));
    let (uploads, compute) = (context.new_stream()?, context.new_stream()?);
    let module = context.load_module(Ptx::from_src(PTX))?;
    let add = module.load_function("add")?;
    let (count, from) = (1000, vec![1.5f32; 1000]);
    let input = uploads.clone_htod(&from)?;
    let mut out = compute.alloc_zeros::<f32>(count)?;
    compute.join(&uploads)?;
    let launched = count as i32 + i32::from(fault);
    let config = LaunchConfig { grid_dim: (8, 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 };
    for _ in 0..3 {
        // SAFETY: the parameters are those of the kernel; the emulator checks its accesses.
        unsafe { compute.launch_builder(&add).arg(&mut out).arg(&input).arg(&launched).launch(config)? };
    }
    compute.clone_dtoh(&out)
}

#[test]
fn cudarc_runs_on_the_emulator() {
    if is_inside() {
        assert_eq!(program(false).unwrap(), [4.5; 1000]);
        return;
    }
    for seed in ["0", "1", "2"] {
        let output = inside("cudarc_runs_on_the_emulator", seed);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !text.contains("cuda-emulator:"), "{text}");
    }
}

#[test]
fn a_fault_is_an_error_of_the_driver_and_a_report() {
    if is_inside() {
        let error = program(true).unwrap_err();
        assert_eq!(error.0, cudarc::driver::sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        return;
    }
    let output = inside("a_fault_is_an_error_of_the_driver_and_a_report", "0");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let report = "cuda-emulator: access out of bounds in add at sequences.cu:10 (PTX line ";
    assert!(text.contains(report) && text.contains("past the end of an allocation of 4000 bytes"), "{text}");
}

#[test]
fn the_size_of_memory_comes_from_the_environment() {
    if is_inside() {
        let _context = CudaContext::new(0).unwrap();
        assert_eq!(cudarc::driver::result::mem_get_info().unwrap().1, 64 << 20);
        let stream = CudaContext::new(0).unwrap().default_stream();
        let error = stream.alloc_zeros::<u8>((64 << 20) + 1).unwrap_err();
        assert_eq!(error.0, cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        return;
    }
    let output = inside("the_size_of_memory_comes_from_the_environment", "0");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
