//! The shared memory of a block, with what was written and what asynchronous copies will write.

use crate::bits;
use crate::checks::{Cell, Finding, ROW, Shadow};
use crate::parts::{Fault, Parts};

/// The largest shared memory of a block: that of a card of compute capability 8.0, less what the system keeps.
pub const MAX_SHARED: usize = 163 * 1024;

/// What shared memory holds before it is written: a NaN in every format.
const POISON: u64 = 0x7fff_7fff_7fff_7fff;

/// The shared memory of a block, with room for the largest. Its cells stay from block to block: they say whose they are.
pub struct SharedMemory {
    /// In units of 8 bytes.
    units: Vec<u64>,
    written: Vec<u64>,
    /// Bytes that an asynchronous copy writes; they are not in `written`.
    pending: Vec<u64>,
    rows: Vec<Cell>,
    words: Vec<Cell>,
    size: usize,
}

impl Default for SharedMemory {
    /// A memory without bytes, until a block begins.
    fn default() -> Self {
        let bits = bits::words_for(MAX_SHARED);
        let cells = |count| vec![Cell::default(); count];
        let (rows, words) = (cells(MAX_SHARED / ROW), cells(MAX_SHARED / 4));
        let units = vec![POISON; MAX_SHARED / 8];
        Self { units, written: vec![0; bits], pending: vec![0; bits], rows, words, size: 0 }
    }
}

impl SharedMemory {
    /// Makes the memory that of a new block.
    pub fn begin(&mut self, size: usize) {
        assert!(size <= MAX_SHARED, "a launch of more shared memory is refused");
        self.size = size;
        self.units[..size.div_ceil(8)].fill(POISON);
        self.written[..bits::words_for(size)].fill(0);
        self.pending[..bits::words_for(size)].fill(0);
    }

    /// The place of accesses of `bytes` each, a power of two, to `count` bytes in a row.
    ///
    /// # Errors
    /// If they are not aligned or not within the memory of the block.
    #[inline]
    pub fn place(&self, address: u64, bytes: usize, count: usize) -> Result<usize, Fault> {
        let at = address as usize;
        if at & (bytes - 1) == 0 && at < self.size && count <= self.size - at {
            return Ok(at);
        }
        let finding = if !at.is_multiple_of(bytes) { Finding::Misaligned } else { Finding::OutOfBounds };
        Err(Fault {
            finding,
            detail: format!("{bytes} bytes in the block's {} bytes of shared memory", self.size),
        })
    }

    /// The memory as accesses see it.
    #[inline]
    pub fn parts(&mut self) -> Parts<'_> {
        let units = &mut self.units;
        // SAFETY: units have no padding, and any bytes are a value of them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(units.as_mut_ptr().cast::<u8>(), MAX_SHARED) };
        Parts {
            bytes,
            written: &mut self.written,
            pending: &mut self.pending,
            shadow: Shadow { rows: &mut self.rows, words: &mut self.words },
        }
    }
}
