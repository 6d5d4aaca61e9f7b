//! The integration tests of this crate, as one program.

mod examples;
mod failures;
