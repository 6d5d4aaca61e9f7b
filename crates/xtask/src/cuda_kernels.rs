//! `cargo xtask cuda-kernels`: compiles the kernels of GPUs for three architectures and checks the tables of what they use. No GPU
//! is needed.
//!
//! The compiler is NVRTC from the Python package index, in one version, installed once into the target folder.

use std::env;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The package and its version, whose figures are in `crates/cuda/kernels/table`.
const PACKAGE: &str = "nvidia-cuda-nvrtc==13.5.37";

/// The folder of the library within the package.
const LIBRARY: &str = "nvidia/cu13/lib";

/// Installs the compiler, unless a folder is given, and runs the tests of the kernels.
pub fn run(args: &[&str]) -> ExitCode {
    let folder = match args {
        [] => None,
        ["--nvrtc", folder] => Some(PathBuf::from(folder)),
        _ => {
            eprintln!("unknown arguments {args:?}; usage: cargo xtask cuda-kernels [--nvrtc FOLDER]");
            return ExitCode::from(2);
        }
    };
    match check(folder) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(cause) => {
            eprintln!("the kernels could not be checked: {cause}");
            ExitCode::from(2)
        }
    }
}

fn check(folder: Option<PathBuf>) -> Result<bool> {
    let folder = match folder {
        Some(folder) => folder.canonicalize()?,
        None => install()?,
    };
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["test", "--package", "phalanx-cuda", "--test", "kernels"]);
    Ok(command.env("PHALANX_NVRTC", folder).status()?.success())
}

/// The folder of NVRTC's library, installed if it is not there.
fn install() -> Result<PathBuf> {
    let root = crate::workspace::root(&env::current_dir()?)?;
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let folder = target.join(PACKAGE.replace("==", "-"));
    let library = folder.join(LIBRARY);
    if library.is_dir() {
        return Ok(library);
    }
    println!("installing {PACKAGE} with pip into {}", folder.display());
    let installed = pip_install(&folder)?;
    if installed && library.is_dir() {
        return Ok(library);
    }
    let text = format!(
        "pip did not install {PACKAGE}: install it yourself and give --nvrtc FOLDER, that of libnvrtc.so"
    );
    Err(Error::new(ErrorKind::NotFound, text))
}

fn pip_install(folder: &Path) -> Result<bool> {
    let mut command = Command::new("python3");
    command.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(folder).arg(PACKAGE);
    Ok(command.status()?.success())
}
