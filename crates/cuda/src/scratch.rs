//! The scratch that kernels need, so that a run is refused before its start where it is too little.

use crate::launch::RowBlocks;

/// Bytes of scratch that the kernels of a Transformer's step need, for micro-batches of `[batch, seq, hidden]` and so many heads of
/// attention, each layer cut into `tensor` parts.
pub fn scratch_needed([batch, seq, hidden]: [usize; 3], heads: usize, tensor: usize) -> u64 {
    let rows = batch * seq;
    let attention = heads.div_ceil(tensor) * rows * size_of::<f32>();
    let losses = rows * size_of::<f64>();
    let norms = RowBlocks::new(rows, hidden, 2).bytes();
    let biases = RowBlocks::new(rows, (4 * hidden).div_ceil(tensor), 1).bytes();
    [attention, losses, norms, biases].into_iter().max().unwrap_or(0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SCRATCH_BYTES;

    #[test]
    fn the_backward_of_attention_decides_for_long_sequences() {
        assert_eq!(scratch_needed([16, 32 << 10, 2112], 33, 1), 4 * 16 * 33 * (32 << 10));
        assert!(scratch_needed([16, 32 << 10, 2112], 33, 1) > SCRATCH_BYTES);
        assert!(scratch_needed([16, 32 << 10, 2112], 33, 3) < SCRATCH_BYTES);
        assert!(scratch_needed([16, 1024, 8192], 64, 1) < SCRATCH_BYTES);
        assert_eq!(scratch_needed([1, 4096, 8192], 1, 1), 64 * 4 * 8192 * 4);
    }
}
