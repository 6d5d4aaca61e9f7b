//! Every planted mistake is found, by a fault, a race or wrong bits; the chain without a plant is always right.
//!
//! `cargo run -p phalanx-simulated --example planted` does the same with 100 seeds, and prints the table of
//! docs/testing.md.

use std::process::Command;

use crate::support::chain;
use crate::support::plants::{Outcome, Plant, outcome, read_device_memory};

const SEEDS: u64 = 5;

/// This test binary again, for [`host_read`] alone.
fn child() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "planted::host_read"]);
    command
}

/// Test that runs in the child process. In other runs, nothing happens.
#[test]
fn host_read() {
    read_device_memory();
}

#[test]
fn the_chain_is_right_with_and_without_the_checker() {
    let right = chain::on_the_processor();
    for seed in 0..SEEDS {
        for check_races in [true, false] {
            let outcome = outcome(None, seed, check_races, &right, &child);
            assert_eq!(outcome, Outcome::Right, "seed {seed}, race checker: {check_races}");
        }
    }
}

#[test]
fn every_plant_is_found_with_the_checker() {
    let right = chain::on_the_processor();
    for (plant, what) in Plant::ALL {
        for seed in 0..SEEDS {
            let expected = if plant == Plant::HostReadsDeviceMemory { Outcome::Fault } else { Outcome::Race };
            assert_eq!(outcome(Some(plant), seed, true, &right, &child), expected, "{what}, seed {seed}");
        }
    }
}
