//! Cuts of a model's blocks into pipeline stages.
//!
//! Stages are consecutive and none is empty. `Uniform` deals out Transformer blocks in equal numbers and
//! leaves the embedding to the first stage, the final norm and head to the last, as Megatron-LM does;
//! `Parameters` and `Balanced` (DeepSpeed's words) minimise the largest stage, exactly: with B blocks
//! and S stages a table of B * S sub-problems, each the least over B first stages, B * B * S steps. Of cuts
//! that are equally good the one with the earliest cuts is taken, so all ranks find the same.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::split::{any_of, nearest_divisors};

/// The cost of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCost {
    /// Operations of its forward and backward.
    pub flops: u64,
    /// Elements of its parameters.
    pub parameters: u64,
    /// Memory that it needs on the rank that holds it.
    pub bytes: u64,
}

/// The criterion by which blocks are divided into stages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// The same number of inner blocks in each stage. Blocks before them go to the first stage, blocks after them to
    /// the last.
    Uniform {
        /// The inner blocks: the Transformer blocks.
        inner: Range<usize>,
    },
    /// Minimises the parameters of the largest stage, over all blocks.
    Parameters,
    /// Minimises the operations of the slowest stage, over all blocks.
    Balanced,
}

/// An error of a cut.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// No stages.
    #[error("a model cannot be cut into 0 stages: expected at least 1")]
    NoStages,
    /// The caller's inner blocks are not among the blocks.
    #[error("blocks {} to {} cannot be the inner ones of {blocks} blocks", .inner.start, .inner.end)]
    Inner {
        /// The range given.
        inner: Range<usize>,
        /// Blocks that there are.
        blocks: usize,
    },
    /// More stages than blocks.
    #[error("{blocks} blocks cannot be cut into {stages} stages: at most {blocks} are possible")]
    TooManyStages {
        /// Number of blocks.
        blocks: usize,
        /// Stages asked for.
        stages: usize,
    },
    /// The number of inner blocks is not a multiple of the number of stages.
    #[error(
        "{inner} blocks cannot be shared equally by {stages} stages: the nearest numbers of stages that \
         can are {}; or balance the stages by operations or parameters", any_of(.nearest)
    )]
    Uneven {
        /// Inner blocks.
        inner: usize,
        /// Stages asked for.
        stages: usize,
        /// Stages that divide, smallest first.
        nearest: Vec<usize>,
    },
    /// No cut fits the memory.
    #[error(
        "a stage may hold {limit_bytes} bytes, and this cut into {stages} stages needs {needed_bytes} in the \
         largest: {}", stages_that_fit(*.enough)
    )]
    Memory {
        /// Bytes that a stage may hold.
        limit_bytes: u64,
        /// Stages asked for.
        stages: usize,
        /// Bytes of the largest stage, in the uniform cut or in the cut that minimises it.
        needed_bytes: u64,
        /// Minimum number of stages that fit, with any cut; `None` when one block alone is too large.
        enough: Option<usize>,
    },
}

/// Cuts `blocks` into `stages` consecutive ranges, first stage first. `limit_bytes` is what one stage may
/// hold; cuts above it do not count.
///
/// # Errors
/// [`CutError`]: 0 stages, more than there are blocks, inner blocks that do not divide, or no cut
/// within the limit.
pub fn cut(
    blocks: &[BlockCost],
    stages: usize,
    by: &Cut,
    limit_bytes: Option<u64>,
) -> Result<Vec<Range<usize>>, CutError> {
    if stages == 0 {
        return Err(CutError::NoStages);
    }
    let bytes = PrefixSums::new(blocks.iter().map(|block| block.bytes));
    let limit = limit_bytes.map_or(u128::MAX, u128::from);
    let found = match by {
        Cut::Uniform { inner } => {
            let ranges = uniform(blocks.len(), inner, stages)?;
            let needed = ranges.iter().map(|range| bytes.of(range.clone())).max().unwrap_or(0);
            if needed <= limit { Ok(ranges) } else { Err(needed) }
        }
        Cut::Parameters | Cut::Balanced => {
            if stages > blocks.len() {
                return Err(CutError::TooManyStages { blocks: blocks.len(), stages });
            }
            let weight =
                |block: &BlockCost| if *by == Cut::Balanced { block.flops } else { block.parameters };
            let weights = PrefixSums::new(blocks.iter().map(weight));
            smallest_maximum(&weights, stages, &|range| bytes.of(range) <= limit)
                .ok_or_else(|| largest(&bytes, stages))
        }
    };
    found.map_err(|needed| CutError::Memory {
        limit_bytes: limit_bytes.unwrap_or(u64::MAX),
        stages,
        needed_bytes: u64::try_from(needed).unwrap_or(u64::MAX),
        enough: fewest(&bytes, limit),
    })
}

