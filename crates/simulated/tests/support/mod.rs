//! What the tests of the simulated device share: a chain of work with copies in and out, and planted mistakes.
#![allow(dead_code)] // each test binary uses its part

pub mod chain;
pub mod plants;
