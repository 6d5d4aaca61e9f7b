//! What the tests of the simulated device share: a chain of work with copies in and out, and planted mistakes.

pub mod chain;
pub mod plants;
