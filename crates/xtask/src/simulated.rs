//! `cargo xtask simulated`: runs the engine's tests on the simulated accelerator, with many seeds.

use std::io::Result;
use std::process::ExitCode;

use crate::test_programs::{self, TestProgram};

/// Seeds that are run where nobody says how many.
const SEEDS: u64 = 20;

/// Tests of `train` that take their devices from the environment: goldens, bit tables, meshes, checkpoints, faults,
/// state outside of device memory, and random plans.
const TESTS: [&str; 8] =
    ["goldens", "bits", "mesh", "resume", "faults", "tiers", "placement", "random_plans"];

/// The selection of `--short`.
const SHORT: [&str; 2] = ["goldens", "faults"];

/// Runs the tests once for each seed; stops at the first seed that fails.
pub fn run(args: &[&str]) -> ExitCode {
    let (mut seeds, mut short) = (SEEDS, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match (*arg, rest.clone().next().and_then(|number| number.parse().ok())) {
            ("--short", _) => short = true,
            ("--seeds", Some(number)) => {
                seeds = number;
                rest.next();
            }
            _ => {
                eprintln!("unknown arguments {args:?}; usage: cargo xtask simulated [--seeds N] [--short]");
                return ExitCode::from(2);
            }
        }
    }
    let tests = if short { &SHORT[..] } else { &TESTS[..] };
    let files: Vec<_> = tests.iter().map(|test| ("train", "train", *test)).collect();
    let programs = match test_programs::build(&files) {
        Ok(Some(programs)) => programs,
        Ok(None) => return ExitCode::FAILURE,
        Err(cause) => return could_not_run(&cause),
    };
    for seed in 1..=seeds {
        println!("simulated accelerator, seed {seed} of {seeds}");
        match on_seed(seed, &programs) {
            Ok(true) => {}
            Ok(false) => {
                eprintln!("tests failed on the simulated accelerator with seed {seed}");
                return ExitCode::FAILURE;
            }
            Err(cause) => return could_not_run(&cause),
        }
    }
    println!("{} with {seeds} seeds on the simulated accelerator: all passed", tests.join(", "));
    ExitCode::SUCCESS
}

fn could_not_run(cause: &std::io::Error) -> ExitCode {
    eprintln!("the tests could not run: {cause}");
    ExitCode::from(2)
}

/// Runs the tests with one seed, up to the first file that fails.
fn on_seed(seed: u64, programs: &[TestProgram]) -> Result<bool> {
    let device = [("PHALANX_TEST_DEVICE", format!("simulated:{seed}").into())];
    for program in programs {
        if !program.run(None, &device)? {
            return Ok(false);
        }
    }
    Ok(true)
}
