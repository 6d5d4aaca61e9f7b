//! The integration tests of this crate, as one program.

mod device;
mod disk;
mod planted;
mod support;
