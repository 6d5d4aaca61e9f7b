//! Decisions made before the first step, from pure data: no input, output, clock or thread.
//!
//! In the order in which a run needs them: [`chunks`] lays the parameters out in chunks;
//! [`memory`] turns the lifetimes of a [`phalanx_trace::Trace`] into offsets of one arena and its
//! peak, with [`packing`] as the algorithm and [`peak`] as the meter that the real arena shares;
//! [`agreement`] compares what the ranks of a group will say to each other, and reports tensors that are
//! placed wrongly on the mesh; [`order`] answers which
//! chunk is needed next; [`cost`] counts the work; [`zero`] holds the textbook formulas that are
//! printed beside all of it and decide nothing. Where parallel axes are composed, [`mesh`] says which rank
//! stands where, [`stages`] which blocks a pipeline stage holds, [`pipeline`] in which order stages run
//! micro-batches, and [`split`] which elements of a parameter a tensor-parallel rank holds.
#![forbid(unsafe_code)]

pub mod agreement;
pub mod chunk_search;
pub mod chunks;
pub mod cost;
pub mod memory;
pub mod mesh;
pub mod order;
pub mod packing;
pub mod peak;
pub mod pipeline;
pub mod split;
pub mod stages;
pub mod zero;

pub use agreement::{Disagreement, PlacementError, compare, faults};
pub use chunk_search::{Candidate, Search};
pub use chunks::{BLOCK, ChunkError, ChunkLayout, ChunkSize, ParameterSize, Placed, Segment, lay_out};
pub use cost::{CollectiveCost, CopyCost, Cost, KernelCost};
pub use memory::{MemoryError, MemoryPlan, PhasePlan, Slot, plan_memory, plan_memory_of};
pub use mesh::{Coordinates, Mesh, MeshError};
pub use order::{Lookahead, use_order};
pub use packing::ALIGN;
pub use peak::{Peak, PeakMeter};
pub use pipeline::{
    Action, Channel, Costs, HeldMicroBatches, InFlight, Kind, Message, Plan, Schedule, ScheduleError, Span,
    StageCost, Step, Stuck, Timeline, check, check_order, generate, in_flight, lower, messages, simulate,
};
pub use split::{Split, SplitError, Stripe, nearest_divisors};
pub use stages::{BlockCost, Cut, CutError, cut};
pub use zero::{Precision, Stage, Textbook, textbook};
