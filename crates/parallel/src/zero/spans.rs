//! A rank's stored numbers, as spans of named global tensors: the view of checkpoints and initial values.
//!
//! Numbers are f32 here, whatever the compute type. State 0 is the parameters: the master weights where there are any;
//! writing them also rounds them into the parameters. So files do not depend on the precision policy, but for frozen
//! parameters: they have no master weights, and are rounded to the compute type, or quantised.

use std::ops::Range;

use half::{bf16, f16};
use phalanx_optim::{PARAMETERS, Spread};
use phalanx_plan::{Segment, ZeroStage};
use phalanx_tensor::blocks::quantised;
use phalanx_tensor::{Category, DType, DeviceError, Tensor};

use super::floats::Numbers;
use super::rules::Member;
use super::states::Role;
use super::{Zero, update};

/// Selects elements of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// The elements that this rank alone saves: over all ranks, each element once.
    Owned,
    /// All elements that this rank stores; they must be filled before training.
    Resident,
}

/// A contiguous span of a parameter, or of an optimizer state of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpan {
    /// Index of the parameter in the stage's network.
    pub parameter: usize,
    /// Which of those that are joined in it.
    pub member: usize,
    /// Elements of this rank's part of that one, or numbers of the state that it keeps of this part.
    pub elements: Range<u64>,
    chunk: usize,
    /// Elements of the chunk, or numbers in the slot of the state.
    place: Range<usize>,
}

impl Zero {
    /// Names of what is stored: the parameters, then the optimizer's states. Not every parameter has each of them.
    pub fn state_names(&self) -> Vec<&'static str> {
        [PARAMETERS].iter().chain(self.rules.names()).copied().collect()
    }

    /// The spans of state `state` (0: parameters, then the optimizer's states) that this rank owns or stores.
    pub fn spans(&self, state: usize, selection: Selection) -> Vec<StateSpan> {
        let range = |c: usize| match (selection, state) {
            (Selection::Owned, _) => self.map.shard(c),
            (Selection::Resident, 0) => match self.options.stage {
                ZeroStage::Three if !self.map.residence.is_whole(c) => self.map.shard(c),
                _ => self.map.whole(c),
            },
            (Selection::Resident, _) => update::stepped(&self.map, self.options.stage, c),
        };
        let of_chunk = |c: usize| {
            let range = range(c);
            let segments = self.map.layout.segments(c, range.start as u64..range.end as u64);
            let counts = |s: &Segment| selection == Selection::Resident || self.map.answers[s.parameter];
            segments.filter(counts).flat_map(move |s| self.members(state, c, s))
        };
        let chunks = if state == 0 { self.map.chunk_count() } else { self.map.trained };
        (0..chunks).flat_map(of_chunk).collect()
    }

    /// The spans of a state that belong to the parameters in a segment, of those that have it.
    fn members(&self, state: usize, chunk: usize, segment: Segment) -> Vec<StateSpan> {
        let first = update::stepped(&self.map, self.options.stage, chunk).start;
        let span = |member: Member| {
            let Member { number, rule, in_member, in_chunk } = member;
            let (parameter, member) = (segment.parameter, number);
            if state == 0 {
                return Some(StateSpan { parameter, member, elements: in_member, chunk, place: in_chunk });
            }
            let local = in_chunk.start - first..in_chunk.end - first;
            let place = self.states.numbers((chunk, state - 1), &local)?;
            let start = match self.rules.spread(rule, state - 1)? {
                Spread::Elements => in_member.start,
                Spread::Blocks(block) => in_member.start / block as u64,
                Spread::Whole(_) => 0,
            };
            let elements = start..start + place.len() as u64;
            Some(StateSpan { parameter, member, elements, chunk, place })
        };
        self.rules.members(&segment).into_iter().filter_map(span).collect()
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
        let at = piece.place.start + within.start..piece.place.start + within.end;
        if state > 0 {
            return self.states.read((piece.chunk, self.slot(state, piece)), at, out);
        }
        let first = update::stepped(&self.map, self.options.stage, piece.chunk).start;
        let stored =
            self.states.exact_parameters(piece.chunk).or_else(|| self.states.parameters(piece.chunk));
        if let Some(index) = stored {
            return self.states.read((piece.chunk, index), at.start - first..at.end - first, out);
        }
        let (view, resident) = self.parameters.resident(&self.map, piece.chunk);
        let view = view.range(at.start - resident.start..at.end - resident.start);
        if view.dtype() == DType::F32 {
            return self.device.download(view, out);
        }
        out.copy_from_slice(&Numbers::Device(view).read(&self.device)?);
        Ok(())
    }

    /// The slot of a state of which there is a span.
    fn slot(&self, state: usize, piece: &StateSpan) -> usize {
        let chunk = &self.states.chunks[piece.chunk];
        chunk.position(Role::State(state - 1)).expect("the chunk of a span has its state")
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
        (self.precision.has_master() && (0..self.map.chunk_count()).any(rounds_here)).then(alloc)
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
        let at = piece.place.start + within.start..piece.place.start + within.end;
        if state > 0 {
            return self.states.write((chunk, self.slot(state, piece)), at, from);
        }
        if let Some(index) = self.states.exact_parameters(chunk) {
            // Other ranks hold the master weights of the elements that they update.
            let stepped = update::stepped(&self.map, self.options.stage, chunk);
            let own = at.start.max(stepped.start)..at.end.min(stepped.end);
            if !own.is_empty() {
                let part = &from[own.start - at.start..own.end - at.start];
                let range = own.start - stepped.start..own.end - stepped.start;
                self.states.write((chunk, index), range, part)?;
            }
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
        if parameters.dtype().is_blocks() {
            self.device.upload(&quantised(parameters.dtype(), from), parameters.typed(DType::U32));
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
        match self.map.types[at.0] {
            blocks if blocks.is_blocks() => self.states.write(at, range, &quantised(blocks, from)),
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
