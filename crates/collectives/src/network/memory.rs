//! Memory that a rank keeps to exchange data with other hosts, known from its groups and the sizes of their calls: staging for
//! sums (`partial_sums`, `halving`) and the buffers of its connections (`line`, `link`). It grows to this size and stays until
//! the group ends. The socket buffers are extra, in the system's memory.

use phalanx_plan::trace::CollectiveOp;
use phalanx_tensor::DType;

use super::Wire;
use super::choice::{self, AllReduce, HALVING_BYTES, SMALL_BYTES};
use super::frame::FRAME_BYTES;
use super::layout::Layout;
use super::line;
use super::partial_sums::Chunks;
use super::staging::Staging;
use crate::call::summed;
use crate::hosts::Hosts;
use crate::parts;

/// Memory of a connection or link beside its buffers: keys, queues, tables.
const BESIDE_BYTES: usize = 4 << 10;

/// A group of a rank, and the largest of its sums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSums {
    /// Its world ranks, by group rank.
    pub members: Vec<usize>,
    /// Element type of its sums.
    pub dtype: DType,
    /// Elements of the whole buffer of the largest one; 0 for a group that only sends messages.
    pub elements: usize,
}

/// Connections between ranks of different hosts, as far as memory depends on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connections {
    /// Transport of the bytes.
    pub wire: Wire,
    /// TCP connections between two ranks of a group.
    pub streams: usize,
    /// True if TCP is encrypted.
    pub encrypted: bool,
}

/// The most bytes that the world rank `rank` keeps for its groups, of which those on one host take none.
pub fn transport_bytes(hosts: &Hosts, rank: usize, groups: &[GroupSums], connections: Connections) -> u64 {
    let bytes = groups.iter().filter_map(|group| {
        let place = group.members.iter().position(|member| *member == rank)?;
        let layout = Layout::new(hosts, &group.members, place);
        (layout.hosts() > 1)
            .then(|| links_bytes(&layout, &group.members, connections) + sums_bytes(&layout, group))
    });
    bytes.map(|bytes| bytes as u64).sum()
}

/// The links to the same lane of the other hosts; for messages, to the ranks before and after.
fn links_bytes(layout: &Layout, members: &[usize], connections: Connections) -> usize {
    let elsewhere = members.len() - layout.members(layout.own).len();
    let links = (layout.hosts() - 1).max(2).min(elsewhere);
    let lines = match connections.wire {
        Wire::Tcp => connections.streams * (line::buffer_bytes(connections.encrypted) + BESIDE_BYTES),
        Wire::Mpi => 0,
    };
    links * (2 * FRAME_BYTES + BESIDE_BYTES + lines)
}

/// Staging of the group's sums of at most so many elements.
fn sums_bytes(layout: &Layout, group: &GroupSums) -> usize {
    if group.elements == 0 || layout.lane.is_none() {
        return 0;
    }
    // A group may sum bf16 or f16 as well, of which more elements go by the algorithms for few bytes.
    let narrow = if group.dtype == DType::F32 { DType::BF16 } else { group.dtype };
    let ops = [CollectiveOp::AllReduce, CollectiveOp::ReduceScatter, CollectiveOp::Reduce];
    let (mut lines, mut own_lines) = (0, 0);
    for dtype in [group.dtype, narrow] {
        // Smaller sums may go by an algorithm that needs more.
        let by = |lane_bytes: usize| group.elements.min(lane_bytes / dtype.bytes() * layout.lanes);
        let counts = [group.elements, by(SMALL_BYTES), by(HALVING_BYTES)];
        for (count, op) in counts.into_iter().flat_map(|count| ops.map(|op| (count, op))) {
            let chunks = chunks_of(layout, dtype, op, count);
            (lines, own_lines) = (lines.max(chunks.lines), own_lines.max(chunks.own_lines));
        }
    }
    (2 * lines + own_lines) * Staging::lines_bytes()
}

/// The chunks of one sum of `count` elements.
fn chunks_of(layout: &Layout, dtype: DType, op: CollectiveOp, count: usize) -> Chunks {
    let slice = |elements: usize| parts::uneven(elements, layout.lanes, 0).len();
    let each: Vec<usize> = (0..layout.hosts()).collect();
    let lane = slice(count);
    match op {
        CollectiveOp::AllReduce => match choice::all_reduce(layout, lane * dtype.bytes()) {
            AllReduce::OneStep => Chunks::new(layout, dtype, &each, lane),
            AllReduce::Direct => {
                Chunks::new(layout, dtype, &each, parts::uneven(lane, layout.hosts(), 0).len())
            }
            AllReduce::Halving => {
                let own_lines = 2 * Staging::lines_for(lane * summed(dtype).wide_bytes());
                Chunks { elements: lane, lines: 0, own_lines }
            }
        },
        CollectiveOp::ReduceScatter => {
            let world = each.iter().map(|host| layout.members(*host).len()).sum();
            let hosts: Vec<usize> = (0..world).map(|q| layout.host_of(q)).collect();
            Chunks::new(layout, dtype, &hosts, slice(count / world))
        }
        // The root may be on any host.
        _ => {
            let of = |root: usize| Chunks::new(layout, dtype, &[root], lane);
            each.iter().map(|host| of(*host)).max_by_key(|chunks| chunks.lines).expect("a group has hosts")
        }
    }
}
