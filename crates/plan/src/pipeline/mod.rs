//! Pipeline schedules as data: which rank runs which stage on which micro-batch, and when.
//!
//! [`action`] and [`schedule`] are the data, and [`mod@text`] is their text format, which is PyTorch's. [`names`] lists the
//! schedules that have a name, and [`mod@generate`] generates them (`one_chunk`, `interleaved`, `zero_bubble`).
//! [`mod@check`] refuses schedules that cannot train. [`mod@lower`] adds the messages between ranks, and [`walk`] defines
//! when a rank waits, for the deadlock check and for the [`timeline`] of [`mod@simulate`]. [`held`] counts activations,
//! and [`mod@depth`] the messages that channels must hold. [`mod@abridge`] leaves out the repetitions of a steady state
//! for a dry run. [`error`] has the errors. The crate `drawing` draws schedules.
//!
//! Sources: GPipe (Huang et al., arXiv 1811.06965), 1F1B (Narayanan et al., PipeDream, SOSP 2019),
//! interleaved (Narayanan et al., arXiv 2104.04473), zero bubble (Qi et al., arXiv 2401.10241).

/// Maximum number of pipeline ranks of a schedule: no model has more blocks.
pub const MAX_RANKS: usize = 2048;

/// Maximum number of cells of a schedule, empty ones included, so that it is generated, checked and lowered in seconds.
pub const MAX_CELLS: usize = 1 << 21;

pub mod abridge;
pub mod action;
pub mod check;
pub mod depth;
pub mod error;
pub mod generate;
pub mod held;
mod interleaved;
pub mod lower;
pub mod names;
mod one_chunk;
pub mod schedule;
pub mod simulate;
pub mod text;
pub mod timeline;
pub mod walk;
mod zero_bubble;

pub use abridge::{Abridged, Omitted, abridge};
pub use action::{Action, Kind};
pub use check::{check, check_order};
pub use depth::depth;
pub use error::ScheduleError;
pub use generate::generate;
pub use held::{HeldMicroBatches, InFlight, in_flight};
pub use lower::{Channel, Message, Step, lower, lower_rank, messages};
pub use names::{Plan, UnknownSchedule};
pub use schedule::PipelineSchedule;
pub use simulate::{Costs, StageCost, simulate};
pub use timeline::{Span, Timeline};
pub use walk::Stuck;
