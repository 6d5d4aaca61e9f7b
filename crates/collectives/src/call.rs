//! One collective as a caller asks for it: the operation, its buffers, its call site.
//!
//! Checked here once for all implementations (asserts: a wrong size in one rank is its programmer's
//! error), and priced here once: the bytes that peers read from this rank by direct exchange, which
//! sends no more than a ring.

use std::sync::Arc;

use phalanx_plan::trace::{Collective, CollectiveOp, Placements, Site};
use phalanx_simd::sums::Element;
use phalanx_tensor::{DType, Tensor};

use crate::parts;

/// The tensors of a call. The call owns them until `wait` returns them.
#[derive(Debug, Default)]
pub struct Buffers {
    /// Tensor that peers read. In-place operations have only this one.
    pub source: Option<Tensor>,
    /// Tensor that this rank writes. An all_gather in place has only this one.
    pub target: Option<Tensor>,
}

/// One collective that a caller asks for.
#[derive(Debug)]
pub struct Call {
    /// The operation.
    pub op: CollectiveOp,
    /// Root, or the peer of a send or recv.
    pub root: Option<usize>,
    /// The tag of a send or recv, which is the same at both ends.
    pub tag: Option<u64>,
    /// True if a reduce_scatter adds to its shard instead of overwriting it.
    pub accumulate: bool,
    /// The tensors.
    pub buffers: Buffers,
    /// The call site.
    pub site: Site,
}

impl Call {
    /// A call without root. Its call site is that of the caller's caller.
    #[track_caller]
    pub fn new(op: CollectiveOp, source: Option<Tensor>, target: Option<Tensor>) -> Call {
        let buffers = Buffers { source, target };
        Call { op, root: None, tag: None, accumulate: false, buffers, site: Site::caller() }
    }

    /// The same with a root or peer.
    pub fn with_root(self, root: usize) -> Call {
        Call { root: Some(root), ..self }
    }

    /// The same with the tag of a send or recv.
    pub fn with_tag(self, tag: u64) -> Call {
        Call { tag: Some(tag), ..self }
    }

    /// Element type on the wire; u32 for a barrier, which has no elements.
    pub fn dtype(&self) -> DType {
        let Buffers { source, target } = &self.buffers;
        source.as_ref().or(target.as_ref()).map_or(DType::U32, |t| t.dtype())
    }

    /// Elements of the whole buffer: the sum of all parts for gathers and scatters.
    pub fn count(&self, world_size: usize) -> usize {
        let elements = |t: &Option<Tensor>| t.as_ref().map(|t| t.shape().elements());
        let (source, target) = (elements(&self.buffers.source), elements(&self.buffers.target));
        match self.op {
            CollectiveOp::Barrier => 0,
            CollectiveOp::AllGather => target.expect("checked"),
            CollectiveOp::Gather => source.expect("checked") * world_size,
            CollectiveOp::Scatter => target.expect("checked") * world_size,
            CollectiveOp::Recv => target.expect("checked"),
            _ => source.expect("checked"),
        }
    }

    /// Asserts that the call is valid: its buffers, root and tag fit the operation.
    pub fn check(&self, rank: usize, world_size: usize) {
        use CollectiveOp::*;
        let Call { op, root, buffers, site, .. } = self;
        let name = op.name();
        let elements = |t: &Option<Tensor>| t.as_ref().map(|t| t.shape().elements());
        let pair = (elements(&buffers.source), elements(&buffers.target));
        let fits = match (op, pair) {
            (AllReduce | Reduce | Broadcast | Send, (Some(_), None)) => true,
            (Recv, (None, Some(_))) | (Barrier, (None, None)) => true,
            (ReduceScatter, (Some(whole), None)) | (AllGather, (None, Some(whole))) => {
                whole.is_multiple_of(world_size)
            }
            (ReduceScatter, (Some(whole), Some(part))) => whole == part * world_size,
            (AllGather, (Some(part), Some(whole))) => whole == part * world_size,
            (Gather, (Some(part), Some(whole))) => whole == part * world_size && *root == Some(rank),
            (Gather, (Some(_), None)) => *root != Some(rank),
            (Scatter, (Some(whole), Some(part))) => whole == part * world_size && *root == Some(rank),
            (Scatter, (None, Some(_))) => *root != Some(rank),
            (AllToAll, (Some(source), Some(target))) => source == target && source.is_multiple_of(world_size),
            _ => false,
        };
        assert!(fits, "{name} at {site} over {world_size} ranks with buffers of {pair:?} elements");
        let rooted = matches!(op, Broadcast | Reduce | Gather | Scatter | Send | Recv);
        assert!(
            rooted == root.is_some() && root.is_none_or(|r| r < world_size),
            "{name} at {site}: root {root:?} of {world_size} ranks"
        );
        let message = matches!(op, Send | Recv);
        assert!(
            !message || *root != Some(rank),
            "{name} at {site}: rank {rank} cannot exchange a message with itself"
        );
        assert!(message == self.tag.is_some(), "{name} at {site}: tag {:?}", self.tag);
        assert!(!self.accumulate || *op == ReduceScatter, "{name} at {site} cannot accumulate");
        if let (Some(source), Some(target)) = (&buffers.source, &buffers.target) {
            assert_eq!(source.dtype(), target.dtype(), "{name} at {site}");
        }
        if matches!(op, AllReduce | ReduceScatter | Reduce) {
            let dtype = self.dtype();
            assert!(element_of(dtype).is_some(), "{name} at {site}: {} cannot be summed", dtype.name());
        }
    }

