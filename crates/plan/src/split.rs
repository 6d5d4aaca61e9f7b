//! Position of a tensor-parallel rank's part of a parameter in the whole parameter.
//!
//! A parameter is held whole by every rank of the tensor axis, or split along one dimension, which may
//! pack several equal sub-tensors (GPT-2's `c_attn` is q, k and v side by side: each is split on its
//! own). Flattened row-major, a split along any dimension is a comb: equal runs of elements that the ranks
//! take in turn. [`Stripe`] is that comb, three numbers; files, loads and exports need no other
//! knowledge of how a tensor was split. After Megatron-LM's column- and row-parallel layers.
//!
//! ```text
//! c_attn [hidden, 3 * hidden], dim 1, 3 parts, 2 ranks: each row is
//!   | q q q q q q | k k k k k k | v v v v v v |
//!   | 0 0 0 1 1 1 | 0 0 0 1 1 1 | 0 0 0 1 1 1 |   rank        run = hidden / 2
//! ```

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The elements of a flattened tensor that one part holds: runs of `run` elements are dealt in turn to `ranks` ranks,
/// and this is the part of `rank`.
///
/// Element `l` of the part is element `(l / run) * run * ranks + rank * run + l % run` of the whole. One formula
/// suffices: let a tensor of `outer` x `size` x `inner` elements be split along the middle dimension, of `parts` packed
/// sub-tensors, over `ranks`. For each of the `outer * parts` pairs of an outer index and a sub-tensor, `size / parts *
/// inner` consecutive elements belong to it, of which each rank takes the `rank`-th of `ranks` equal consecutive runs.
/// So `run = size / parts / ranks * inner`, and the pairs follow each other without a gap. Rows (dim 0, one part) are
/// the case of one pair; a whole tensor is the case of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stripe {
    /// Length of a run; at least 1.
    pub run: u64,
    /// Number of ranks; 1 for a whole tensor.
    pub ranks: u64,
    /// The rank of this part; below `ranks`.
    pub rank: u64,
}

impl Stripe {
    /// All of a tensor of `elements` elements.
    pub fn whole(elements: u64) -> Stripe {
        Stripe { run: elements.max(1), ranks: 1, rank: 0 }
    }

    /// Runs of `run` elements dealt in turn to so many parts, of which this is number `index`.
    pub fn new(run: u64, parts: u64, index: u64) -> Stripe {
        Stripe { run, ranks: parts, rank: index }
    }

    /// Which of how many parts this is.
    pub fn part(&self) -> (u64, u64) {
        (self.rank, self.ranks)
    }

    /// Returns whether this is all of the tensor, in its own order.
    pub fn is_whole(&self) -> bool {
        self.ranks == 1
    }

    /// Elements of this part of a tensor of `whole` elements. If each rank has a single run (rows of a vocabulary), the
    /// last rank may have fewer. `None` if the stripe does not fit the tensor (numbers read from a file may be
    /// anything).
    pub fn local_elements(&self, whole: u64) -> Option<u64> {
        if self.run == 0 || self.rank >= self.ranks {
            return None;
        }
        let turn = self.run.checked_mul(self.ranks)?;
        (whole.is_multiple_of(turn) || whole < turn).then(|| self.locals_before(whole))
    }

    /// The element of the whole that corresponds to element `local` of this part.
    pub fn global(&self, local: u64) -> u64 {
        (local / self.run) * self.run * self.ranks + self.rank * self.run + local % self.run
    }

    /// Number of elements of this part before element `global` of the whole, which is also the first element of the
    /// part at or after it.
    pub fn locals_before(&self, global: u64) -> u64 {
        let turn = self.run * self.ranks;
        let before_turn = global / turn * self.run;
        before_turn + (global % turn).saturating_sub(self.rank * self.run).min(self.run)
    }

    /// Number of elements, starting at `local`, that are also consecutive in the whole.
    pub fn run_left(&self, local: u64) -> u64 {
        if self.is_whole() { u64::MAX - local } else { self.run - local % self.run }
    }

    /// Splits the elements `local` of this part into ranges that are consecutive in the whole. Yields, in order, each
    /// range as elements of the part and as elements of the whole.
    pub fn runs(&self, local: Range<u64>) -> impl Iterator<Item = (Range<u64>, Range<u64>)> + use<> {
        let stripe = *self;
        let mut at = local.start;
        std::iter::from_fn(move || {
            let count = stripe.run_left(at).min(local.end.checked_sub(at)?);
            let (from, global) = (at, stripe.global(at));
            at += count;
            (count > 0).then_some((from..at, global..global + count))
        })
    }
}

/// As messages name it: `stripe 1 of 0..4, runs of 96`.
impl fmt::Display for Stripe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stripe { run, ranks, rank } = self;
        if self.is_whole() {
            f.write_str("whole")
        } else {
            write!(f, "stripe {rank} of 0..{ranks}, runs of {run}")
        }
    }
}

/// The divisors of `n` (at least 1) around `wanted`: the largest that is not above it and the smallest
/// that is not below it, smallest first; one number where these are the same or only one exists.
///
/// Tries the numbers up to the root of `n`.
pub fn nearest_divisors(n: usize, wanted: usize) -> Vec<usize> {
    let (mut below, mut above) = (None::<usize>, None::<usize>);
    for divisor in divisors(n) {
        if divisor <= wanted {
            below = below.max(Some(divisor));
        }
        if divisor >= wanted {
            above = Some(above.map_or(divisor, |smallest| smallest.min(divisor)));
        }
    }
    let mut found: Vec<usize> = below.into_iter().chain(above).collect();
    found.dedup();
    found
}

/// All divisors of `n`, unordered; the root of a square occurs twice.
pub(crate) fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n.isqrt()).filter(move |low| n.is_multiple_of(*low)).flat_map(move |low| [low, n / low])
}

/// `2 and 5`
pub(crate) fn any_of(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(" and ")
}
