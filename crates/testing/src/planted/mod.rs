//! Faults planted for tests: a group whose collectives go wrong at one call site of the engine.
//!
//! A [`Planted`] group wraps another group and passes every call on to it, except the calls of one
//! [`site`](CallSite): those it drops, repeats or sends to another group ([`FaultKind`]). It works on every device:
//! in a dry run, whose plan must then report an error, and in a run, whose numbers must then differ from those of one
//! rank. The engine itself knows nothing of it.

mod group;
pub mod sites;

pub use group::{Planted, Renumbered};
pub use sites::{CallSite, Calls};

/// A planted fault: its kind, and the calls that it strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlantedFault {
    /// Which calls go wrong.
    pub site: CallSite,
    /// Effect on these calls.
    pub kind: FaultKind,
}

/// Effect of a planted fault on a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// It is left out: each rank goes on with its own values.
    Dropped,
    /// It is done, and its values are summed over the ranks once more.
    Doubled,
    /// The values are summed over another group.
    OtherGroup,
    /// Every rank adds a bias to its term of a sum, which then counts once for each rank.
    BiasedTerms,
    /// A message says that it carries another micro-batch.
    OtherMicroBatch,
}