    /// Bytes that peers read from this rank.
    pub fn sent_bytes(&self, rank: usize, world_size: usize) -> u64 {
        sent_bytes(self.op, self.dtype(), self.count(world_size), self.root, rank, world_size)
    }

    /// The trace record of the call, for a group of all ranks and buffers without placements.
    pub fn record(&self, group: &'static str, rank: usize, world_size: usize) -> Collective {
        Collective {
            group,
            members: Arc::default(),
            world_size,
            op: self.op,
            dtype: self.dtype(),
            count: self.count(world_size) as u64,
            root: self.root,
            tag: self.tag,
            placements: Placements::REPLICATED,
            sent_bytes: self.sent_bytes(rank, world_size),
            site: self.site,
        }
    }
}

/// Bytes that peers read from `rank` in one collective over `count` elements in all.
pub fn sent_bytes(
    op: CollectiveOp,
    dtype: DType,
    count: usize,
    root: Option<usize>,
    rank: usize,
    world_size: usize,
) -> u64 {
    use CollectiveOp::*;
    let peers = world_size - 1;
    let is_root = root == Some(rank);
    let own = parts::uneven(count, world_size, rank).len();
    let elements = match op {
        // Each peer reads its part of this rank's buffer, and then this rank's part of the sum.
        AllReduce => (count - own) + own * peers,
        Reduce if is_root => count - own,
        Reduce => (count - own) + own,
        ReduceScatter | AllGather | AllToAll => count / world_size * peers,
        Broadcast if is_root => count * peers,
        Scatter if is_root => count / world_size * peers,
        Gather if !is_root => count / world_size,
        Send => count,
        Broadcast | Scatter | Gather | Recv | Barrier => 0,
    };
    (elements * dtype.bytes()) as u64
}

/// The element of a sum of this type, if values of it can be summed.
pub fn element_of(dtype: DType) -> Option<Element> {
    match dtype {
        DType::F64 => Some(Element::F64),
        DType::F32 => Some(Element::F32),
        DType::BF16 => Some(Element::Bf16),
        DType::F16 => Some(Element::F16),
        DType::U32 | DType::Q8_0 | DType::Nf4 => None,
    }
}

/// The same, of a call that was checked ([`Call::check`]).
pub(crate) fn summed(dtype: DType) -> Element {
    element_of(dtype).unwrap_or_else(|| unreachable!("Call::check refuses {dtype:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_those_of_direct_exchange() {
        use CollectiveOp::*;
        let price = |op, root, rank| sent_bytes(op, DType::F32, 1024, root, rank, 4);
        for (op, root, rank, expected) in [
            (ReduceScatter, None, 1, 3072),
            (AllGather, None, 3, 3072),
            (AllReduce, None, 2, 6144),
            (AllToAll, None, 0, 3072),
            (Broadcast, Some(1), 1, 3 * 4096),
            (Broadcast, Some(1), 0, 0),
            (Reduce, Some(1), 1, 3072),
            (Reduce, Some(1), 0, 4096),
            (Gather, Some(0), 0, 0),
            (Gather, Some(0), 2, 1024),
            (Scatter, Some(0), 0, 3072),
            (Scatter, Some(0), 1, 0),
            (Send, Some(1), 0, 4096),
            (Recv, Some(0), 1, 0),
            (Barrier, None, 0, 0),
        ] {
            assert_eq!(price(op, root, rank), expected, "{op:?} root {root:?} rank {rank}");
        }
        assert_eq!(sent_bytes(AllReduce, DType::BF16, 1024, None, 2, 4), 3072);
    }
}
