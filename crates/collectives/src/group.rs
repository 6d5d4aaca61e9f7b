//! The one trait of process groups, and its typed operations.
//!
//! Implementations provide [`Group::submit`]; callers use the methods of `dyn Group`, which take
//! tensors, remember the caller's place in the source and return [`Pending`]. Calls of one group
//! happen in the order of submission on every rank, beside the caller's computation.

use phalanx_plan::trace::{Axis, CollectiveOp, Memory};
use phalanx_tensor::Tensor;

use crate::call::{Buffers, Call};
use crate::error::CollectiveError;
use crate::mover::Mover;
use crate::pending::Pending;
use crate::statistics::Statistics;

/// Ranks that do collectives together. Passed as `&dyn Group`, never ambient.
pub trait Group: Send + Sync {
    /// The name of the group: `data`, `tensor`, `pipeline`, or what it is used for.
    fn name(&self) -> &'static str;

    /// The axes of the mesh that the group runs over, along which a dry run checks placements. A group that moves bytes
    /// follows no placements and needs none.
    fn axes(&self) -> &[Axis] {
        &[]
    }

    /// World ranks of the group, in the order of its own ranks; empty when it does not know them.
    fn members(&self) -> &[usize] {
        &[]
    }

    /// This rank's number in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn world_size(&self) -> usize;

    /// The memory in which the transport reads and writes tensors. One that reads host memory also serves devices whose
    /// memory the host can address; see [`staged`](crate::staged) for the others.
    fn memory(&self) -> Memory {
        Memory::Host
    }

    /// Starts a call that [`Call::check`] accepts.
    fn submit(&self, call: Call) -> Pending<Buffers>;

    /// Starts a call whose bytes `mover` moves once all members are known to make it. Its tensors need not be in memory that the transport
    /// reads.
    ///
    /// # Panics
    /// In groups that move nothing: of one rank, of a dry run, and those in front of another group.
    fn submit_moved(&self, call: Call, _mover: Box<dyn Mover>) -> Pending<Buffers> {
        panic!("group {} moves nothing: {call:?}", self.name())
    }

    /// Connects the members, before the first call, where their devices communicate past the host. All members call it, once.
    ///
    /// # Errors
    /// When they cannot be connected, which ends the job.
    #[track_caller]
    fn connect(&self) -> Result<(), CollectiveError> {
        Ok(())
    }

    /// Ends the job for all its ranks, with this rank as the cause: whoever waits for a call of any group returns with
    /// `reason`. A group that has no peers does nothing.
    fn abort(&self, _reason: &str) {}

    /// The statistics since the last call of this function; they start again from zero.
    fn take_statistics(&self) -> Statistics;
}

fn source(buffers: Buffers) -> Tensor {
    buffers.source.expect("a finished call returns its buffers")
}

fn target(buffers: Buffers) -> Tensor {
    buffers.target.expect("a finished call returns its buffers")
}

fn both(buffers: Buffers) -> (Tensor, Tensor) {
    let Buffers { source, target } = buffers;
    source.zip(target).expect("a finished call returns its buffers")
}

