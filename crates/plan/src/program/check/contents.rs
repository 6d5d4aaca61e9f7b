//! Symbolic contents of buffers.

use std::collections::BTreeSet;
use std::fmt;
use std::rc::Rc;

use crate::program::action::SumGroup;

/// Contents of a part of a buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Value {
    /// Anything.
    #[default]
    Unset,
    /// Different values in the tiles of a buffer.
    Mixed,
    /// Parameters behind this number of updates.
    Parameters(u32),
    /// Optimizer states behind this number of updates.
    States(u32),
    /// The factor of the gradients of a phase, by its number.
    Factor(u32),
    /// Numbers of elements that are not finite, of the gradients of a phase.
    NotFinite(u32),
    /// A sum of gradients.
    Gradient(Rc<Terms>),
    /// Sums of squares, or terms of gradients.
    Numbers(Rc<Numbers>),
}

/// The terms of a gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    /// Number of the phase that computes them.
    pub(super) phase: u32,
    /// Micro-batch and block of each run that wrote it.
    pub(super) runs: BTreeSet<(u32, u16)>,
    /// The groups over which it is summed.
    pub(super) over: Vec<SumGroup>,
}

/// A chunk, or a stage, and the number of a piece or tile of it; 0 for all of it.
pub(super) type Part = (usize, u32);

/// Numbers of several chunks or stages in one buffer: sums of squares, or terms of gradients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Numbers {
    pub(super) phase: u32,
    /// Parts of chunks; of the norm's sums, stages.
    pub(super) of: BTreeSet<Part>,
    /// True if it is summed over ranks.
    pub(super) is_summed: bool,
}

/// Contents of a buffer: the tiles of this rank's part, and the parts of the other ranks where it has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Contents {
    pub(super) tiles: Vec<Value>,
    pub(super) others: Value,
}

impl Contents {
    /// A buffer with `tiles` tiles of this rank's part.
    pub(super) fn unset(tiles: usize) -> Contents {
        Contents { tiles: vec![Value::Unset; tiles], others: Value::Unset }
    }

    /// The contents of all tiles, if they are the same.
    pub(super) fn own(&self) -> Value {
        match self.tiles.split_first() {
            Some((first, rest)) if rest.iter().all(|other| other == first) => first.clone(),
            _ => Value::Mixed,
        }
    }

    /// Overwrites this rank's part.
    pub(super) fn set(&mut self, value: Value) {
        self.tiles.fill(value);
    }

    /// Overwrites all parts.
    pub(super) fn set_whole(&mut self, value: Value) {
        self.others = value.clone();
        self.set(value);
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unset => f.write_str("nothing"),
            Value::Mixed => f.write_str("tiles that differ"),
            Value::Parameters(updates) => write!(f, "parameters of {updates} updates"),
            Value::States(updates) => write!(f, "states of {updates} updates"),
            Value::Factor(phase) => write!(f, "the factor of phase {phase}"),
            Value::NotFinite(phase) => write!(f, "counts of phase {phase}"),
            Value::Gradient(terms) => {
                let over: Vec<&str> = terms.over.iter().map(|group| group.name()).collect();
                let (runs, phase) = (terms.runs.len(), terms.phase);
                write!(
                    f,
                    "gradients of {runs} block runs of phase {phase}, summed over [{}]",
                    over.join(", ")
                )
            }
            Value::Numbers(numbers) => write!(f, "numbers of {:?} of phase {}", numbers.of, numbers.phase),
        }
    }
}
