//! Decisions before the first step, from data alone: this crate does no I/O, reads no clock and starts no thread.
//!
//! The modules, in the order in which a run needs them:
//!
//! - [`mesh`]: the coordinates of each rank; [`stages`]: the blocks of each pipeline stage; [`split`]: the elements of a
//!   parameter that a tensor-parallel rank holds; [`pipeline`]: schedules, the order in which stages run micro-batches.
//! - [`chunks`] lays the parameters out in chunks, of a size that [`chunk_search`] finds.
//! - [`trace`] is the record of a dry run: what everything below decides from.
//! - [`memory`] turns the lifetimes in a [`trace::Trace`] into offsets in one arena and its peak. [`packing`] is the
//!   algorithm; [`peak`] measures the peak, for the plan and for the real arena.
//! - [`agreement`] compares the collectives of the ranks of a group, and reports tensors that are placed wrongly.
//! - [`mod@expand`] puts the repetitions of a steady state back into the trace of an abridged dry run.
//! - [`program`] lists, before the dry run, what a rank does with its chunks in each phase, and checks these lists.
//! - [`order`] knows which chunk is needed next, and [`cost`] counts operations and bytes.
//! - [`machine`] has the rates of a machine; [`timing`] plays a trace on them, [`stretches`] is when each stream works then; [`mod@traffic`] lists what moves by message size.
//! - [`zero`] has the textbook formulas, which are printed for comparison and decide nothing.
#![forbid(unsafe_code)]

pub mod agreement;
pub mod chunk_error;
mod chunk_packing;
pub mod chunk_search;
pub mod chunks;
mod clocks;
pub mod collective_times;
pub mod cost;
pub mod expand;
pub mod links;
pub mod machine;
mod meetings;
pub mod memory;
pub mod mesh;
pub mod order;
pub mod packing;
pub mod partial_sums;
pub mod peak;
pub mod phase_time;
pub mod pipeline;
pub mod program;
pub mod slot;
pub mod split;
pub mod stages;
pub mod stretches;
pub mod timing;
pub mod trace;
pub mod traffic;
pub mod transfer;
pub mod zero;

pub use agreement::{Disagreement, PlacementError, compare, faults};
pub use chunk_error::ChunkError;
pub use chunk_search::{Candidate, Search};
pub use chunks::{BLOCK, ChunkBytes, ChunkLayout, ChunkSize, ParameterSize, Placed, Segment, lay_out};
pub use cost::{CollectiveCost, CopyCost, Cost, KernelCost};
pub use expand::{AbridgedPhase, expand};
pub use links::Link;
pub use machine::{CollectiveRate, Machine, ProductRates, WrongRate};
pub use memory::{MemoryError, MemoryPlan, PhasePlan, plan_memory, plan_memory_of};
pub use mesh::{Coordinates, Mesh, MeshError};
pub use order::{Lookahead, live_over_uses, uses_before_peak};
pub use packing::{ALIGN, DISK_ALIGN};
pub use partial_sums::PartialSums;
pub use peak::{Peak, PeakMeter};
pub use phase_time::PhaseTime;
pub use pipeline::{
    Action, Channel, Costs, HeldMicroBatches, InFlight, Kind, Message, PipelineSchedule, Plan, ScheduleError,
    Span, StageCost, Step, Stuck, Timeline, UnknownSchedule, check, check_order, generate, in_flight, lower,
    messages, simulate,
};
pub use slot::Slot;
pub use split::{Stripe, nearest_divisors};
pub use stages::{BlockCost, Cut, CutError, cut};
pub use stretches::{LANES, Lanes, Stretch, lanes_of};
pub use timing::{phase_stretches, phase_time, phase_times};
pub use traffic::{Movement, Traffic, category_peak, live_bytes, traffic};
pub use transfer::TransferRate;
pub use zero::{Precision, Textbook, ZeroStage, textbook};
