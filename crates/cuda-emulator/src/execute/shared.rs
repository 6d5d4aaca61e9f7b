//! The shared memory of a block, with what was written and what asynchronous copies will write.

use crate::checks::{Cell, Finding};
use crate::memory::Fault;

/// What shared memory holds before it is written: a NaN in every format.
const POISON: u64 = 0x7fff_7fff_7fff_7fff;

/// The state of a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Byte {
    Unwritten,
    Written,
    /// An asynchronous copy writes it.
    Pending,
}

/// The shared memory of a block.
pub struct SharedMemory {
    /// In units of 16 bytes, so that it is aligned.
    units: Vec<[u64; 2]>,
    states: Vec<Byte>,
    cells: Vec<Cell>,
    size: usize,
}

impl SharedMemory {
    /// A memory of `size` bytes.
    pub fn new(size: usize) -> Self {
        let padded = size.next_multiple_of(16);
        Self {
            units: vec![[POISON; 2]; padded / 16],
            states: vec![Byte::Unwritten; padded],
            cells: vec![Cell::default(); padded / 4],
            size,
        }
    }

    /// Makes the memory that of a new block. Cells of other blocks say so themselves.
    pub fn begin(&mut self) {
        self.units.fill([POISON; 2]);
        self.states.fill(Byte::Unwritten);
    }

    /// The place of an access of at most 16 bytes, aligned to their number.
    ///
    /// # Errors
    /// If it is not aligned or not within the memory of the block.
    #[inline]
    pub fn place(&self, address: u64, bytes: usize) -> Result<usize, Fault> {
        let at = address as usize;
        // The number of bytes is a power of two.
        if at & (bytes - 1) == 0 && at < self.size && at + bytes <= self.size {
            return Ok(at);
        }
        let finding = if !at.is_multiple_of(bytes) { Finding::Misaligned } else { Finding::OutOfBounds };
        Err(Fault {
            finding,
            detail: format!("{bytes} bytes in the block's {} bytes of shared memory", self.size),
        })
    }

    /// The bytes of a place.
    #[inline]
    pub fn bytes(&mut self, at: usize, count: usize) -> &mut [u8] {
        let count_all = self.units.len() * 16;
        // SAFETY: units have no padding, and any bytes are a value of them.
        let all = unsafe { std::slice::from_raw_parts_mut(self.units.as_mut_ptr().cast::<u8>(), count_all) };
        &mut all[at..at + count]
    }

    /// What is wrong about reading bytes of a place, if anything.
    #[inline]
    pub fn state(&self, at: usize, bytes: usize) -> Option<Finding> {
        let states = &self.states[at..at + bytes];
        if states.iter().all(|state| *state == Byte::Written) {
            return None;
        }
        let pending = states.contains(&Byte::Pending);
        Some(if pending { Finding::UnfinishedCopy } else { Finding::Unwritten })
    }

    /// Whether an asynchronous copy will write one of the bytes.
    #[inline]
    pub fn is_pending(&self, at: usize, bytes: usize) -> bool {
        self.states[at..at + bytes].contains(&Byte::Pending)
    }

    /// Marks bytes as written.
    #[inline]
    pub fn mark_written(&mut self, at: usize, bytes: usize) {
        self.states[at..at + bytes].fill(Byte::Written);
    }

    /// Marks bytes as those that an asynchronous copy will write.
    pub fn mark_pending(&mut self, at: usize, bytes: usize) {
        self.states[at..at + bytes].fill(Byte::Pending);
    }

    /// The cells of the words that bytes of a place lie in.
    #[inline]
    pub fn cells(&mut self, at: usize, count: usize) -> &mut [Cell] {
        &mut self.cells[at / 4..(at + count).div_ceil(4)]
    }
}
