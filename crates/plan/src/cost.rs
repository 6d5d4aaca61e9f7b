//! What a phase costs: floating-point operations, bytes touched and bytes sent, by operation. Sums over
//! the trace, nothing estimated.

use phalanx_trace::{Collective, CollectiveOp, Event, Phase, StaticName, interned};
use serde::{Deserialize, Serialize};

/// The cost of one phase on one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Floating-point operations of all kernels.
    pub flops: u64,
    /// Bytes that all kernels read and write at least.
    pub kernel_bytes: u64,
    /// Bytes that all collectives send from this rank.
    pub sent_bytes: u64,
    /// By kernel, most operations first, then by name.
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
}

impl Cost {
    /// Adds a phase up.
    pub fn of(phase: &Phase) -> Cost {
        let mut cost = Cost::default();
        for event in &phase.events {
            match event {
                Event::Kernel { name, flops, bytes, .. } => cost.add_kernel(name, *flops, *bytes),
                Event::Collective(collective) => cost.add_collective(collective),
                Event::Alloc { .. }
                | Event::Free { .. }
                | Event::Wait { .. }
                | Event::Counted { .. }
                | Event::Use { .. } => {}
            }
        }
        cost.kernels.sort_by_key(|k| (std::cmp::Reverse(k.flops), k.name));
        cost.collectives.sort_by_key(|c| c.op as u8);
        cost
    }

    /// The cost of one collective operation, if it occurs.
    pub fn collective(&self, op: CollectiveOp) -> Option<&CollectiveCost> {
        self.collectives.iter().find(|c| c.op == op)
    }

    /// Floating-point operations without those of forward products that run once more for backward. Each
    /// linear layer has one weight gradient of as many operations as its forward, each attention one backward of
    /// five products to the two of its forward: what runs forward beyond these runs again.
    pub fn model_flops(&self) -> u64 {
        let of = |names: &[&str]| -> u64 {
            self.kernels.iter().filter(|k| names.contains(&k.name)).map(|k| k.flops).sum()
        };
        let forward = ["linear", "linear_gelu", "vocabulary_statistics"];
        let linear = of(&forward).saturating_sub(of(&["linear_weight_gradient"]));
        let attention = of(&["attention"]).saturating_sub(of(&["attention_backward"]) / 5 * 2);
        self.flops - linear - attention
    }

    fn add_kernel(&mut self, name: &'static str, flops: u64, bytes: u64) {
        self.flops += flops;
        self.kernel_bytes += bytes;
        // A phase has a few dozen kinds of kernels: a scan is as good as a map.
        match self.kernels.iter_mut().find(|k| k.name == name) {
            Some(kernel) => {
                kernel.calls += 1;
                kernel.flops += flops;
                kernel.bytes += bytes;
            }
            None => self.kernels.push(KernelCost { name, calls: 1, flops, bytes }),
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
            None => self.collectives.push(CollectiveCost { op, calls: 1, elements: count, sent_bytes }),
        }
    }
}
