//! Gradients that lie in host memory or on disk: how they leave while backward runs, and how they come back for the next
//! micro-batch, for norms and for sums over other axes.

use std::collections::VecDeque;
use std::ops::Range;

use phalanx_tensor::{DeviceError, Tensor, View};

use super::floats::Numbers;
use super::states::{Role, States, is_in_reach};
use crate::tiles::{self, Arriving, Leaving};

/// Chunks of gradients that leave while backward goes on; each holds its buffer.
const LEAVING: usize = 2;

/// Tiles of gradients that arrive while an earlier one is read.
const AHEAD: usize = 2;

/// A part of a chunk: elements of what this rank updates.
pub(super) type ChunkRange = (usize, Range<usize>);

impl States {
    /// Returns whether the gradients of a chunk are stored here.
    pub(super) fn has_gradients(&self, chunk: usize) -> bool {
        self.chunks[chunk].position(Role::Gradients).is_some()
    }

    /// Starts to move elements `part` of a buffer to where the gradients of a chunk stay. The buffer is freed when it was
    /// read.
    pub(super) fn send_gradients(
        &mut self,
        chunk: usize,
        buffer: Tensor,
        part: Range<usize>,
    ) -> Result<(), DeviceError> {
        let stored = self.chunks[chunk].slot_mut(Role::Gradients).take();
        let leaving = tiles::send(&self.device, buffer, part, stored, 0);
        // Those before go on from host memory to disk meanwhile.
        self.continue_leaving()?;
        self.leaving.push_back((chunk, leaving));
        while self.leaving.len() > LEAVING {
            self.receive_gradients()?;
        }
        Ok(())
    }

    /// Starts to bring the first `elements` elements of the gradients of a chunk to the device.
    pub(super) fn fetch_gradients(&mut self, chunk: usize, elements: usize) -> Result<Arriving, DeviceError> {
        while self.leaving.iter().any(|(leaving, _)| *leaving == chunk) {
            self.receive_gradients()?;
        }
        let stored = self.chunks[chunk].slot_mut(Role::Gradients).take();
        Ok(tiles::bring(&self.device, stored, 0..elements))
    }

    /// Waits for gradients that were fetched.
    pub(super) fn fetched_gradients(
        &mut self,
        chunk: usize,
        arriving: Arriving,
    ) -> Result<Tensor, DeviceError> {
        let (stored, here) = tiles::arrive(&self.device, arriving)?;
        self.chunks[chunk].slot_mut(Role::Gradients).put(stored);
        Ok(here)
    }

    /// Waits until all gradients are where they stay.
    pub(super) fn settle_gradients(&mut self) -> Result<(), DeviceError> {
        self.continue_leaving()?;
        while !self.leaving.is_empty() {
            self.receive_gradients()?;
        }
        Ok(())
    }

    /// A part of the summed gradients in a new tensor on the device.
    pub(super) fn read_gradients(&mut self, (chunk, part): ChunkRange) -> Result<Tensor, DeviceError> {
        let stored = self.chunks[chunk].slot_mut(Role::Gradients).take();
        let arriving = tiles::bring(&self.device, stored, part);
        self.fetched_gradients(chunk, arriving)
    }

    /// Overwrites a part of the summed gradients, from element `start` on, with a tensor on the device.
    pub(super) fn write_gradients(
        &mut self,
        chunk: usize,
        start: usize,
        from: Tensor,
    ) -> Result<(), DeviceError> {
        let all = 0..from.shape().elements();
        let stored = self.chunks[chunk].slot_mut(Role::Gradients).take();
        let leaving = tiles::send(&self.device, from, all, stored, start);
        let stored = tiles::depart(&self.device, leaving)?;
        self.chunks[chunk].slot_mut(Role::Gradients).put(stored);
        Ok(())
    }

