//! What the ranks of a run need of their cards beside their plans.

use phalanx_cuda::{COMMUNICATOR_BYTES, CONTEXT_BYTES, SCRATCH_BYTES, scratch_planned};
use phalanx_train::Spec;

/// What the ranks of a run need of their cards beside their plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardNeeds {
    /// Communicators of NCCL.
    pub communicators: usize,
    /// Bytes of the scratch of kernels.
    pub scratch_bytes: u64,
}

impl CardNeeds {
    /// Those of a rank without a plan.
    pub const NONE: CardNeeds = CardNeeds { communicators: 0, scratch_bytes: SCRATCH_BYTES };

    /// Those of a run.
    pub fn of(spec: &Spec) -> CardNeeds {
        let (shape, tensor) = (spec.model.shape(), spec.mesh.tensor);
        let micro_batch = [spec.micro_batch_size, spec.seq, shape.hidden];
        let scratch_bytes = scratch_planned(micro_batch, shape.heads, tensor);
        CardNeeds { communicators: spec.communicators(), scratch_bytes }
    }

    /// Bytes of a card, with what the driver takes.
    pub fn bytes(self) -> u64 {
        self.scratch_bytes + CONTEXT_BYTES + self.communicators as u64 * COMMUNICATOR_BYTES
    }
}
