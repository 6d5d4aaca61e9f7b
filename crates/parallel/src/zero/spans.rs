//! A rank's stored numbers, as spans of named global tensors: the view of checkpoints and initial values.
//!
//! Numbers are f32 here, whatever the compute type. State 0 is the parameters: the master weights where there are any;
//! writing them also rounds them into the parameters. So files do not depend on the precision policy, but for frozen
//! parameters: they have no master weights, and are rounded to the compute type, or quantised.

use std::ops::Range;

use half::{bf16, f16};
use phalanx_optim::{PARAMETERS, Spread};
use phalanx_plan::Segment;
use phalanx_plan::program::{Role, StageChunks};
use phalanx_tensor::blocks::quantised;
use phalanx_tensor::{Category, DType, DeviceError, Element, Memory, Tensor};

use super::Chunks;
use super::held::Held;
use super::rules::Member;

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
    /// The chunk, counted over the stages of the rank.
    of: usize,
    /// Elements of the chunk, or numbers in the slot of the state.
    place: Range<usize>,
}

impl Chunks {
    /// Names of what a stage of the rank stores: the parameters, then the optimizer's states. Not every parameter has each of them.
    pub fn state_names(&self, stage: usize) -> Vec<&'static str> {
        [PARAMETERS].iter().chain(self.held[stage].rules.names()).copied().collect()
    }

    /// The spans of state `state` (0: parameters, then the optimizer's states) that this rank owns or stores of a stage.
    pub fn spans(&self, stage: usize, state: usize, selection: Selection) -> Vec<StateSpan> {
        let (held, described) = (&self.held[stage], &self.described.stages[stage]);
        let range = |c: usize| match (selection, state) {
            (Selection::Owned, _) => held.map.shard(c),
            (Selection::Resident, 0) if described.is_gathered(self.described.policies.stage, c) => {
                held.map.shard(c)
            }
            (Selection::Resident, 0) => held.map.whole(c),
            (Selection::Resident, _) => held.map.updated(c),
        };
        let of_chunk = |c: usize| {
            let range = range(c);
            let segments = held.map.layout.segments(c, range.start as u64..range.end as u64);
            let counts = |s: &Segment| selection == Selection::Resident || held.map.answers[s.parameter];
            segments.filter(counts).flat_map(move |s| members(held, (described.first_chunk, c), state, s))
        };
        let chunks = if state == 0 { held.map.layout.chunks() } else { held.map.trained };
        (0..chunks).flat_map(of_chunk).collect()
    }

    /// Downloads elements `within` of an owned span. Behind a save, which waits for what is in flight.
    ///
    /// # Errors
    /// When the device failed.
    pub fn read_span(
        &self,
        state: usize,
        piece: &StateSpan,
        within: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let at = piece.place.start + within.start..piece.place.start + within.end;
        let (held, c) = self.held(piece.of);
        if state > 0 {
            return self.read_row((role_of(held, c, state), piece.of), at, out);
        }
        let role = if self.has(Role::Master, piece.of) { Role::Master } else { Role::Parameters };
        let first = self.first_of(role, piece.of);
        self.read_row((role, piece.of), at.start - first..at.end - first, out)
    }

    fn has(&self, role: Role, of: usize) -> bool {
        self.rows.contains_key(&(role, of))
    }

    /// The first element of a chunk that a row of resident buffers has.
    fn first_of(&self, role: Role, of: usize) -> usize {
        self.elements(&self.spec(self.row(role, of)[0])).start
    }

    /// Memory in which [`Chunks::write_span`] rounds at most `max_elements` elements of a stage; None when parameters are f32, or none
    /// lie in device memory.
    pub fn rounding_window(&self, stage: usize, max_elements: usize) -> Option<Tensor> {
        let StageChunks { chunks, .. } = &self.described.stages[stage];
        let largest = chunks.iter().map(|chunk| chunk.elements as usize).max().unwrap_or(0);
        let (category, name) = (Category::Workspace, "load.rounding_window");
        let alloc = || self.device.alloc(DType::F32, [largest.min(max_elements)], category, name);
        let rounds_here = chunks.iter().any(|chunk| chunk.parameters == Memory::Device);
        (self.described.policies.precision.has_master() && rounds_here).then(alloc)
    }

    /// Uploads elements `within` of a span, through the memory of [`Chunks::rounding_window`]. Behind a save, which waits for what is in
    /// flight.
    ///
    /// # Errors
    /// When the device failed.
    pub fn write_span(
        &mut self,
        state: usize,
        piece: &StateSpan,
        within: Range<usize>,
        from: &[f32],
        window: Option<&mut Tensor>,
    ) -> Result<(), DeviceError> {
        let at = piece.place.start + within.start..piece.place.start + within.end;
        let (held, c) = self.held(piece.of);
        if state > 0 {
            return self.write_row((role_of(held, c, state), piece.of), at, from);
        }
        if self.has(Role::Master, piece.of) {
            // Other ranks hold the master weights of the elements that they update.
            let updated = held.map.updated(c);
            let own = at.start.max(updated.start)..at.end.min(updated.end);
            if !own.is_empty() {
                let part = &from[own.start - at.start..own.end - at.start];
                let range = own.start - updated.start..own.end - updated.start;
                self.write_row((Role::Master, piece.of), range, part)?;
            }
        }
        let first = self.first_of(Role::Parameters, piece.of);
        let (row, range) = ((Role::Parameters, piece.of), at.start - first..at.end - first);
        let spec = self.spec(self.row(row.0, row.1)[0]);
        match (spec.dtype, spec.memory) {
            (DType::F32, _) => self.write_row(row, range, from),
            (blocks, _) if blocks.is_blocks() => self.write_row(row, range, &quantised(blocks, from)),
            (_, Memory::Device) => {
                let mut window = window.expect("a rounding window").view_mut().range(0..from.len());
                self.device.upload(from, window.reborrow());
                self.change(self.row(row.0, row.1)[0], |chunks, parameters| {
                    chunks.device.convert(window.as_view(), parameters.range(range));
                });
                Ok(())
            }
            (DType::BF16, _) => {
                self.write_row(row, range, &from.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>())
            }
            _ => self.write_row(row, range, &from.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>()),
        }
    }

    /// Overwrites numbers `range` of a row; those in blocks with their words.
    fn write_row<T: Element>(
        &mut self,
        of: (Role, usize),
        range: Range<usize>,
        from: &[T],
    ) -> Result<(), DeviceError> {
        for (buffer, inside, within) in self.split(of, &range) {
            let dtype = self.spec(buffer).dtype;
            let place = |at: usize| dtype.bytes_of(at) / T::DTYPE.bytes();
            let from = &from[place(within.start)..place(within.end)];
            let mut tensor = self.take(buffer);
            let done = match tensor.memory() {
                Memory::Device => {
                    let to = tensor.view_mut().typed(dtype).range(inside);
                    self.device.upload(from, to.typed(T::DTYPE));
                    Ok(())
                }
                _ => self.device.write_stored(from, &mut tensor, inside),
            };
            self.put(buffer, tensor);
            done?;
        }
        Ok(())
    }
}

