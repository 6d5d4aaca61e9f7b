//! A call on its way through a group's stream: what is moved, without the tensors that own the memory.

use phalanx_plan::trace::{CollectiveOp, Site};
use phalanx_tensor::{DType, Tensor};

use crate::call::Call;
use crate::parts;
use crate::shared_memory::memory::MemoryRange;

/// A call without its tensors, which stay in the Pending.
#[derive(Clone, Copy)]
pub(crate) struct Transfer {
    pub(crate) op: CollectiveOp,
    pub(crate) dtype: DType,
    /// Elements of the whole buffer.
    pub(crate) count: usize,
    pub(crate) accumulate: bool,
    /// True if devices move the bytes: no memory is offered to peers.
    pub(crate) by_device: bool,
    /// As in [`Call::buffers`]; empty where the call has none.
    pub(crate) source: MemoryRange,
    pub(crate) target: MemoryRange,
    /// Root, or the peer of a send or recv.
    pub(crate) root: Option<usize>,
    pub(crate) tag: Option<u64>,
    /// The call site.
    pub(crate) site: Site,
}

impl Transfer {
    pub(crate) fn new(call: &mut Call, world_size: usize) -> Transfer {
        let span = |tensor: &mut Option<Tensor>| {
            tensor.as_mut().map_or(MemoryRange::EMPTY, |tensor| {
                let view = tensor.view_mut();
                MemoryRange { address: view.address().as_ptr(), bytes: view.bytes() }
            })
        };
        Transfer {
            op: call.op,
            dtype: call.dtype(),
            count: call.count(world_size),
            accumulate: call.accumulate,
            by_device: false,
            source: span(&mut call.buffers.source),
            target: span(&mut call.buffers.target),
            root: call.root,
            tag: call.tag,
            site: call.site,
        }
    }

    /// The same call, whose bytes devices move.
    pub(crate) fn by_device(self) -> Transfer {
        Transfer { by_device: true, source: MemoryRange::EMPTY, target: MemoryRange::EMPTY, ..self }
    }

    /// Returns whether source and target are one buffer.
    pub(crate) fn in_place(&self) -> bool {
        self.source.address.is_null() || self.target.address.is_null()
    }

    /// The root of a call that has one.
    pub(crate) fn root(&self) -> usize {
        self.root.expect("Call::check has checked the root")
    }

    /// The memory of member `rank` that peers on the same host may write, in a group of several hosts.
    pub(crate) fn written(&self, rank: usize, world_size: usize) -> MemoryRange {
        use CollectiveOp::*;
        match self.op {
            _ if self.by_device => MemoryRange::EMPTY,
            AllReduce | Broadcast | Reduce => self.source,
            ReduceScatter if self.in_place() => {
                let part = parts::equal(self.count, world_size, rank);
                self.source.range(part.start * self.dtype.bytes(), part.len() * self.dtype.bytes())
            }
            ReduceScatter | AllGather | Gather | Scatter | AllToAll => self.target,
            Send | Recv | Barrier => MemoryRange::EMPTY,
        }
    }

    /// The memory of member `rank` that peers may read.
    pub(crate) fn offered(&self, rank: usize, world_size: usize) -> MemoryRange {
        if self.by_device || self.op != CollectiveOp::AllGather || !self.in_place() {
            return self.source;
        }
        let part = parts::equal(self.count, world_size, rank);
        self.target.range(part.start * self.dtype.bytes(), part.len() * self.dtype.bytes())
    }
}
