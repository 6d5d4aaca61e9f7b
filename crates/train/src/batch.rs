//! The samples of a step or an evaluation on one rank, in host memory.

use phalanx_tensor::IGNORED;

/// The tokens and targets of this rank, in host memory, one micro-batch after another.
#[derive(Default)]
pub struct Batch {
    /// `[micro_batches, micro_batch_size, seq]`
    pub tokens: Vec<u32>,
    /// Targets, of the same shape: the tokens shifted by one.
    pub targets: Vec<u32>,
}

impl Batch {
    /// A batch of `rows` sequences of `seq` tokens, all zero.
    pub fn with_rows(rows: usize, seq: usize) -> Batch {
        Batch { tokens: vec![0; rows * seq], targets: vec![0; rows * seq] }
    }

    /// Number of targets that count in the loss.
    pub fn counted_targets(&self) -> usize {
        self.targets.iter().filter(|target| **target != IGNORED).count()
    }
}