fn uniform(blocks: usize, inner: &Range<usize>, stages: usize) -> Result<Vec<Range<usize>>, CutError> {
    if inner.is_empty() || inner.end > blocks {
        return Err(CutError::Inner { inner: inner.clone(), blocks });
    }
    if stages > inner.len() {
        return Err(CutError::TooManyStages { blocks: inner.len(), stages });
    }
    if !inner.len().is_multiple_of(stages) {
        let nearest = nearest_divisors(inner.len(), stages);
        return Err(CutError::Uneven { inner: inner.len(), stages, nearest });
    }
    let share = inner.len() / stages;
    let edge = |stage| match stage {
        0 => 0,
        stage if stage == stages => blocks,
        stage => inner.start + stage * share,
    };
    Ok((0..stages).map(|stage| edge(stage)..edge(stage + 1)).collect())
}

/// The cut into `stages` that minimises the weight of the largest stage, among the cuts in which every stage is
/// allowed; the earliest of equal ones. `None` when no cut is allowed.
fn smallest_maximum(
    weights: &PrefixSums,
    stages: usize,
    allowed: &dyn Fn(Range<usize>) -> bool,
) -> Option<Vec<Range<usize>>> {
    let blocks = weights.len();
    // best[s][i]: the minimum, over cuts of blocks i.. into s + 1 stages, of the largest weight; `None` when
    // impossible.
    let one = |start| (start < blocks && allowed(start..blocks)).then(|| weights.of(start..blocks));
    let mut best: Vec<Vec<Option<u128>>> = vec![(0..=blocks).map(one).collect()];
    for fewer in 0..stages - 1 {
        let with_rest = |start: usize, end: usize| {
            let rest = best[fewer][end].filter(|_| allowed(start..end))?;
            Some(rest.max(weights.of(start..end)))
        };
        let row = (0..=blocks).map(|start| (start + 1..blocks).filter_map(|end| with_rest(start, end)).min());
        let row = row.collect();
        best.push(row);
    }
    let goal = best[stages - 1][0]?;
    let mut start = 0;
    let ranges = (0..stages).rev().map(|after| {
        let fits = |end: &usize| {
            let rest =
                if after == 0 { *end == blocks } else { best[after - 1][*end].is_some_and(|b| b <= goal) };
            rest && allowed(start..*end) && weights.of(start..*end) <= goal
        };
        let end = (start + 1..=blocks).find(fits).expect("the table holds a cut of this weight");
        let range = start..end;
        start = end;
        range
    });
    Some(ranges.collect())
}

/// The weight of the largest stage in the cut that minimises it.
fn largest(weights: &PrefixSums, stages: usize) -> u128 {
    let ranges = smallest_maximum(weights, stages, &|_| true).expect("as many blocks as stages");
    ranges.into_iter().map(|range| weights.of(range)).max().unwrap_or(0)
}

/// Minimum number of stages whose weights stay within `limit`: each takes as many blocks as fit.
fn fewest(weights: &PrefixSums, limit: u128) -> Option<usize> {
    let (mut stages, mut start) = (0, 0);
    while start < weights.len() {
        let end = (start + 1..=weights.len()).take_while(|&end| weights.of(start..end) <= limit).last()?;
        (stages, start) = (stages + 1, end);
    }
    Some(stages)
}

/// Sums of consecutive weights.
struct PrefixSums {
    /// The sum of the weights before each block, and the total.
    before: Vec<u128>,
}

impl PrefixSums {
    fn new(weights: impl Iterator<Item = u64>) -> PrefixSums {
        let mut sum = 0;
        let after = weights.map(|weight| {
            sum += u128::from(weight);
            sum
        });
        PrefixSums { before: std::iter::once(0).chain(after).collect() }
    }

    fn len(&self) -> usize {
        self.before.len() - 1
    }

    fn of(&self, range: Range<usize>) -> u128 {
        self.before[range.end] - self.before[range.start]
    }
}

fn stages_that_fit(enough: Option<usize>) -> String {
    let advice = "split layers over tensor ranks or shard states";
    match enough {
        Some(stages) => format!("{stages} are the fewest that can fit, cut anywhere; or {advice}"),
        None => format!("one block alone is larger; {advice}"),
    }
}
