//! What a rank stores, as spans of named global tensors: the view of checkpoints and initial values.
//!
//! Numbers are f32 here, whatever the compute type. State 0 is the parameters: the master weights where there are any;
//! writing them also rounds them into the parameters. So files do not depend on the precision policy, but for frozen
//! parameters: they have no master weights, and are rounded to the compute type.

use std::ops::Range;

use half::{bf16, f16};
use phalanx_plan::{Segment, Stage};
use phalanx_tensor::{Category, DType, DeviceError, Tensor};

use super::floats::Numbers;
use super::{Zero, update};

/// Selects elements of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The elements that this rank alone saves: over all ranks, each element once.
    Owned,
    /// All elements that this rank stores; they must be filled before training.
    Resident,
}

/// A contiguous span of a parameter, or of an optimizer state of the same shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpan {
    /// Index of the parameter in the stage's network.
    pub parameter: usize,
    /// Elements of this rank's part of the parameter.
    pub in_parameter: Range<u64>,
    chunk: usize,
    /// Elements of the chunk.
    in_chunk: Range<usize>,
}

impl Zero {
    /// Number of tensors stored for each parameter: the parameter itself, then the optimizer states.
    pub fn state_count(&self) -> usize {
        1 + self.options.optimizer.states().len()
    }

    /// The spans of state `state` (0: parameters, then the optimizer's states) that this rank owns or stores.
    pub fn spans(&self, state: usize, extent: Extent) -> Vec<StateSpan> {
        let range = |c: usize| match (extent, state) {
            (Extent::Owned, _) => self.map.shard(c),
            (Extent::Resident, 0) => match self.options.stage {
                Stage::Three if !self.options.residence.is_whole(c) => self.map.shard(c),
                _ => self.map.whole(c),
            },
            (Extent::Resident, _) => update::stepped(&self.map, self.options.stage, c),
        };
        let of_chunk = |c: usize| {
            let range = range(c);
            let segments = self.map.layout.segments(c, range.start as u64..range.end as u64);
            let counts = |s: &Segment| extent == Extent::Resident || self.map.answers[s.parameter];
            segments.filter(counts).map(move |s| StateSpan {
                parameter: s.parameter,
                in_parameter: s.in_parameter,
                chunk: c,
                in_chunk: s.in_chunk.start as usize..s.in_chunk.end as usize,
            })
        };
        let chunks = if state == 0 { self.map.chunk_count() } else { self.map.trained };
        (0..chunks).flat_map(of_chunk).collect()
    }

    /// Downloads elements `within` of an owned span. [`Zero::settle`] must have been called.
    ///
    /// # Errors
    /// When the device failed.
    pub fn read(
        &self,
        state: usize,
        piece: &StateSpan,
        within: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let at = piece.in_chunk.start + within.start..piece.in_chunk.start + within.end;
        let first = update::stepped(&self.map, self.options.stage, piece.chunk).start;
        let frozen = || self.states.parameters(piece.chunk).map(|index| (index, first));
        if let Some((index, start)) = self.stored(state, piece.chunk).or_else(frozen) {
            return self.states.read((piece.chunk, index), at.start - start..at.end - start, out);
        }
        let (view, resident) = self.parameters.resident(&self.map, piece.chunk);
        let view = view.range(at.start - resident.start..at.end - resident.start);
        if view.dtype() == DType::F32 {
            return self.device.download(view, out);
        }
        out.copy_from_slice(&Numbers::Device(view).read(&self.device)?);
        Ok(())
    }

    /// Where the f32 values of a state lie among the tensors of the optimizer, and the element of the chunk at which they
    /// start. None for f32 parameters, which are stored as such, and for frozen ones.
    fn stored(&self, state: usize, chunk: usize) -> Option<(usize, usize)> {
        let index = match state {
            0 => self.states.exact_parameters(chunk)?,
            _ => state - 1,
        };
        Some((index, update::stepped(&self.map, self.options.stage, chunk).start))
    }

    /// Memory in which [`Zero::write`] rounds at most `max_elements` elements; None when parameters are f32, or none
    /// lie in device memory.
    pub fn rounding_window(&self, max_elements: usize) -> Option<Tensor> {
        let largest = (0..self.map.chunk_count()).map(|c| self.map.whole(c).len()).max().unwrap_or(0);
        let alloc = || {
            self.device.alloc(
                DType::F32,
                [largest.min(max_elements)],
                Category::Workspace,
                "load.rounding_window",
            )
        };
        let rounds_here = |c: usize| self.states.parameters(c).is_none();
        (self.options.precision.has_master() && (0..self.map.chunk_count()).any(rounds_here)).then(alloc)
    }

    /// Uploads elements `within` of a span, through the memory of [`Zero::rounding_window`]. [`Zero::settle`] must have
    /// been called.
    ///
    /// # Errors
    /// When the device failed.
    pub fn write(
        &mut self,
        state: usize,
        piece: &StateSpan,
        within: Range<usize>,
        from: &[f32],
        window: Option<&mut Tensor>,
    ) -> Result<(), DeviceError> {
        let chunk = piece.chunk;
        let at = piece.in_chunk.start + within.start..piece.in_chunk.start + within.end;
        let stored = self.stored(state, chunk);
        if let Some((index, _)) = stored {
            // Other ranks hold the master weights of the elements that they update.
            let stepped = update::stepped(&self.map, self.options.stage, chunk);
            let own = at.start.max(stepped.start)..at.end.min(stepped.end);
            if !own.is_empty() {
                let part = &from[own.start - at.start..own.end - at.start];
                let range = own.start - stepped.start..own.end - stepped.start;
                self.states.write((chunk, index), range, part)?;
            }
        }
        if state > 0 {
            return Ok(());
        }
        if let Some(slot) = self.states.parameters(chunk) {
            return self.write_away((chunk, slot), at.start - self.map.shard(chunk).start, from);
        }
        let (parameters, resident) = self.parameters.resident_mut(&self.map, chunk);
        let parameters = parameters.range(at.start - resident.start..at.end - resident.start);
        if parameters.dtype() == DType::F32 {
            self.device.upload(from, parameters);
            return Ok(());
        }
        let mut window = window.expect("a rounding window").view_mut().range(0..from.len());
        self.device.upload(from, window.reborrow());
        self.device.convert(window.as_view(), parameters);
        Ok(())
    }

    /// Rounds f32 numbers into parameters that are not in device memory, from element `start` of this rank's shard on.
    fn write_away(&mut self, at: (usize, usize), start: usize, from: &[f32]) -> Result<(), DeviceError> {
        let range = start..start + from.len();
        match self.options.precision.compute {
            DType::BF16 => {
                self.states.write(at, range, &from.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>())
            }
            DType::F16 => {
                self.states.write(at, range, &from.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>())
            }
            // Written as the exact parameters.
            _ => Ok(()),
        }
    }
}
