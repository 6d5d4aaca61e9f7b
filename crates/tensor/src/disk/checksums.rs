//! A checksum of each block of a disk memory, kept in memory: what is read must be what was written.
//!
//! Cost: 4 bytes for each block of 4,096, and a CRC-32 of each byte that moves, with the processor's instructions.

use super::{BLOCK, Layout};

/// The checksums of all blocks, in the order of the disk memory.
pub(super) struct Checksums(Vec<u32>);

impl Checksums {
    /// Those of a disk memory of zeros.
    pub(super) fn new(layout: &Layout) -> Checksums {
        let blocks = layout.stripes.bytes().div_ceil(BLOCK as u64) as usize;
        Checksums(vec![crc32fast::hash(&[0; BLOCK]); blocks])
    }

    /// Whole blocks are about to be written at offset `at`.
    pub(super) fn note(&mut self, at: u64, blocks: &[u8]) {
        let first = (at / BLOCK as u64) as usize;
        for (checksum, block) in self.0[first..].iter_mut().zip(blocks.chunks(BLOCK)) {
            *checksum = crc32fast::hash(block);
        }
    }

    /// Compares whole blocks that were read at offset `at`: the offset of the first that differs, with both checksums.
    pub(super) fn check(&self, at: u64, blocks: &[u8]) -> Result<(), (u64, [u32; 2])> {
        let first = (at / BLOCK as u64) as usize;
        let pairs = self.0[first..].iter().zip(blocks.chunks(BLOCK)).enumerate();
        for (number, (expected, block)) in pairs {
            let found = crc32fast::hash(block);
            if found != *expected {
                return Err((at + (number * BLOCK) as u64, [found, *expected]));
            }
        }
        Ok(())
    }
}
