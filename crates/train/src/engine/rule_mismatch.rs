//! Why an optimizer cannot update the parameters of a run.

use phalanx_optim::RuleError;

/// Why an optimizer cannot update the parameters of a run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleMismatch {
    /// It contradicts itself.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// A rank has a part of a parameter that it needs whole.
    #[error(
        "the optimizer updates `{parameter}` as a whole, but {ranks} tensor-parallel ranks have a part of it each: set \
         parallel.tensor = 1, or let it update this parameter by elements"
    )]
    Part {
        /// The parameter.
        parameter: String,
        /// Ranks that have parts of it.
        ranks: u64,
    },
    /// The parts of a parameter are cut within blocks.
    #[error(
        "the optimizer updates `{parameter}` in blocks of {block} elements, but the parts of {ranks} tensor-parallel ranks are \
         runs of {run} elements: choose blocks that divide {run}, or another parallel.tensor"
    )]
    Block {
        /// The parameter.
        parameter: String,
        /// Elements of a block.
        block: usize,
        /// Ranks that have parts of it.
        ranks: u64,
        /// Consecutive elements of the whole that a part has.
        run: u64,
    },
    /// A parameter begins within a block of those that it is joined with.
    #[error(
        "the optimizer updates `{parameter}` in blocks of {block} elements, but it lies behind {before} elements of the parameters \
         that one product reads with it: choose blocks that divide {before}"
    )]
    Joined {
        /// The parameter.
        parameter: String,
        /// Elements of a block.
        block: usize,
        /// Elements before it.
        before: usize,
    },
}
