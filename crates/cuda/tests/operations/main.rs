//! Every operation of the contract on a card, or on the emulator of the driver, compared with the processor.
//!
//! Needs a driver (`libcuda.so` of a card, or the emulator's, found by the dynamic loader) and NVRTC (in the folder `PHALANX_NVRTC`,
//! or found by the loader). Without them the tests say so and check nothing.
#![allow(clippy::print_stderr, reason = "a test that checks nothing says so")]

mod attention;
mod bench;
mod copies;
mod elementwise;
mod products;
mod rows;
