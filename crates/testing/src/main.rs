//! The fault campaign and trials over several hosts as a program, which `cargo xtask` builds and starts.
#![allow(clippy::print_stderr, reason = "a program of its own, for a terminal")]
#![forbid(unsafe_code)]

use std::process::ExitCode;

use phalanx_testing::{hosts, reliability};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["reliability", ref more @ ..] => reliability::arguments::run(more),
        ["hosts", ref more @ ..] => hosts::run(more),
        _ => {
            eprintln!(
                "usage: phalanx-testing reliability|hosts [OPTION]...; --help after either lists its options"
            );
            ExitCode::from(2)
        }
    }
}
