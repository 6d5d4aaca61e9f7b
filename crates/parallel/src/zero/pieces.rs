//! What a rank holds, as pieces of named global tensors: how checkpoints and initial values see it.

use std::ops::Range;

use super::{Zero, update};

/// Which elements of a state are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// What this rank alone answers for: over all ranks, each element once.
    Owned,
    /// Everything that is resident here and must be filled before training.
    Resident,
}

/// A contiguous piece of a parameter, or of a state of the same shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the parameter in the network.
    pub parameter: usize,
    /// Elements of the parameter.
    pub in_parameter: Range<u64>,
    chunk: usize,
    /// Elements of the chunk.
    in_chunk: Range<usize>,
}

impl Zero {
    /// Number of tensors kept for each parameter: itself, then the states of the rule.
    pub fn state_count(&self) -> usize {
        1 + self.options.rule.states().len()
    }

    /// Pieces of state `state` (0: parameters; then the rule's) that this rank owns or holds.
    pub fn pieces(&self, state: usize, extent: Extent) -> Vec<Piece> {
        let range = |c: usize| match (extent, state) {
            (Extent::Owned, _) => self.map.shard(c),
            (Extent::Resident, 0) => self.parameters.resident(&self.map, c).1,
            (Extent::Resident, _) => update::stepped(&self.map, self.options.stage, c),
        };
        let of_chunk = |c: usize| {
            let range = range(c);
            let segments = self.map.layout.segments(c, range.start as u64..range.end as u64);
            segments.map(move |s| Piece {
                parameter: s.parameter,
                in_parameter: s.in_parameter,
                chunk: c,
                in_chunk: s.in_chunk.start as usize..s.in_chunk.end as usize,
            })
        };
        (0..self.map.chunk_count()).flat_map(of_chunk).collect()
    }

    /// Elements `within` of a piece, to the host. Parameters must be settled.
    pub fn read(&self, state: usize, piece: &Piece, within: Range<usize>, out: &mut [f32]) {
        let at = piece.in_chunk.start + within.start..piece.in_chunk.start + within.end;
        let (view, start) = match state {
            0 => {
                let (view, resident) = self.parameters.resident(&self.map, piece.chunk);
                (view, resident.start)
            }
            s => {
                let stepped = update::stepped(&self.map, self.options.stage, piece.chunk);
                (self.states[piece.chunk][s - 1].view(), stepped.start)
            }
        };
        self.device.download(view.range(at.start - start..at.end - start), out);
    }

    /// Elements `within` of a piece, from the host. Parameters must be settled.
    pub fn write(&mut self, state: usize, piece: &Piece, within: Range<usize>, from: &[f32]) {
        let at = piece.in_chunk.start + within.start..piece.in_chunk.start + within.end;
        let (view, start) = match state {
            0 => {
                let (view, resident) = self.parameters.resident_mut(&self.map, piece.chunk);
                (view, resident.start)
            }
            s => {
                let stepped = update::stepped(&self.map, self.options.stage, piece.chunk);
                (self.states[piece.chunk][s - 1].view_mut(), stepped.start)
            }
        };
        self.device.upload(from, view.range(at.start - start..at.end - start));
    }
}
