//! Support of tests, and the programs that try the whole `phalanx` binary.
//!
//! - [`hostile`]: damaged and extreme variants of files, random numbers, an allocator that counts.
//! - [`process`]: processes that ignore no signal, and bounded waits for them.
//! - [`program_mutants`]: chunk programs with one action changed.
//! - [`planted`]: groups that plant a fault in the collectives that they pass on.
//! - [`namespaces`]: network namespaces that play hosts, with cables that can be cut.
//! - [`reliability`]: the fault campaign (`cargo xtask reliability`).
//! - [`hosts`]: training over several hosts, compared with one (`cargo xtask hosts`).
//! - [`sweeps`]: the share of many cases that a run of the tests tries.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "its program speaks to a terminal")]
#![deny(unsafe_code)] // allowed in hostile/allocation.rs alone, which wraps the system's allocator

pub mod hostile;
pub mod hosts;
pub mod namespaces;
pub mod planted;
pub mod process;
pub mod program_mutants;
pub mod reliability;
pub mod sweeps;
