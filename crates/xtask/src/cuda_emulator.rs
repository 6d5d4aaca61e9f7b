//! `cargo xtask cuda-emulator`: the emulator of the CUDA driver, a workspace of its own: its tests, and then the operations of the CUDA
//! device and small training runs on it. No GPU is needed.

use std::env;
use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::cuda_kernels::{self, Arguments};
use crate::test_programs::{self, TestFile, TestProgram, cargo};
use crate::workspace;

/// The file that the emulator is built as, and the names by which the dynamic loader looks for a driver, for cuBLASLt and for NCCL.
const BUILT: &str = "libphalanx_cuda_emulator.so";
const NAMES: [&str; 3] = ["libcuda.so", "libcublasLt.so", "libnccl.so.2"];

/// Test files on one card: every operation beside the processor's, training, and the program.
const TESTS: [TestFile; 3] =
    [("cuda", "operations", ""), ("train", "train", "cuda"), ("program", "program", "cuda")];

/// Test files of ranks with cards of their own, and how many cards they need.
const CARDS: ([TestFile; 2], &str) = ([("train", "train", "cards"), ("program", "program", "cards")], "4");

/// The test that runs with several orders of streams.
const ORDERS: &str = "the_order_of_streams_changes_no_bit";

/// Some tests once more, each on cards that are otherwise: the place of their program, the test, and the variable. cuBLASLt takes only
/// extents of whole 16 bytes; a block of a desktop's card has less shared memory than one of an A100; streams share 32 queues of work
/// (`CUDA_DEVICE_MAX_CONNECTIONS`); communicators never end.
const OTHERWISE: [(usize, &str, (&str, &str)); 5] = [
    (0, "library::classes_beyond_a_multiple_are_computed_apart", ("PHALANX_EMULATOR_EXTENTS", "on")),
    (0, "attention", ("PHALANX_EMULATOR_SHARED_KB", "99")),
    (0, "products", ("PHALANX_EMULATOR_SHARED_KB", "99")),
    (
        3,
        "training_between_cards_has_the_bits_of_training_through_host_memory",
        ("PHALANX_EMULATOR_QUEUES", "on"),
    ),
    (
        3,
        "a_rank_that_fails_behind_a_wait_is_named_by_the_next_wait_of_the_host",
        ("PHALANX_EMULATOR_ABORT", "off"),
    ),
];

/// Builds and tests the emulator, runs the tests on it, and then one of them with further orders of streams.
pub fn run(args: &[&str]) -> ExitCode {
    let usage = "usage: cargo xtask cuda-emulator [--nvrtc FOLDER] [--or-skip] [--seeds N]";
    let (mut seeds, mut rest) = (1, Vec::new());
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match (*arg, args.clone().next().and_then(|number| number.parse().ok())) {
            ("--seeds", Some(number)) => {
                seeds = number;
                args.next();
            }
            _ => rest.push(*arg),
        }
    }
    let Some(arguments) = Arguments::read(&rest) else {
        eprintln!("unknown arguments {rest:?}; {usage}");
        return ExitCode::from(2);
    };
    cuda_kernels::with_compiler(&arguments, |nvrtc| tests(nvrtc, seeds))
}

fn tests(nvrtc: &Path, seeds: u64) -> Result<bool> {
    let folder = cuda_kernels::target()?.join("emulator");
    // Its tests build the library, too.
    let mut own = cargo();
    own.args(["test", "--quiet", "--manifest-path", "emulator/Cargo.toml", "--target-dir"]).arg(&folder);
    if !own.current_dir(workspace::root(&env::current_dir()?)?).status()?.success() {
        return Ok(false);
    }
    let library_path = library_path(&driver_folder(&folder)?);
    let Some(programs) = test_programs::build(&[&TESTS[..], &CARDS.0].concat())? else { return Ok(false) };
    let run = |program: &TestProgram, only: Option<&str>, variables: &[(&'static str, &str)]| {
        let paths = [("PHALANX_NVRTC", nvrtc.into()), ("LD_LIBRARY_PATH", library_path.clone())];
        let others = variables.iter().map(|(name, value)| (*name, (*value).into()));
        program.run(only, &paths.into_iter().chain(others).collect::<Vec<_>>())
    };
    for (at, program) in programs.iter().enumerate() {
        let cards = if at < TESTS.len() { "1" } else { CARDS.1 };
        if !run(program, None, &[("PHALANX_EMULATOR_CARDS", cards)])? {
            return Ok(false);
        }
    }
    for (at, test, variable) in OTHERWISE {
        println!("with {}={}", variable.0, variable.1);
        let cards = [("PHALANX_EMULATOR_CARDS", CARDS.1), ("CUDA_DEVICE_MAX_CONNECTIONS", "32")];
        if !run(&programs[at], Some(test), &[&cards[..], &[variable]].concat())? {
            return Ok(false);
        }
    }
    for seed in 1..seeds {
        println!("order of streams {seed} of {}", seeds - 1);
        if !run(&programs[1], Some(ORDERS), &[("PHALANX_EMULATOR_SEED", &seed.to_string())])? {
            eprintln!("training failed on the emulator with PHALANX_EMULATOR_SEED={seed}");
            return Ok(false);
        }
    }
    Ok(true)
}

/// A folder in which the dynamic loader finds the emulator as the driver, as cuBLASLt and as NCCL.
fn driver_folder(target: &Path) -> Result<PathBuf> {
    let folder = target.join("driver");
    std::fs::create_dir_all(&folder)?;
    let built = target.join("debug/deps").join(BUILT).canonicalize().map_err(|error| {
        // Without a driver, the tests that need one skip what they check.
        Error::new(error.kind(), format!("{BUILT}, which the emulator's tests build: {error}"))
    })?;
    for link in NAMES.map(|name| folder.join(name)) {
        if std::fs::symlink_metadata(&link).is_ok() {
            std::fs::remove_file(&link)?;
        }
        std::os::unix::fs::symlink(&built, &link).map_err(|error| {
            Error::new(error.kind(), format!("{} as {}: {error}", built.display(), link.display()))
        })?;
    }
    Ok(folder)
}

/// The dynamic loader's folders, with this one first.
fn library_path(folder: &Path) -> std::ffi::OsString {
    let before = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let all = std::iter::once(folder.to_path_buf()).chain(env::split_paths(&before));
    env::join_paths(all).unwrap_or_else(|_| folder.into())
}
