//! Every operation of the contract on a card, or on the emulator of the driver, compared with the processor.
//!
//! Needs a driver (`libcuda.so` of a card, or the emulator's, found by the dynamic loader) and NVRTC (in the folder `PHALANX_NVRTC`,
//! or found by the loader). Without them the tests say so and check nothing.
#![allow(clippy::print_stderr, reason = "a test that checks nothing says so")]

mod bench;
mod copies;
mod faults;
mod gathered;
mod graphs;
mod host_stream;
mod library;
mod links;

use phalanx_cuda::checks::{GROUPS, Group, programs, rates};

use bench::Bench;

/// Runs the groups of comparisons with these numbers.
fn check(groups: std::ops::Range<usize>) {
    for group in &GROUPS[groups] {
        let Some(bench) = Bench::new(group.name) else { return };
        check_group(group, &bench);
    }
}

fn check_group(group: &Group, bench: &Bench) {
    let cases = group.run(bench);
    assert!(!cases.is_empty(), "{} compares nothing", group.name);
    for case in cases {
        assert_eq!(case.fault, None, "{}: {}", group.name, case.name);
        assert!(case.worst <= case.tolerance, "{case:?}");
    }
}

/// The first by its name: the others find what it has compiled, on all cores.
#[test]
fn all_programs_compile() {
    let Some(_bench) = Bench::new("programs") else { return };
    let refused = programs::compile(&bench::options(phalanx_cuda::Options::default())).unwrap();
    assert!(refused.is_empty(), "{} programs do not compile: {}", refused.len(), refused[0]);
}

#[test]
fn elementwise_operations_activations_optimizers_and_norms() {
    check(0..10);
}

#[test]
fn products() {
    check(10..12);
}

#[test]
fn operations_on_rows() {
    check(12..18);
}

#[test]
fn attention() {
    check(18..21);
}

#[test]
fn images() {
    check(21..GROUPS.len());
}

#[test]
fn rates_of_small_sizes_are_measured() {
    let Some(bench) = Bench::new("rates") else { return };
    let rates = rates::measure(&bench, rates::Sizes::EMULATOR).unwrap();
    assert!(rates.len() == 18 && rates.iter().all(|rate| rate.per_s() > 0.0), "{rates:?}");
}
