//! The collectives of tensor-parallel layers.
//!
//! Under sequence parallelism rows are gathered and scattered. `[batch, seq, width]` in row-major order is `t`
//! consecutive spans of rows, so an all_gather puts the rows in their order, whatever the batch size.

use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Group, Pending};
use phalanx_layers::{Activation, Context, Failure, Result};
use phalanx_tensor::{Category, Tensor};

/// The group of the tensor axis, with the collectives that layers need.
#[derive(Clone)]
pub struct Exchange {
    group: Arc<dyn Group>,
}

fn failed(error: CollectiveError) -> Failure {
    Failure(Box::new(error))
}

/// A tensor that is being summed over the ranks.
#[must_use]
pub enum Summing {
    /// Every rank gets the sum.
    AllReduce(Pending<Tensor>),
    /// This rank gets its rows of the sum.
    ReduceScatter(Pending<(Tensor, Tensor)>),
}

impl Summing {
    /// The sum, or this rank's rows of it.
    ///
    /// # Errors
    /// When the collective failed.
    pub fn wait(self) -> Result<Tensor> {
        match self {
            Summing::AllReduce(pending) => pending.wait().map_err(failed),
            Summing::ReduceScatter(pending) => Ok(pending.wait().map_err(failed)?.1),
        }
    }
}

impl Exchange {
    /// Collectives of `group`.
    pub fn new(group: Arc<dyn Group>) -> Exchange {
        Exchange { group }
    }

    /// Ranks of the group.
    pub fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Starts to sum x over the ranks: every rank gets the sum.
    #[track_caller]
    pub fn all_reduce(&self, x: Tensor) -> Summing {
        Summing::AllReduce(self.group.all_reduce(x))
    }

    /// Starts to sum x over the ranks: each rank gets its rows, x `[batch, seq, width]` -> `[1, rows / t, width]`.
    #[track_caller]
    pub fn reduce_scatter(&self, cx: &Context, x: Tensor) -> Summing {
        let [rows, width] = x.shape().rows_cols();
        let ranks = self.world_size();
        assert!(rows.is_multiple_of(ranks), "{rows} rows over {ranks} ranks");
        let shard = cx.activation([1, rows / ranks, width], "sequence.shard");
        Summing::ReduceScatter(self.group.reduce_scatter(x, shard, false))
    }

    /// The rows of all ranks: x `[1, rows / t, width]` -> `[batch, seq, width]`.
    ///
    /// # Errors
    /// When the collective failed.
    #[track_caller]
    pub fn all_gather(&self, cx: &Context, x: &Activation) -> Result<Activation> {
        let [rows, width] = x.shape().rows_cols();
        let [batch, seq] = cx.rows.tokens;
        assert_eq!(rows * self.world_size(), batch * seq, "rows of a micro-batch of {batch} x {seq} tokens");
        let mut whole = cx.activation([batch, seq, width], "sequence.whole");
        cx.device.place(whole.view(), cx.device.placements(x.view()));
        let start = self.rank() * rows * width;
        cx.device.copy(x.view(), whole.view_mut().range(start..start + rows * width));
        Ok(Arc::new(self.group.all_gather_in_place(whole).wait().map_err(failed)?))
    }

    /// Gathers each rank's statistics of some rows, in the order of ranks: x `[rows, n]` -> `[t, rows, n]`.
    ///
    /// # Errors
    /// When the collective failed.
    #[track_caller]
    pub fn gather_statistics(&self, cx: &Context, x: Tensor) -> Result<Tensor> {
        let ([rows, n], ranks) = (x.dims(), self.world_size());
        let all = cx.device.alloc(x.dtype(), [ranks, rows, n], Category::Workspace, "told_by_all");
        Ok(self.group.all_gather(x, all).wait().map_err(failed)?.1)
    }
}
