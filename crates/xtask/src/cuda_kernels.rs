//! `cargo xtask cuda-kernels`: compiles the kernels of GPUs for three architectures and checks the tables of what they use. No GPU
//! is needed.
//!
//! The compiler is NVRTC from the Python package index, in one version, installed once into the target folder.

use std::env;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::test_programs;

/// The package and its version, whose figures are in `crates/cuda/kernels/table`.
const PACKAGE: &str = "nvidia-cuda-nvrtc==13.5.37";

/// The folder of the library within the package.
const LIBRARY: &str = "nvidia/cu13/lib";

/// What both commands that need the compiler are told.
pub struct Arguments {
    /// The folder of the compiler's library, if it need not be installed.
    nvrtc: Option<PathBuf>,
    /// Whether a compiler that cannot be installed is a line and no failure.
    or_skip: bool,
}

impl Arguments {
    /// None for unknown ones.
    pub fn read(args: &[&str]) -> Option<Arguments> {
        let mut read = Arguments { nvrtc: None, or_skip: false };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match *arg {
                "--nvrtc" => read.nvrtc = Some(args.next()?.into()),
                "--or-skip" => read.or_skip = true,
                _ => return None,
            }
        }
        Some(read)
    }
}

/// Installs the compiler, unless a folder is given, and runs the tests of the kernels.
pub fn run(args: &[&str]) -> ExitCode {
    let Some(arguments) = Arguments::read(args) else {
        eprintln!("unknown arguments {args:?}; usage: cargo xtask cuda-kernels [--nvrtc FOLDER] [--or-skip]");
        return ExitCode::from(2);
    };
    with_compiler(&arguments, |nvrtc| {
        let Some(programs) = test_programs::build(&[("cuda", "kernels")])? else { return Ok(false) };
        programs[0].run(&["--quiet"], &[("PHALANX_NVRTC", nvrtc.into())])
    })
}

/// Runs `body` with the folder of the compiler's library: true when all is well.
pub fn with_compiler(arguments: &Arguments, body: impl FnOnce(&Path) -> Result<bool>) -> ExitCode {
    let folder = match &arguments.nvrtc {
        Some(folder) => folder.canonicalize(),
        None => install(),
    };
    let done = match folder {
        Ok(folder) => body(&folder),
        Err(cause) if arguments.or_skip => {
            println!("kernels of GPUs: skipped, because there is no compiler: {cause}");
            return ExitCode::SUCCESS;
        }
        Err(cause) => Err(cause),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(cause) => {
            eprintln!("the kernels could not be checked: {cause}");
            ExitCode::from(2)
        }
    }
}

/// The target folder.
pub fn target() -> Result<PathBuf> {
    let root = crate::workspace::root(&env::current_dir()?)?;
    Ok(env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from))
}

/// The folder of NVRTC's library, installed if it is not there.
fn install() -> Result<PathBuf> {
    let folder = target()?.join(PACKAGE.replace("==", "-"));
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
    command
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--retries",
            "1",
            "--timeout",
            "20",
            "--target",
        ])
        .arg(folder)
        .arg(PACKAGE);
    Ok(command.status()?.success())
}
