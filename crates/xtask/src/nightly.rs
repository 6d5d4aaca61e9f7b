//! `cargo xtask nightly`: what is too long for each submission, one command after the other, with a table at the end.

use std::process::ExitCode;
use std::time::Instant;

use crate::test_programs::cargo;

/// A name, variables of the environment, and the arguments of cargo.
type Step = (&'static str, &'static [(&'static str, &'static str)], &'static [&'static str]);

/// The steps that are cargo's alone. Those of MPI build with its bindings: they need mpicc, mpirun and libclang (Debian: libopenmpi-dev
/// openmpi-bin libclang-dev), and fail without.
const STEPS: [Step; 15] = [
    ("docs", &[("RUSTDOCFLAGS", "-D warnings")], &["doc", "--workspace", "--no-deps"]),
    // Alone: without the tokenizers that the program asks for.
    ("library-lints", &[], &["clippy", "--package", "phalanx", "--", "-D", "warnings"]),
    (
        "mpi-lints",
        &[],
        &["clippy", "--workspace", "--all-targets", "--features", "mpi", "--", "-D", "warnings"],
    ),
    (
        "mpi",
        &[("PHALANX_TEST_MPI", "required")],
        &["test", "--workspace", "--features", "mpi", "--test", "mpirun"],
    ),
    (
        "mpi-program",
        &[("PHALANX_TEST_MPI", "required")],
        &["test", "--workspace", "--features", "mpi", "--test", "program", "--", "mpi::"],
    ),
    // The tests of each submission try a share of the cases of their sweeps (crates/testing/src/sweeps.rs).
    (
        "sweeps",
        &[("PHALANX_TEST_SWEEPS", "whole"), ("LOOM_MAX_PREEMPTIONS", "3")],
        &["test", "--workspace", "--no-fail-fast"],
    ),
    // The program's tests as on a processor with tile registers: they must not expect other kernels than the program takes.
    ("tiles", &[("PHALANX_ISA", "amx-model")], &["test", "--workspace", "--test", "program"]),
    ("portable", &[("PHALANX_ISA", "portable")], &["test", "--workspace", "--test", "program"]),
    (
        "random-plans",
        &[("PHALANX_RANDOM_PLANS", "200")],
        &["test", "--workspace", "--test", "train", "--", "random_plans::"],
    ),
    // On a published model where PHALANX_SMOLLM2 names its folder; it says so if not.
    (
        "fine-tuning",
        &[],
        &[
            "test",
            "--workspace",
            "--test",
            "program",
            "--",
            "fine_tuning::",
            "--nocapture",
            "--test-threads=1",
        ],
    ),
    ("simulated", &[("PHALANX_TEST_SWEEPS", "whole")], &["xtask", "simulated", "--seeds", "2"]),
    ("simulated-seeds", &[], &["xtask", "simulated", "--seeds", "20", "--short"]),
    ("cuda-kernels", &[], &["xtask", "cuda-kernels", "--or-skip"]),
    ("cuda-emulator", &[], &["xtask", "cuda-emulator", "--or-skip", "--seeds", "20"]),
    ("reliability", &[], &["xtask", "reliability"]),
];

/// Runs the steps that `args` name, or all. A step that fails does not keep the others from running.
pub fn run(args: &[&str]) -> ExitCode {
    if let Some(unknown) = args.iter().find(|name| STEPS.iter().all(|(known, ..)| known != *name)) {
        let known: Vec<&str> = STEPS.iter().map(|(name, ..)| *name).collect();
        eprintln!("no step {unknown:?}; usage: cargo xtask nightly [{}]...", known.join(" | "));
        return ExitCode::from(2);
    }
    let mut table = String::new();
    let mut is_green = true;
    for (name, variables, arguments) in
        STEPS.iter().filter(|(name, ..)| args.is_empty() || args.contains(name))
    {
        println!("== {name}: cargo {}", arguments.join(" "));
        let started = Instant::now();
        let status = cargo().args(*arguments).envs(variables.iter().copied()).status();
        let passed = status.as_ref().is_ok_and(|status| status.success());
        let seconds = started.elapsed().as_secs();
        let outcome = match status {
            Ok(_) if passed => "passed".to_string(),
            Ok(status) => format!("failed: {status}"),
            Err(cause) => format!("could not run: {cause}"),
        };
        table += &format!("{name:<16} {:>3}:{:02}  {outcome}\n", seconds / 60, seconds % 60);
        is_green &= passed;
    }
    print!("\n{table}");
    if is_green { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
