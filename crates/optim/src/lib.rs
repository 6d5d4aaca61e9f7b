//! Update rules and learning rates. Both know flat ranges and numbers; ranks, chunks and stages are
//! somebody else's.
#![forbid(unsafe_code)]

pub mod rule;
pub mod schedule;

pub use rule::Rule;
pub use schedule::Schedule;
