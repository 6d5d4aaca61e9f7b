//! A chunk's life as data: for each phase of a rank, one list of actions on named buffers, made before its dry run.
//!
//! The pipeline schedule is lowered to a *demand* ([`demand`]): which block runs which pass of which micro-batch. Passes put actions
//! between the runs: those of parameters, of gradients and of updates. They share one look-ahead (`lane.rs`), and policies
//! ([`Policies`]) are their parameters, so that policies combine; no policy has a generator of its own ([`mod@lower`]).
//!
//! Starts and waits are actions of their own: where a buffer comes back decides memory and time. What crosses the end of a phase (a
//! published chunk) is a token with a name. A number that all ranks share may guard actions ([`Decision`]).
//!
//! [`mod@check`] executes the programs of a rank symbolically, behind each other, and refuses those that break an invariant.
//! [`mod@text`] is the text of a program.
//!
//! `parallel::zero::executor` executes them; a test of `train` compares each dry run with its program, event by event.

mod action;
mod builder;
pub mod check;
pub mod chunks;
mod delayed;
pub mod demand;
mod gradients;
mod host_updates;
mod lane;
mod list;
mod live;
pub mod lower;
mod order;
mod parameters;
mod reductions;
mod stored;
mod sums;
pub mod text;
mod ties;
mod updates;
mod visits;

pub use action::{Action, Buffer, Decision, Guard, Op, SiteNumber, Span, SumGroup, Token, Work};
pub use check::{CheckError, Invariant, MemoryPeaks, check};
pub use chunks::{
    ChunkSpec, GradientBuffering, GradientPlace, Piece, Policies, RankChunks, StageChunks, Terms, TiedChunks,
};
pub use demand::{BlockRun, Pass};
pub use list::{BufferSpec, Extent, Program, Role, Stop, WITHIN_BACKWARD};
pub use lower::PHASES;
