//! The schedules that have a name in configurations.
//!
//! With p ranks, m micro-batches, v chunks a rank, and F, I, W the times of a rank's share of a micro-batch
//! (B = I + W): idle time of a rank, and micro-batches whose activations rank r holds until I.
//!
//! | name          | idle               | held                                   |
//! |---------------|--------------------|----------------------------------------|
//! | `model`       | m(p - 1)(F + B)    | 1                                      |
//! | `gpipe`       | (p - 1)(F + B)     | m                                      |
//! | `1f1b`        | (p - 1)(F + B)     | min(p - r, m)                          |
//! | `interleaved` | (p - 1)(F + B)/v   | (v - 1)p + 2(p - r - 1) + 1, in chunks |
//! | `zb-h1`       | (p - 1)(F + I - W) | p - r; until W: p                      |
//! | `zb-h2`       | p - 1              | 2(p - r) - 1; until W: 2p - 1          |
//! | `zb-v`        | p - 1              | at most 2p, in chunks                  |
//!
//! `interleaved` is given for m a multiple of p, `zb-h2` and `zb-v` for m >= 2p - 1 and F = I = W = 1 of each stage;
//! there no rank idles between its first and its last action.

use std::fmt;
use std::str::FromStr;

/// A schedule by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Plan {
    /// `model`: model parallelism; each micro-batch runs forward and backward through all stages before the next
    /// starts.
    ModelParallel,
    /// `gpipe`: all forwards, then all backwards.
    GPipe,
    /// `1f1b`: backward as early as possible, which bounds the activations.
    OneForwardOneBackward,
    /// `interleaved`: 1F1B with several chunks per rank, stage s on rank s % p: a shorter bubble, more messages.
    Interleaved {
        /// Stages of each rank.
        chunks: usize,
    },
    /// `zb-h1`: 1F1B with split backward, whose weight parts fill most of the bubble.
    ZeroBubbleH1,
    /// `zb-h2`: `zb-h1` with twice as many forwards ahead: no bubble in between, for twice the activations of 1F1B.
    ZeroBubbleH2,
    /// `zb-v`: split backward with two chunks per rank, placed from the first rank to the last and back: no bubble in
    /// between.
    ZeroBubbleV,
}

/// A name that no schedule has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no pipeline schedule `{given}`: expected one of {}", Plan::NAMES.join(", "))]
pub struct UnknownSchedule {
    /// The given name.
    pub given: String,
}

impl Plan {
    /// The names in configurations.
    pub const NAMES: [&'static str; 7] = ["model", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Plan::ModelParallel => "model",
            Plan::GPipe => "gpipe",
            Plan::OneForwardOneBackward => "1f1b",
            Plan::Interleaved { .. } => "interleaved",
            Plan::ZeroBubbleH1 => "zb-h1",
            Plan::ZeroBubbleH2 => "zb-h2",
            Plan::ZeroBubbleV => "zb-v",
        }
    }

    /// Stages of each rank.
    pub fn chunks(self) -> usize {
        match self {
            Plan::Interleaved { chunks } => chunks,
            Plan::ZeroBubbleV => 2,
            _ => 1,
        }
    }

    /// The same schedule with this many chunks per rank; only `interleaved` allows a choice.
    #[must_use]
    pub fn with_chunks(self, chunks: usize) -> Plan {
        match self {
            Plan::Interleaved { .. } => Plan::Interleaved { chunks },
            fixed => fixed,
        }
    }

    /// For each stage: its rank.
    pub fn placement(self, ranks: usize) -> Vec<usize> {
        let stages = ranks * self.chunks();
        match self {
            Plan::ZeroBubbleV => {
                (0..stages).map(|stage| if stage < ranks { stage } else { stages - 1 - stage }).collect()
            }
            _ => (0..stages).map(|stage| stage % ranks).collect(),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Plan {
    type Err = UnknownSchedule;

    /// `interleaved` has two chunks unless [`Plan::with_chunks`] changes that.
    fn from_str(name: &str) -> Result<Plan, UnknownSchedule> {
        let all = [
            Plan::ModelParallel,
            Plan::GPipe,
            Plan::OneForwardOneBackward,
            Plan::Interleaved { chunks: 2 },
            Plan::ZeroBubbleH1,
            Plan::ZeroBubbleH2,
            Plan::ZeroBubbleV,
        ];
        let found = all.into_iter().find(|plan| plan.name() == name);
        found.ok_or_else(|| UnknownSchedule { given: name.to_string() })
    }
}
