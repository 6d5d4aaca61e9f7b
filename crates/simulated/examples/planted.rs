//! The table of planted mistakes: how many of 100 seeds find each, with the race checker and without it.
//!
//! `cargo run -p phalanx-simulated --example planted [SEEDS]`
#![allow(clippy::print_stdout, reason = "for who runs the example")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::process::Command;

use support::chain;
use support::plants::{HOST_READ, Outcome, Plant, outcome, read_device_memory};

fn main() {
    if std::env::var_os(HOST_READ).is_some() {
        return read_device_memory();
    }
    let seeds: u64 = std::env::args().nth(1).map_or(100, |text| text.parse().expect("a number of seeds"));
    let child = || Command::new(std::env::current_exe().expect("this program has a path"));
    let right = chain::on_the_processor();
    println!("| planted mistake | with the checker: race or fault | without: wrong bits or fault |");
    println!("|---|---|---|");
    let plants = Plant::ALL.map(|(plant, what)| (Some(plant), what));
    for (plant, what) in [(None, "none")].into_iter().chain(plants) {
        let found = [true, false].map(|check_races| {
            let is_found = |seed: &u64| outcome(plant, *seed, check_races, &right, &child) != Outcome::Right;
            (0..seeds).filter(is_found).count()
        });
        println!("| {what} | {} of {seeds} | {} of {seeds} |", found[0], found[1]);
    }
}
