//! The integration tests of this crate, as one program.

#[allow(clippy::too_many_lines, reason = "a list of cases")]
mod control;
mod processes;