/// The contents of the buffers of a state, of which a chunk has a span.
fn role_of(held: &Held, c: usize, state: usize) -> Role {
    let at = held.states[c].iter().position(|(number, _)| *number == state - 1);
    Role::State(at.expect("the chunk of a span has its state") as u16)
}

/// The spans of a state that belong to the parameters in a segment, of those that have it.
fn members(held: &Held, (first_chunk, c): (usize, usize), state: usize, segment: Segment) -> Vec<StateSpan> {
    let (first, of) = (held.map.updated(c).start, first_chunk + c);
    let span = |member: Member| {
        let Member { number, rule, in_member, in_chunk } = member;
        let (parameter, member) = (segment.parameter, number);
        if state == 0 {
            return Some(StateSpan { parameter, member, elements: in_member, of, place: in_chunk });
        }
        let (_, places) = held.states[c].iter().find(|(number, _)| *number == state - 1)?;
        let place = places.numbers(&(in_chunk.start - first..in_chunk.end - first))?;
        let start = match held.rules.spread(rule, state - 1)? {
            Spread::Elements => in_member.start,
            Spread::Blocks(block) => in_member.start / block as u64,
            Spread::Whole(_) => 0,
        };
        let elements = start..start + place.len() as u64;
        Some(StateSpan { parameter, member, elements, of, place })
    };
    held.rules.members(&segment).into_iter().filter_map(span).collect()
}
