//! The integration tests of this crate, as one program.

mod checkpointing;
mod dropout;
mod fork;
mod frozen;
mod head;
mod joined;
mod rig;
mod rotary;
mod split_backward;
