//! The integration tests of this crate, as one program.

mod damage;
mod fixture;
mod hostile;
mod hugging_face;
mod readers;
mod save_and_load;
mod statistics;
mod stripes;

/// Counts what each thread holds.
#[global_allocator]
static ALLOCATOR: phalanx_testing::hostile::Counting = phalanx_testing::hostile::Counting;
