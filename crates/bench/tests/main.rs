//! The integration tests of this crate, as one program.

mod agreement;
mod asynchronous;
mod convnet;
mod data_parallel;
mod golden;
#[path = "../../train/tests/rig/mod.rs"]
#[allow(dead_code, reason = "one part of it serves here")]
mod rig;
