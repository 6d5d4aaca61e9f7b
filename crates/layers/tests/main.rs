//! The integration tests of this crate, as one program.

mod checkpointing;
#[path = "../../cpu/tests/cpu/differences.rs"]
#[allow(dead_code, reason = "one function of it serves here")]
mod differences;
mod dropout;
mod fork;
mod frozen;
mod head;
mod images;
mod joined;
mod lora;
mod rig;
mod rotary;
mod split_backward;
