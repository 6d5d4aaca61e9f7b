//! The places in the engine that start collectives, by name.
//!
//! A place is known by its source file and by the kind of collective it starts, so that it stays the same place when
//! lines move.

use phalanx_collectives::Call;
use phalanx_plan::trace::CollectiveOp;

/// Collectives that a test can make go wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CallSite {
    /// Its name in messages of tests.
    pub name: &'static str,
    /// End of the path of the source file that starts it.
    pub file: &'static str,
    /// Which of the file's collectives.
    pub calls: Calls,
    /// If several lines of the file start such collectives: the number of the line in the order of their first calls,
    /// from 0; None for all lines.
    pub line: Option<usize>,
}

impl std::fmt::Debug for CallSite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Kinds of collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// all_reduce and reduce_scatter.
    Sums,
    /// all_gather into a buffer that has this rank's part already.
    GathersInPlace,
    /// all_gather from one buffer into another.
    Gathers,
    /// Sends of activations to the next stage of a pipeline.
    Sends,
}

impl Calls {
    /// Returns whether `call` is of this kind.
    pub fn contain(self, call: &Call) -> bool {
        match self {
            Calls::Sums => matches!(call.op, CollectiveOp::AllReduce | CollectiveOp::ReduceScatter),
            Calls::GathersInPlace => call.op == CollectiveOp::AllGather && call.buffers.source.is_none(),
            Calls::Gathers => call.op == CollectiveOp::AllGather && call.buffers.source.is_some(),
            Calls::Sends => call.op == CollectiveOp::Send,
        }
    }
}

const fn site(name: &'static str, file: &'static str, calls: Calls) -> CallSite {
    CallSite { name, file, calls, line: None }
}

/// Forward of a row layer: the sum of the ranks' terms.
pub const ROW_Y: CallSite = site("row.y", "tensor/row.rs", Calls::Sums);

/// Backward of a row layer under sequence parallelism: all rows of dy.
pub const ROW_DY: CallSite = site("row.dy", "tensor/row.rs", Calls::GathersInPlace);

/// Forward of a column layer under sequence parallelism: all rows of x.
pub const COLUMN_X: CallSite =
    CallSite { line: Some(0), ..site("column.x", "tensor/column.rs", Calls::GathersInPlace) };

/// Backward of a column layer under sequence parallelism: all rows of x once more.
pub const COLUMN_X_AGAIN: CallSite =
    CallSite { line: Some(1), ..site("column.again", "tensor/column.rs", Calls::GathersInPlace) };

/// Backward of a column layer: the sum of the ranks' dx.
pub const COLUMN_DX: CallSite = site("column.dx", "tensor/column.rs", Calls::Sums);

/// Norms over all heads of queries and of keys: the sums of each rank's heads, in both directions.
pub const HEAD_NORM: CallSite = site("head_norm.sums", "parallel/src/tensor/mod.rs", Calls::Sums);

/// Forward of an embedding: the sum of what each rank has looked up.
pub const EMBEDDING_Y: CallSite = site("embedding.y", "tensor/embedding.rs", Calls::Sums);

/// Backward of an embedding under sequence parallelism: all rows of dy.
pub const EMBEDDING_DY: CallSite = site("embedding.dy", "tensor/embedding.rs", Calls::GathersInPlace);

/// The head under sequence parallelism: all rows of its input.
pub const HEAD_X: CallSite = site("head.x", "tensor/head.rs", Calls::GathersInPlace);

/// The head: the statistics of each rank's logits.
pub const HEAD_STATISTICS: CallSite = site("head.statistics", "tensor/head.rs", Calls::Gathers);

/// The head: the sum of the ranks' dx.
pub const HEAD_DX: CallSite = site("head.dx", "tensor/head.rs", Calls::Sums);

/// Gradients of what every tensor-parallel rank has whole, under sequence parallelism.
pub const PARTIAL_SUM: CallSite = site("partial.sum", "program/sums.rs", Calls::Sums);

/// Gradients of a parameter of which several stages have a copy.
pub const TIED_SUM: CallSite = site("tied.sum", "program/ties.rs", Calls::Sums);

/// Gradients of the ranks of the data axis.
pub const DATA_REDUCE: CallSite = site("data.reduce", "program/reductions.rs", Calls::Sums);

/// Activations on their way to the next stage.
pub const PIPELINE_SEND: CallSite = site("pipeline.send", "parallel/src/pipeline.rs", Calls::Sends);
