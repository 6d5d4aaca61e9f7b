//! `cargo xtask cuda-kernels`: compiles the kernels of GPUs for three architectures and checks the tables of what they use. No GPU
//! is needed.
//!
//! The compiler is NVRTC from the Python package index, installed once into the target folder: in the version of the tables, and in older
//! ones, which must compile all programs as well.

use std::env;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::test_programs;

/// A package with its version, and the folder of the library within it.
type Package = (&'static str, &'static str);

/// The one whose figures are in `crates/cuda/kernels/table`.
const OF_TABLES: Package = ("nvidia-cuda-nvrtc==13.5.37", "nvidia/cu13/lib");

/// The oldest that is supported, and those that most machines have: with PyTorch for CUDA 12.4 and 13.0.
const BEFORE: [Package; 3] = [
    ("nvidia-cuda-nvrtc-cu12==12.1.105", "nvidia/cuda_nvrtc/lib"),
    ("nvidia-cuda-nvrtc-cu12==12.4.127", "nvidia/cuda_nvrtc/lib"),
    ("nvidia-cuda-nvrtc==13.0.88", "nvidia/cu13/lib"),
];

/// Arguments of both commands that need the compiler.
pub struct Arguments {
    /// The folder of the compiler's library, if it need not be installed.
    nvrtc: Option<PathBuf>,
    /// True if a compiler that cannot be installed is reported in a line, and is no failure.
    or_skip: bool,
    /// True if the compiler of the tables is enough.
    short: bool,
}

impl Arguments {
    /// None for unknown ones.
    pub fn read(args: &[&str]) -> Option<Arguments> {
        let mut read = Arguments { nvrtc: None, or_skip: false, short: false };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match *arg {
                "--nvrtc" => read.nvrtc = Some(args.next()?.into()),
                "--or-skip" => read.or_skip = true,
                "--short" => read.short = true,
                _ => return None,
            }
        }
        Some(read)
    }
}

/// Installs the compilers, unless the folder of one is given, and runs the tests of the kernels with each.
pub fn run(args: &[&str]) -> ExitCode {
    let Some(arguments) = Arguments::read(args) else {
        eprintln!(
            "unknown arguments {args:?}; usage: cargo xtask cuda-kernels [--nvrtc FOLDER] [--short] [--or-skip]"
        );
        return ExitCode::from(2);
    };
    with_compiler(&arguments, |nvrtc| {
        let Some(programs) = test_programs::build(&[("cuda", "kernels", "")])? else { return Ok(false) };
        let passes = |nvrtc: &Path| programs[0].run(None, &[("PHALANX_NVRTC", nvrtc.into())]);
        if !passes(nvrtc)? {
            return Ok(false);
        }
        for package in BEFORE.iter().filter(|_| arguments.nvrtc.is_none() && !arguments.short) {
            println!("the same programs with {}", package.0);
            match install(package) {
                Ok(nvrtc) if !passes(&nvrtc)? => return Ok(false),
                Ok(_) => {}
                Err(cause) if arguments.or_skip => println!("skipped: {cause}"),
                Err(cause) => return Err(cause),
            }
        }
        Ok(true)
    })
}

/// Runs `body` with the folder of the compiler's library: true when all is well.
pub fn with_compiler(arguments: &Arguments, body: impl FnOnce(&Path) -> Result<bool>) -> ExitCode {
    let folder = match &arguments.nvrtc {
        Some(folder) => folder.canonicalize(),
        None => install(&OF_TABLES),
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

/// The folder of NVRTC's library in a package, installed if it is not there.
fn install((package, library): &Package) -> Result<PathBuf> {
    let folder = target()?.join(package.replace("==", "-"));
    let library = folder.join(library);
    if library.is_dir() {
        return Ok(library);
    }
    println!("installing {package} with pip into {}", folder.display());
    let options =
        ["-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1", "--timeout", "20", "--target"];
    let status = Command::new("python3").args(options).arg(&folder).arg(package).status()?;
    if status.success() && library.is_dir() {
        return Ok(library);
    }
    let text = format!(
        "pip did not install {package}: install it yourself and give --nvrtc FOLDER, that of libnvrtc.so"
    );
    Err(Error::new(ErrorKind::NotFound, text))
}
