//! Shared code of the simulated device's tests: a chain of work with copies in and out, and planted mistakes.

pub mod chain;
pub mod plants;
