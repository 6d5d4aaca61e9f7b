//! Memory that is aligned for direct transfers, for bytes whose own memory is not: checkpoints and the ends of tensors that
//! are no whole blocks. It is taken from the system at its first use.

use super::{BLOCK, STRIPE};
use crate::region::Region;

/// Pieces that can be in flight from and to memory that is not aligned.
const PIECES: usize = 4;

const PIECE_BYTES: usize = STRIPE as usize;

/// Bytes that transfers of memory that is not aligned take beside the arenas.
pub(super) const BOUNCE_BYTES: usize = PIECES * PIECE_BYTES + BLOCK;

/// Room for one block.
pub(super) struct Blocks(Region);

impl Blocks {
    pub(super) fn new() -> std::io::Result<Blocks> {
        Region::anonymous(BLOCK).map(Blocks)
    }

    pub(super) fn block(&mut self) -> &mut [u8] {
        // SAFETY: the region has at least a block, which only this borrow uses; it is zero-filled when it is new.
        unsafe { std::slice::from_raw_parts_mut(self.0.base(), BLOCK) }
    }
}

/// Buffers for pieces, and one for a block.
#[derive(Default)]
pub(super) struct Bounce {
    memory: Option<(Region, Blocks)>,
    is_used: [bool; PIECES],
}

impl Bounce {
    fn memory(&mut self) -> Result<&mut (Region, Blocks), String> {
        if self.memory.is_none() {
            let made =
                Region::anonymous(PIECES * PIECE_BYTES).and_then(|pieces| Ok((pieces, Blocks::new()?)));
            self.memory = Some(made.map_err(|error| format!("no memory for aligned buffers: {error}"))?);
        }
        Ok(self.memory.as_mut().expect("made above"))
    }

    /// A buffer for a piece: its number and its address. None while all are in use.
    pub(super) fn take(&mut self) -> Result<Option<(usize, usize)>, String> {
        let Some(number) = self.is_used.iter().position(|used| !used) else { return Ok(None) };
        let base = self.memory()?.0.base().expose_provenance();
        self.is_used[number] = true;
        Ok(Some((number, base + number * PIECE_BYTES)))
    }

    pub(super) fn give_back(&mut self, number: usize) {
        self.is_used[number] = false;
    }

    /// The buffer for a block.
    pub(super) fn block(&mut self) -> Result<&mut [u8], String> {
        Ok(self.memory()?.1.block())
    }
}
