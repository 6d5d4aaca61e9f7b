//! `cargo xtask simulated`: runs the engine's tests on the simulated accelerator, with many seeds.

use std::env;
use std::process::{Command, ExitCode};

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
    for seed in 1..=seeds {
        println!("simulated accelerator, seed {seed} of {seeds}");
        match on_seed(seed, tests) {
            Ok(true) => {}
            Ok(false) => {
                eprintln!("tests failed on the simulated accelerator with seed {seed}");
                return ExitCode::FAILURE;
            }
            Err(cause) => {
                eprintln!("the tests could not run: {cause}");
                return ExitCode::from(2);
            }
        }
    }
    println!("{} with {seeds} seeds on the simulated accelerator: all passed", tests.join(", "));
    ExitCode::SUCCESS
}

/// Runs the tests with one seed.
fn on_seed(seed: u64, tests: &[&str]) -> std::io::Result<bool> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["test", "--quiet", "--package", "phalanx-train"]);
    command.args(tests.iter().flat_map(|test| ["--test", test]));
    command.env("PHALANX_TEST_DEVICE", format!("simulated:{seed}"));
    Ok(command.status()?.success())
}
