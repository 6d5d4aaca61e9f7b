//! Placements of each piece of memory: for every allocation, marks by byte offset.
//!
//! A mark holds from its offset to the next one's. Allocations are numbered from 0 without gaps, so the table is a list; a freed
//! allocation leaves only its name behind.

use std::ops::Range;

use phalanx_plan::trace::{Axis, Fault, PhaseName, Placement, Placements, Site};

use crate::address::Spot;
use crate::view::View;

/// Most faults that a trace keeps: the first ones explain the others.
const MAX_FAULTS: usize = 20;

/// Placement of a piece of memory. Along an axis it may fit every placement: a zero is replicated, a part and a partial sum at
/// once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    along: [Option<Placement>; 3],
    /// Dimensions of the tensor whose dimensions are sharded.
    dimensions: u8,
    /// True if operations that are linear in it may read it where it is a partial sum.
    summed_later: bool,
}

impl Mark {
    /// The mark of a zero.
    pub const ZERO: Mark = Mark { along: [None; 3], dimensions: 0, summed_later: false };
    /// The same everywhere.
    pub const REPLICATED: Mark =
        Mark { along: [Some(Placement::Replicated); 3], dimensions: 0, summed_later: false };

    /// The mark of a tensor with so many dimensions.
    pub fn new(placements: Placements, dimensions: usize) -> Mark {
        let along = Axis::ALL.map(|axis| Some(placements.get(axis)));
        Mark { along, dimensions: dimensions as u8, summed_later: false }
    }

    /// The placement along an axis, in the dimensions of [`Mark::dimensions`]; None if it fits every one.
    pub fn get(self, axis: Axis) -> Option<Placement> {
        self.along[axis as usize]
    }

    /// The same with another placement along an axis.
    #[must_use]
    pub fn with(mut self, axis: Axis, placement: Option<Placement>) -> Mark {
        self.along[axis as usize] = placement;
        self
    }

    /// Dimensions of the tensor that was marked.
    pub fn dimensions(self) -> usize {
        self.dimensions as usize
    }

    /// The same, which operations that are linear in it may read where it is a partial sum.
    #[must_use]
    pub(crate) fn summed_later(self) -> Mark {
        Mark { summed_later: true, ..self }
    }

    /// Returns whether operations that are linear in it may read it where it is a partial sum.
    pub(crate) fn is_summed_later(self) -> bool {
        self.summed_later
    }

    /// The same, of a tensor of so many dimensions: further ones lie before the last.
    #[must_use]
    pub fn of_dimensions(mut self, dimensions: usize) -> Mark {
        for placement in self.along.iter_mut().flatten() {
            if let Placement::Shard(d) = placement {
                *d = self::dimension(*d, self.dimensions as usize, dimensions);
            }
        }
        self.dimensions = dimensions as u8;
        self
    }

    /// Along axes where every placement fits, the other's.
    #[must_use]
    pub fn or(self, other: Mark) -> Mark {
        let dimensions = self.dimensions().max(other.dimensions());
        let (own, other) = (self.of_dimensions(dimensions), other.of_dimensions(dimensions));
        Axis::ALL.into_iter().fold(own, |mark, axis| mark.with(axis, own.get(axis).or(other.get(axis))))
    }

    /// Returns whether two tensors of the same elements are placed likewise along an axis. If their numbers of dimensions differ,
    /// all dimensions but the last are rows; one that is flat may be cut anywhere.
    pub fn agrees(self, other: Mark, axis: Axis) -> bool {
        match (self.get(axis), other.get(axis)) {
            (None, _) | (_, None) => true,
            (Some(Placement::Shard(_)), Some(Placement::Shard(_)))
                if self.dimensions.min(other.dimensions) <= 1 =>
            {
                true
            }
            (Some(Placement::Shard(a)), Some(Placement::Shard(b))) if self.dimensions != other.dimensions => {
                (a + 1 == self.dimensions) == (b + 1 == other.dimensions)
            }
            (a, b) => a == b,
        }
    }

    /// As seen by a tensor of so many dimensions over the same memory: the last dimension stays the last, the
    /// others are rows. A zero is replicated.
    pub fn seen_in(self, dimensions: usize) -> Placements {
        let mark = self.of_dimensions(dimensions);
        Axis::ALL.into_iter().fold(Placements::REPLICATED, |placements, axis| {
            placements.with(axis, mark.get(axis).unwrap_or_default())
        })
    }
}

fn dimension(d: u8, from: usize, to: usize) -> u8 {
    let last = to.saturating_sub(1) as u8;
    match from {
        _ if from == to => d,
        0 | 1 => 0,
        _ if d as usize == from - 1 => last,
        _ => d.min(last.saturating_sub(1)),
    }
}

/// A piece of a view, in elements of it, and what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) elements: Range<usize>,
    pub(crate) mark: Option<Mark>,
}

/// The marks of all allocations of a dry run.
#[derive(Default)]
pub(crate) struct Table {
    allocations: Vec<Entry>,
    pub(crate) scopes: Vec<String>,
    checked: [bool; 3],
    pub(crate) faults: Vec<Fault>,
}

struct Entry {
    name: &'static str,
    pieces: Option<Box<Pieces>>,
}

#[derive(Default)]
struct Pieces {
    /// Ascending offsets in bytes; before the first, nothing is known.
    marks: Vec<(u64, Option<Mark>)>,
    /// Ascending offsets in bytes of pieces with names of their own.
    names: Vec<(u64, String)>,
}

impl Table {
    /// The next allocation.
    pub(crate) fn alloc(&mut self, name: &'static str) {
        self.allocations.push(Entry { name, pieces: None });
    }

    pub(crate) fn free(&mut self, allocation: u32) {
        self.allocations[allocation as usize].pieces = None;
    }

