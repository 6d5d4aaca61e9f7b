//! The integration tests of this crate, as one program.

mod faults;
mod flood;
mod linked;
mod meta;
mod mismatches;
mod operations;
mod overlap;
mod processes;
mod secure;
mod support;
mod transport_memory;

/// Counts what each thread holds.
#[global_allocator]
static ALLOCATOR: phalanx_testing::hostile::Counting = phalanx_testing::hostile::Counting;
