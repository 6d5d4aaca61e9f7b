//! The integration tests of this crate, as one program.

mod agreement;
mod chunks;
mod generator;
mod memory;
mod mesh;
mod order_and_cost;
mod pipeline_abridge;
mod pipeline_schedules;
mod pipeline_times;
mod program;
mod program_mutants;
mod split;
mod stages;
mod timing;
