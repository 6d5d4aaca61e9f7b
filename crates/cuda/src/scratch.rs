//! The scratch that kernels need, so that it can be planned.

use crate::factory::SCRATCH_BYTES;
use crate::launch::{COUNTS_BYTES, RowBlocks};

/// Scratch is planned in steps of this.
const STEP: u64 = 1 << 20;

/// Bytes of scratch that the kernels of a Transformer's step need, for micro-batches of `[batch, seq, hidden]` and so many heads of
/// attention, each layer cut into `tensor` parts.
pub fn scratch_needed([batch, seq, hidden]: [usize; 3], heads: usize, tensor: usize) -> u64 {
    let rows = batch * seq;
    let attention = heads.div_ceil(tensor) * rows * size_of::<f32>();
    let losses = rows * size_of::<f64>();
    let norms = RowBlocks::new(rows, hidden, 2).bytes();
    let biases = RowBlocks::new(rows, (4 * hidden).div_ceil(tensor), 1).bytes();
    [attention, losses, norms, biases, COUNTS_BYTES].into_iter().max().unwrap_or(0) as u64
}

/// Bytes of scratch to plan for that step ([`Options::scratch_bytes`](crate::Options::scratch_bytes)): what its kernels need, and
/// [`SCRATCH_BYTES`] at least, of which cuBLASLt has a part.
pub fn scratch_planned(micro_batch: [usize; 3], heads: usize, tensor: usize) -> u64 {
    scratch_needed(micro_batch, heads, tensor).next_multiple_of(STEP).max(SCRATCH_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backward_of_attention_decides_for_long_sequences() {
        let long = [16, 32 << 10, 2112];
        assert_eq!(scratch_needed(long, 33, 1), 4 * 16 * 33 * (32 << 10));
        assert_eq!(scratch_planned(long, 33, 1), 66 << 20);
        assert_eq!(scratch_planned([16, 32 << 10, 2112 + 1], 33, 3), SCRATCH_BYTES);
        assert_eq!(scratch_planned([16, 1024, 8192], 64, 1), SCRATCH_BYTES);
        assert_eq!(scratch_needed([1, 4096, 8192], 1, 1), 64 * 4 * 8192 * 4);
        assert_eq!(scratch_needed([1, 1, 4], 1, 1), COUNTS_BYTES as u64);
    }
}