    /// Views of the tiles that hold a part of the summed gradients, each with its first element of the chunk's part.
    pub(super) fn gradient_views(&self, (chunk, part): ChunkRange) -> Vec<(usize, View<'_>)> {
        let position = self.chunks[chunk].position(Role::Gradients).expect("gradients are stored here");
        let slot = &self.chunks[chunk].slots[position];
        let view = |(tile, inside, within): (usize, Range<usize>, Range<usize>)| {
            let tile: &Tensor = slot.tiles[tile].as_ref().expect("gradients are in their places");
            (part.start + within.start, tile.view().range(inside))
        };
        slot.split(&part).into_iter().map(view).collect()
    }

    /// A part of the summed gradients as f32 in host memory, in pieces, each with its first element.
    pub(super) fn gradient_pieces(
        &self,
        (chunk, part): ChunkRange,
    ) -> Result<Vec<(usize, Vec<f32>)>, DeviceError> {
        let position = self.chunks[chunk].position(Role::Gradients).expect("gradients are stored here");
        let slot = &self.chunks[chunk].slots[position];
        let piece = |(tile, inside, within): (usize, Range<usize>, Range<usize>)| {
            let tile: &Tensor = slot.tiles[tile].as_ref().expect("gradients are in their places");
            Ok((part.start + within.start, Numbers::Stored(tile, inside).read(&self.device)?))
        };
        slot.split(&part).into_iter().map(piece).collect()
    }

    /// Shows parts of the summed gradients on the device, piece after piece, each with its chunk and elements.
    pub(super) fn show_gradients(
        &mut self,
        parts: Vec<ChunkRange>,
        mut see: impl FnMut(usize, Range<usize>, View),
    ) -> Result<(), DeviceError> {
        let mut coming: VecDeque<(usize, usize, Range<usize>, Arriving)> = VecDeque::new();
        for (chunk, part) in parts {
            let position = self.chunks[chunk].position(Role::Gradients).expect("gradients are stored here");
            let slot = &self.chunks[chunk].slots[position];
            if is_in_reach(&self.device, slot.memory) {
                let view = slot.tiles[0].as_ref().expect("gradients are in their places").view();
                see(chunk, part.clone(), view.range(part));
                continue;
            }
            for (tile, inside, within) in slot.split(&part) {
                let slot = &mut self.chunks[chunk].slots[position];
                let stored = slot.tiles[tile].take().expect("gradients are in their places");
                let arriving = tiles::bring(&self.device, vec![stored], inside);
                let elements = part.start + within.start..part.start + within.end;
                coming.push_back((chunk, tile, elements, arriving));
                if coming.len() > AHEAD {
                    self.show_first(&mut coming, &mut see)?;
                }
            }
        }
        while !coming.is_empty() {
            self.show_first(&mut coming, &mut see)?;
        }
        Ok(())
    }

    /// Shows the piece that was fetched first, while those behind it go on to the device.
    fn show_first(
        &mut self,
        coming: &mut VecDeque<(usize, usize, Range<usize>, Arriving)>,
        see: &mut impl FnMut(usize, Range<usize>, View),
    ) -> Result<(), DeviceError> {
        let Some((chunk, tile, elements, arriving)) = coming.pop_front() else { return Ok(()) };
        let (mut stored, here) = tiles::arrive(&self.device, arriving)?;
        self.chunks[chunk].slot_mut(Role::Gradients).tiles[tile] = stored.pop();
        if let Some((chunk, tile, elements, next)) = coming.pop_front() {
            let next = tiles::continue_arrival(&self.device, next)?;
            coming.push_front((chunk, tile, elements, next));
        }
        see(chunk, elements, here.view());
        Ok(())
    }

    /// Starts the second half of transfers that lead through host memory.
    fn continue_leaving(&mut self) -> Result<(), DeviceError> {
        for (chunk, leaving) in std::mem::take(&mut self.leaving) {
            let leaving: Leaving = tiles::continue_departure(&self.device, leaving)?;
            self.leaving.push_back((chunk, leaving));
        }
        Ok(())
    }

    /// Waits until the gradients that left first are in their places.
    fn receive_gradients(&mut self) -> Result<(), DeviceError> {
        let Some((chunk, leaving)) = self.leaving.pop_front() else { return Ok(()) };
        let stored = tiles::depart(&self.device, leaving)?;
        self.chunks[chunk].slot_mut(Role::Gradients).put(stored);
        Ok(())
    }
}