    /// Returns whether something was placed along the axis in any other way than replicated.
    pub(crate) fn is_checked(&self, axis: Axis) -> bool {
        self.checked[axis as usize]
    }

    /// The mark at the start of a view.
    pub(crate) fn mark_of(&self, view: View) -> Option<Mark> {
        self.at(view.address().spot()?)
    }

    fn at(&self, spot: Spot) -> Option<Mark> {
        let marks = &self.allocations[spot.allocation as usize].pieces.as_ref()?.marks;
        let next = marks.partition_point(|(offset, _)| *offset <= spot.offset);
        marks[..next].last()?.1
    }

    /// The pieces of a view, in order, covering it; none of an empty view.
    pub(crate) fn segments(&self, view: View) -> Vec<Segment> {
        let Some(spot) = view.address().spot().filter(|_| view.elements() > 0) else { return Vec::new() };
        let (end, dtype) = (spot.offset + view.bytes() as u64, view.dtype());
        let mut out = vec![Segment { elements: 0..view.elements(), mark: self.at(spot) }];
        let pieces = self.allocations[spot.allocation as usize].pieces.as_ref();
        let marks = pieces.map_or(&[][..], |pieces| &pieces.marks);
        let first = marks.partition_point(|(offset, _)| *offset <= spot.offset);
        for (offset, mark) in marks[first..].iter().take_while(|(offset, _)| *offset < end) {
            let start = (offset - spot.offset) as usize / dtype.block_bytes() * dtype.block();
            out.last_mut().expect("never empty").elements.end = start;
            out.push(Segment { elements: start..view.elements(), mark: *mark });
        }
        out
    }

    /// Marks a view.
    pub(crate) fn set(&mut self, view: View, mark: Option<Mark>) {
        self.set_range(view, 0..view.elements(), mark);
    }

    /// Marks some elements of a view.
    fn set_range(&mut self, view: View, elements: Range<usize>, mark: Option<Mark>) {
        let Some(spot) = view.address().spot().filter(|_| !elements.is_empty()) else { return };
        let byte = |element: usize| spot.offset + view.dtype().bytes_of(element) as u64;
        let (start, end) = (byte(elements.start), byte(elements.end));
        let after = self.at(Spot { offset: end, ..spot });
        let before = start.checked_sub(1).and_then(|offset| self.at(Spot { offset, ..spot }));
        let pieces = &mut self.allocations[spot.allocation as usize].pieces;
        if pieces.is_none() && mark.is_none() {
            return;
        }
        let marks = &mut pieces.get_or_insert_default().marks;
        let first = marks.partition_point(|(offset, _)| *offset < start);
        let next = marks.partition_point(|(offset, _)| *offset <= end);
        let own = (mark != before).then_some((start, mark));
        let rest = (after != mark).then_some((end, after));
        marks.splice(first..next, own.into_iter().chain(rest));
    }

    /// Marks `to` piece by piece by what `f` makes of the marks of `from` and `to`, which have equally many
    /// elements.
    pub(crate) fn combine(
        &mut self,
        from: View,
        to: View,
        mut f: impl FnMut(Option<Mark>, Option<Mark>) -> Option<Mark>,
    ) {
        debug_assert_eq!(from.elements(), to.elements());
        let (sources, targets) = (self.segments(from), self.segments(to));
        let (mut s, mut t, mut start) = (0, 0, 0);
        while s < sources.len() && t < targets.len() {
            let (source, target) = (&sources[s], &targets[t]);
            let end = source.elements.end.min(target.elements.end);
            self.set_range(to, start..end, f(source.mark, target.mark));
            s += (source.elements.end == end) as usize;
            t += (target.elements.end == end) as usize;
            start = end;
        }
    }

    /// The name of a piece: its own, or its allocation's, within the scopes.
    fn name(&self, view: View) -> String {
        let Some(spot) = view.address().spot() else { return "a tensor".to_string() };
        let entry = &self.allocations[spot.allocation as usize];
        let names = entry.pieces.as_ref().map_or(&[][..], |pieces| &pieces.names);
        let next = names.partition_point(|(offset, _)| *offset <= spot.offset);
        match names[..next].last() {
            Some((_, name)) => name.clone(),
            None => self.scopes.iter().map(String::as_str).chain([entry.name]).collect::<Vec<_>>().join("."),
        }
    }

    /// Keeps a fault, if there is room.
    pub(crate) fn fault(
        &mut self,
        phase: Option<PhaseName>,
        view: View,
        axis: Axis,
        what: String,
        site: Site,
    ) {
        let tensor = self.name(view);
        self.fault_of(phase, tensor, axis, what, site);
    }

    pub(crate) fn fault_of(
        &mut self,
        phase: Option<PhaseName>,
        tensor: String,
        axis: Axis,
        what: String,
        site: Site,
    ) {
        if self.faults.len() < MAX_FAULTS {
            self.faults.push(Fault { phase, tensor, axis, what, site });
        }
    }

    pub(crate) fn place(&mut self, view: View, placements: Placements, name: Option<String>) {
        for axis in Axis::ALL {
            self.checked[axis as usize] |= placements.get(axis) != Placement::Replicated;
        }
        self.set(view, Some(Mark::new(placements, view.shape().as_slice().len())));
        let Some((spot, name)) = view.address().spot().zip(name) else { return };
        let pieces = self.allocations[spot.allocation as usize].pieces.get_or_insert_default();
        match pieces.names.binary_search_by_key(&spot.offset, |(offset, _)| *offset) {
            Ok(at) => pieces.names[at].1 = name,
            Err(at) => pieces.names.insert(at, (spot.offset, name)),
        }
    }
}
