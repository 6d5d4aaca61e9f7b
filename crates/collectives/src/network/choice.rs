//! Which algorithm a call uses: by its size and the number of hosts, the same on all ranks.
//!
//! - All_reduce of at most 32 KiB a lane: one step, everybody adds everything. A step costs more than the bytes.
//! - All_reduce of at most 512 KiB a lane over eight or more balanced hosts: halving and doubling. Messages to all other hosts
//!   would each be small.
//! - All other sums: direct exchange, with the fewest steps for bytes that no algorithm sends fewer of.
//! - All_gather, and the second step of such an all_reduce, of at least 256 KiB a lane from each of four or more hosts: a ring. Otherwise
//!   direct exchange.

use phalanx_plan::trace::CollectiveOp;
use phalanx_tensor::DType;

use super::layout::Layout;
use crate::hosts::Hosts;
use crate::parts;

/// Maximum number of bytes of a lane that all hosts add.
pub(crate) const SMALL_BYTES: usize = 32 << 10;
/// Maximum number of bytes of a lane, and minimum number of hosts, for halving and doubling.
pub(crate) const HALVING_BYTES: usize = 512 << 10;
const HALVING_HOSTS: usize = 8;
/// Minimum number of bytes of a lane that a host sends in each step of a ring, and of hosts. With less, steps cost more than bytes.
const RING_PART_BYTES: usize = 256 << 10;
const RING_HOSTS: usize = 4;

/// Algorithm by which an all_reduce adds over hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllReduce {
    /// Everybody adds everything.
    OneStep,
    Halving,
    /// Each host adds a part, then all exchange their parts.
    Direct,
}

/// The algorithm for an all_reduce of which a lane has so many bytes.
pub(crate) fn all_reduce(layout: &Layout, lane_bytes: usize) -> AllReduce {
    let many = layout.hosts() >= HALVING_HOSTS && layout.is_balanced();
    match lane_bytes {
        ..=SMALL_BYTES => AllReduce::OneStep,
        ..=HALVING_BYTES if many => AllReduce::Halving,
        _ => AllReduce::Direct,
    }
}

/// Returns whether an all_gather uses a ring; also that of an all_reduce's sums. `lane_bytes`: all bytes that a lane receives.
pub(crate) fn gathers_in_ring(layout: &Layout, lane_bytes: usize) -> bool {
    layout.hosts() >= RING_HOSTS && lane_bytes / layout.hosts() >= RING_PART_BYTES
}

/// The name of the algorithm for a call of all ranks over `count` elements in all, for reports.
pub fn algorithm(hosts: &Hosts, op: CollectiveOp, dtype: DType, count: usize) -> &'static str {
    let world = hosts.world_size();
    if hosts.len() == 1 {
        return if op == CollectiveOp::AllReduce { "one pass" } else { "direct" };
    }
    let layout = Layout::new(hosts, &Vec::from_iter(0..world), 0);
    let lane = |elements: usize| parts::uneven(elements, layout.lanes, 0).len() * dtype.bytes();
    match op {
        CollectiveOp::AllReduce => match all_reduce(&layout, lane(count)) {
            AllReduce::OneStep => "one step",
            AllReduce::Halving => "halving",
            AllReduce::Direct if gathers_in_ring(&layout, lane(count)) => "direct, ring",
            AllReduce::Direct => "direct",
        },
        CollectiveOp::AllGather if gathers_in_ring(&layout, lane(count / world) * world) => "ring",
        _ => "direct",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_and_hosts_choose() {
        let name = |sizes: &[usize], op, bytes: usize| {
            algorithm(&Hosts::new(sizes.to_vec()), op, DType::F32, bytes / 4)
        };
        let reduce = CollectiveOp::AllReduce;
        assert_eq!(name(&[4], reduce, 1 << 20), "one pass");
        assert_eq!(name(&[1, 1], reduce, 32 << 10), "one step");
        assert_eq!(name(&[1, 1], reduce, 64 << 10), "direct");
        assert_eq!(name(&[1; 8], reduce, 64 << 10), "halving");
        assert_eq!(name(&[1; 9], reduce, 64 << 10), "direct");
        assert_eq!(name(&[2; 8], reduce, 4 << 20), "direct, ring");
        assert_eq!(name(&[2; 8], reduce, 4000 << 10), "direct");
        assert_eq!(name(&[1; 3], reduce, 2 << 20), "direct");
        assert_eq!(name(&[2; 8], reduce, 64 << 10), "one step");
        assert_eq!(name(&[1; 4], CollectiveOp::AllGather, 1 << 20), "ring");
        assert_eq!(name(&[1; 3], CollectiveOp::AllGather, 1 << 20), "direct");
        assert_eq!(name(&[1; 4], CollectiveOp::AllGather, 1 << 10), "direct");
    }
}
