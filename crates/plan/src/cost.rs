//! Cost of a phase: floating-point operations, bytes touched and bytes sent, by operation. Sums over the trace, nothing
//! estimated.

use crate::trace::{Collective, CollectiveOp, Event, Memory, Phase, Rate, StaticName, interned};
use serde::{Deserialize, Serialize};

/// The cost of one phase on one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Floating-point operations of all kernels.
    pub flops: u64,
    /// Minimum bytes that all kernels read and write.
    pub kernel_bytes: u64,
    /// Floating-point operations of kernels that run again, in place of keeping what they have computed.
    pub repeated_flops: u64,
    /// Bytes that all collectives send from this rank.
    pub sent_bytes: u64,
    /// Copies by pair of memories, in the order of their first copies.
    pub copies: Vec<CopyCost>,
    /// By kernel and rate, most operations first, then by name.
    pub kernels: Vec<KernelCost>,
    /// By collective operation, those that occur, in the order of `CollectiveOp::ALL`.
    pub collectives: Vec<CollectiveCost>,
}

/// All calls of one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelCost {
    /// Name of the operation.
    #[serde(deserialize_with = "interned")]
    pub name: StaticName,
    /// Calls.
    pub calls: u64,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes read and written at least.
    pub bytes: u64,
    /// Rate that limits the calls.
    pub rate: Rate,
}

/// All copies from one memory to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyCost {
    /// The memory that is read.
    pub from: Memory,
    /// The memory that is written.
    pub to: Memory,
    /// Number of copies.
    pub calls: u64,
    /// Bytes copied.
    pub bytes: u64,
    /// Rate that limits them.
    pub rate: Rate,
}

/// All calls of one collective operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveCost {
    /// The operation.
    pub op: CollectiveOp,
    /// Calls.
    pub calls: u64,
    /// Elements of the whole buffers.
    pub elements: u64,
    /// Bytes that this rank sends.
    pub sent_bytes: u64,
    /// Rate that limits them.
    pub rate: Rate,
}

impl Cost {
    /// Sums the costs of a phase.
    pub fn of(phase: &Phase) -> Cost {
        let mut cost = Cost::default();
        for event in &phase.events {
            match event {
                Event::Kernel { name, flops, bytes, rate, again } => {
                    cost.add_kernel(name, *flops, *bytes, *rate);
                    cost.repeated_flops += if *again { *flops } else { 0 };
                }
                Event::Copy { from, to, bytes, rate, .. } => cost.add_copy([*from, *to], *bytes, *rate),
                Event::Collective(collective) => cost.add_collective(collective),
                Event::Alloc { .. }
                | Event::Free { .. }
                | Event::Wait { .. }
                | Event::Record { .. }
                | Event::StreamWait { .. }
                | Event::HostWait { .. }
                | Event::Counted { .. }
                | Event::Step { .. }
                | Event::Use { .. } => {}
            }
        }
        cost.kernels.sort_by_key(|k| (std::cmp::Reverse(k.flops), k.name, k.rate));
        cost.collectives.sort_by_key(|c| c.op as u8);
        cost
    }

    /// The cost of one collective operation, if it occurs.
    pub fn collective(&self, op: CollectiveOp) -> Option<&CollectiveCost> {
        self.collectives.iter().find(|c| c.op == op)
    }

    /// Floating-point operations without those that run again.
    pub fn model_flops(&self) -> u64 {
        self.flops - self.repeated_flops
    }

    fn add_kernel(&mut self, name: &'static str, flops: u64, bytes: u64, rate: Rate) {
        self.flops += flops;
        self.kernel_bytes += bytes;
        // A phase has a few dozen kinds of kernels: a scan is as good as a map.
        match self.kernels.iter_mut().find(|k| (k.name, k.rate) == (name, rate)) {
            Some(kernel) => {
                kernel.calls += 1;
                kernel.flops += flops;
                kernel.bytes += bytes;
            }
            None => self.kernels.push(KernelCost { name, calls: 1, flops, bytes, rate }),
        }
    }

    fn add_copy(&mut self, [from, to]: [Memory; 2], bytes: u64, rate: Rate) {
        match self.copies.iter_mut().find(|copy| [copy.from, copy.to] == [from, to]) {
            Some(copy) => {
                copy.calls += 1;
                copy.bytes += bytes;
            }
            None => self.copies.push(CopyCost { from, to, calls: 1, bytes, rate }),
        }
    }

    fn add_collective(&mut self, collective: &Collective) {
        let Collective { op, count, sent_bytes, .. } = *collective;
        self.sent_bytes += sent_bytes;
        match self.collectives.iter_mut().find(|c| c.op == op) {
            Some(cost) => {
                cost.calls += 1;
                cost.elements += count;
                cost.sent_bytes += sent_bytes;
            }
            None => {
                let rate = Rate::Transport;
                self.collectives.push(CollectiveCost { op, calls: 1, elements: count, sent_bytes, rate });
            }
        }
    }
}