impl dyn Group + '_ {
    fn start(&self, call: Call) -> Pending<Buffers> {
        call.check(self.rank(), self.world_size());
        let (op, site) = (call.op, call.site);
        self.submit(call).in_flight(op, site)
    }

    /// x becomes the sum over the ranks; any number of elements.
    #[track_caller]
    pub fn all_reduce(&self, x: Tensor) -> Pending<Tensor> {
        self.start(Call::new(CollectiveOp::AllReduce, Some(x), None)).map(source)
    }

    /// shard (+)= this rank's part of the sum of `whole`, as `accumulate` says; whole
    /// `[world * n]`, shard `[n]`. Returns both; `whole` is unchanged.
    #[track_caller]
    pub fn reduce_scatter(
        &self,
        whole: Tensor,
        shard: Tensor,
        accumulate: bool,
    ) -> Pending<(Tensor, Tensor)> {
        let call = Call::new(CollectiveOp::ReduceScatter, Some(whole), Some(shard));
        self.start(Call { accumulate, ..call }).map(both)
    }

    /// This rank's part of `whole` `[world * n]` becomes the sum; the rest is unspecified.
    #[track_caller]
    pub fn reduce_scatter_in_place(&self, whole: Tensor) -> Pending<Tensor> {
        self.start(Call::new(CollectiveOp::ReduceScatter, Some(whole), None)).map(source)
    }

    /// Part r of `whole` `[world * n]` becomes the shard `[n]` of rank r. Returns (shard, whole).
    #[track_caller]
    pub fn all_gather(&self, shard: Tensor, whole: Tensor) -> Pending<(Tensor, Tensor)> {
        self.start(Call::new(CollectiveOp::AllGather, Some(shard), Some(whole))).map(both)
    }

    /// The same where this rank's part of `whole` `[world * n]` is already in place.
    #[track_caller]
    pub fn all_gather_in_place(&self, whole: Tensor) -> Pending<Tensor> {
        self.start(Call::new(CollectiveOp::AllGather, None, Some(whole))).map(target)
    }

    /// x becomes the root's x.
    #[track_caller]
    pub fn broadcast(&self, x: Tensor, root: usize) -> Pending<Tensor> {
        self.start(Call::new(CollectiveOp::Broadcast, Some(x), None).with_root(root)).map(source)
    }

    /// The root's x becomes the sum over the ranks; the others' is unspecified afterwards.
    #[track_caller]
    pub fn reduce(&self, x: Tensor, root: usize) -> Pending<Tensor> {
        self.start(Call::new(CollectiveOp::Reduce, Some(x), None).with_root(root)).map(source)
    }

    /// Part r of the root's `whole` `[world * n]` becomes `part` `[n]` of rank r. Only the root gives
    /// and gets back a whole. Returns (part, whole).
    #[track_caller]
    pub fn gather(
        &self,
        part: Tensor,
        whole: Option<Tensor>,
        root: usize,
    ) -> Pending<(Tensor, Option<Tensor>)> {
        let call = Call::new(CollectiveOp::Gather, Some(part), whole).with_root(root);
        self.start(call).map(|b| (b.source.expect("a finished call returns its buffers"), b.target))
    }

    /// `part` `[n]` of rank r becomes part r of the root's `whole` `[world * n]`. Only the root gives
    /// and gets back a whole. Returns (whole, part).
    #[track_caller]
    pub fn scatter(
        &self,
        whole: Option<Tensor>,
        part: Tensor,
        root: usize,
    ) -> Pending<(Option<Tensor>, Tensor)> {
        let call = Call::new(CollectiveOp::Scatter, whole, Some(part)).with_root(root);
        self.start(call).map(|b| (b.source, b.target.expect("a finished call returns its buffers")))
    }

    /// Part q of `to` `[world * n]` becomes this rank's part of `from` `[world * n]` of rank q.
    /// Returns (from, to).
    #[track_caller]
    pub fn all_to_all(&self, from: Tensor, to: Tensor) -> Pending<(Tensor, Tensor)> {
        self.start(Call::new(CollectiveOp::AllToAll, Some(from), Some(to))).map(both)
    }

    /// Sends x to rank `to`, which must receive it; messages match in the order of submission. `tag` identifies the
    /// message (boundary, micro-batch and direction) and must be the same at both ends.
    #[track_caller]
    pub fn send(&self, x: Tensor, to: usize, tag: u64) -> Pending<Tensor> {
        self.start(Call::new(CollectiveOp::Send, Some(x), None).with_root(to).with_tag(tag)).map(source)
    }

    /// Receives into x what rank `from` sends with the same `tag`.
    #[track_caller]
    pub fn recv(&self, x: Tensor, from: usize, tag: u64) -> Pending<Tensor> {
        self.start(Call::new(CollectiveOp::Recv, None, Some(x)).with_root(from).with_tag(tag)).map(target)
    }

    /// Waits until every rank of the group has called it.
    #[track_caller]
    pub fn barrier(&self) -> Pending<()> {
        self.start(Call::new(CollectiveOp::Barrier, None, None)).map(|_| ())
    }
}
