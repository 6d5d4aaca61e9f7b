//! Card memory that the ranks of a run need beside their plans.

use phalanx_cuda::{CONTEXT_BYTES, SCRATCH_BYTES, communicator_bytes, scratch_planned};
use phalanx_models::Model;
use phalanx_train::Spec;

/// Card memory that the ranks of a run need beside their plans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardNeeds {
    /// The ranks of each communicator of NCCL.
    pub communicators: Vec<usize>,
    /// Bytes of the scratch of kernels.
    pub scratch_bytes: u64,
}

impl CardNeeds {
    /// Those of a rank without a plan.
    pub const NONE: CardNeeds = CardNeeds { communicators: Vec::new(), scratch_bytes: SCRATCH_BYTES };

    /// Those of a run.
    pub fn of(spec: &Spec) -> CardNeeds {
        let tokens = [spec.batch.micro_batch_size, spec.batch.seq];
        let scratch_bytes = CardNeeds::scratch(&*spec.model.definition, tokens, spec.mesh.axes.tensor);
        CardNeeds { communicators: spec.communicators(), scratch_bytes }
    }

    /// Bytes of the scratch of kernels for micro-batches of `tokens` `[batch, seq]`, which `tensor` ranks share.
    pub fn scratch(model: &dyn Model, [batch, seq]: [usize; 2], tensor: usize) -> u64 {
        let heads = model.attention().map_or(0, |attention| attention.heads);
        scratch_planned([batch, seq, model.whole().width()], heads, tensor)
    }

    /// Bytes of a card, with what the driver takes.
    pub fn bytes(&self) -> u64 {
        self.scratch_bytes + CONTEXT_BYTES + self.nccl_bytes()
    }

    /// Bytes of a card that NCCL takes, about.
    pub fn nccl_bytes(&self) -> u64 {
        self.communicators.iter().map(|ranks| communicator_bytes(*ranks)).sum()
    }
}
