//! Symbolic sums of gradients and of squares: which terms they have, and over which groups they are summed.

use std::collections::BTreeSet;
use std::rc::Rc;

use crate::program::action::{Buffer, SumGroup};
use crate::program::chunks::{ChunkSpec, GradientPlace, StageChunks, TiedChunks};
use crate::program::list::{Extent, Role};

use super::Invariant;
use super::contents::{Numbers, Part, Terms, Value};
use super::walk::{Broken, Walk, expect};

impl Walk<'_> {
    /// The terms of a gradient of a chunk, with all writers of each of its micro-batches.
    fn terms(&self, of: usize, value: &Value, is_summed: bool) -> Result<Rc<Terms>, Broken> {
        let writers = self.writers.get(&of).map_or(0, |writers| writers.blocks);
        if let Value::Gradient(terms) = value
            && terms.phase == self.phase
            && terms.over.is_empty() != is_summed
        {
            let micro_batches: BTreeSet<u32> = terms.runs.iter().map(|run| run.0).collect();
            if micro_batches.len() * writers == terms.runs.len() {
                return Ok(Rc::clone(terms));
            }
        }
        Err((Invariant::Terms, format!("chunk {of} has {value}")))
    }

    /// The gradient of a chunk, which layers have written and what they have not is cleared.
    pub(super) fn written(&self, buffer: Buffer, value: &Value) -> Result<Rc<Terms>, Broken> {
        let of = self.of(buffer);
        let is_written = matches!(self.program.spec(buffer).role, Role::Gradient | Role::Partial(_));
        let is_clear = !is_written || !self.begun.contains(&of);
        expect(is_clear, Invariant::Terms, || format!("{} is not cleared", self.name(buffer)))?;
        self.terms(of, value, false)
    }

    /// Checks that a sum has all micro-batches of the step, and is summed over the groups of which `over` says so, and no others.
    pub(super) fn complete(&self, buffer: Buffer, value: &Value, over: &[SumGroup]) -> Result<(), Broken> {
        let of = self.of(buffer);
        let terms = self.terms(of, value, true)?;
        let all = self.writers.get(&of).map_or(0, |w| w.blocks * w.micro_batches);
        let is_complete = terms.runs.len() == all && terms.over == over && self.is_written_back(of, over);
        expect(is_complete, Invariant::Terms, || format!("{} has {value}", self.name(buffer)))
    }

    /// The stage of a chunk, and its number there.
    pub(super) fn stage_of(&self, of: usize) -> (&StageChunks, usize) {
        let stage = self.rank.stages.iter().rfind(|stage| stage.first_chunk <= of);
        let stage = stage.expect("the stage of a chunk");
        (stage, of - stage.first_chunk)
    }

    /// The groups over which the gradient of a chunk is summed in the end.
    pub(super) fn groups(&self, of: usize) -> Vec<SumGroup> {
        let (stage, c) = self.stage_of(of);
        let has_terms = stage.terms.pieces.iter().any(|piece| piece.chunk == c);
        let terms = has_terms.then_some(SumGroup::Tensor);
        let has = |tied: &TiedChunks| tied.copies.iter().any(|(chunk, _)| *chunk == of);
        let is_tied = self.rank.ties.iter().any(|tied| tied.elements > 0 && has(tied));
        let tied = is_tied.then_some(SumGroup::Tie);
        [Some(SumGroup::Data), terms, tied].into_iter().flatten().collect()
    }

    /// The group over which a buffer with terms is summed.
    fn axis(&self, buffer: Buffer) -> SumGroup {
        if self.program.spec(buffer).role == Role::Terms { SumGroup::Tensor } else { SumGroup::Tie }
    }

    /// The chunk of a buffer, and the number of its piece.
    fn part(&self, buffer: Buffer) -> Part {
        let spec = self.program.spec(buffer);
        let piece = if let Extent::Tile(number) = spec.extent { number } else { 0 };
        (spec.of, piece)
    }

    pub(super) fn pack(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        let sum = self.read(from)?.own();
        self.pack_part(self.part(from), (from, &sum), into)
    }

    /// The terms of a part of a sum are copied to a buffer.
    pub(super) fn pack_part(
        &mut self,
        part: Part,
        (from, sum): (Buffer, &Value),
        into: Buffer,
    ) -> Result<(), Broken> {
        let axis = self.axis(into);
        let over: Vec<_> = self.groups(part.0).into_iter().take_while(|g| *g != axis).collect();
        self.complete(from, sum, &over)?;
        self.add_number(part, into)
    }

    pub(super) fn unpack(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        let (numbers, axis) = (self.read(from)?.own(), self.axis(from));
        let (chunks, is_summed) = self.packed(from);
        let is_complete = self.numbers(&numbers, is_summed) == Some(chunks);
        expect(is_complete, Invariant::Terms, || format!("{} has {numbers}", self.name(from)))?;
        let is_piece = self.program.spec(into).role == Role::Summed;
        let here = if is_piece { self.stored(into)? } else { self.read(into)? };
        let own = here.own();
        let terms = self.terms(self.of(into), &own, true)?;
        // Other pieces of the chunk may have been written.
        let is_new = !terms.over.contains(&axis) || is_piece;
        expect(is_new, Invariant::Terms, || format!("{} is summed already", self.name(into)))?;
        let before = terms.over.iter().copied().filter(|group| *group != axis);
        let over = before.chain([axis]).collect();
        let sum = Value::Gradient(Rc::new(Terms { over, ..(*terms).clone() }));
        let is_whole = here.others == own;
        let target = self.touch(into, true)?;
        if is_whole {
            target.set_whole(sum)
        } else {
            target.set(sum)
        }
        Ok(())
    }

    /// A piece of a sum is written where the sum stays.
    pub(super) fn write_back(&mut self, piece: Buffer, sum: &Value) {
        if let Value::Gradient(terms) = sum {
            let (of, number) = self.part(piece);
            self.written_back.extend(terms.over.last().map(|axis| (of, number, axis.name())));
        }
    }

    /// Returns whether all pieces of a stored sum over another axis are written.
    fn is_written_back(&self, of: usize, over: &[SumGroup]) -> bool {
        let (stage, c) = self.stage_of(of);
        let is_stored = stage.place(&self.rank.policies, c) == GradientPlace::Elsewhere;
        let pieces = |group: &SumGroup| match group {
            SumGroup::Tensor => stage.terms.pieces.iter().filter(|piece| piece.chunk == c).count(),
            SumGroup::Tie => 1,
            _ => 0,
        };
        let is_written = |group: &SumGroup| {
            (0..pieces(group) as u32).all(|number| self.written_back.contains(&(of, number, group.name())))
        };
        !is_stored || over.iter().all(is_written)
    }

    /// The parts of chunks of which a buffer has terms in the end, and whether they are summed over other ranks.
    fn packed(&self, buffer: Buffer) -> (BTreeSet<Part>, bool) {
        let of = self.of(buffer);
        if self.program.spec(buffer).role == Role::Terms {
            let stages = self.rank.stages.iter().filter(|stage| stage.index == of);
            let mut parts = BTreeSet::new();
            for stage in stages {
                for piece in &stage.terms.pieces {
                    let is_stored = stage.place(&self.rank.policies, piece.chunk) == GradientPlace::Elsewhere;
                    let of = stage.first_chunk + piece.chunk;
                    let number = if is_stored { parts.range((of, 0)..(of + 1, 0)).count() } else { 0 };
                    parts.insert((of, number as u32));
                }
            }
            return (parts, true);
        }
        let has = |tied: &&TiedChunks| tied.copies.iter().any(|(chunk, _)| *chunk == of);
        let tied = self.rank.ties.iter().find(has);
        let parts = |tied: &TiedChunks| tied.copies.iter().map(|(chunk, _)| (*chunk, 0)).collect();
        tied.map(|tied| (parts(tied), tied.is_shared)).unwrap_or_default()
    }

    pub(super) fn all_reduce(&mut self, group: SumGroup, buffer: Buffer) -> Result<(), Broken> {
        let (value, role) = (self.read(buffer)?.own(), self.program.spec(buffer).role);
        if matches!(role, Role::Gradient | Role::Rounded) {
            let terms = self.written(buffer, &value)?;
            let sum = Terms { over: vec![group], ..(*terms).clone() };
            self.touch(buffer, true)?.set_whole(Value::Gradient(Rc::new(sum)));
            return Ok(());
        }
        // A rank that counts nothing adds zeros to the norm.
        let is_empty = role == Role::Norms && self.numbers(&value, true).is_none();
        let of = self.numbers(&value, false).or_else(|| is_empty.then(BTreeSet::new));
        let of = of.ok_or_else(|| (Invariant::Norm, format!("it sums {value}")))?;
        let numbers = Numbers { phase: self.phase, of, is_summed: true };
        self.touch(buffer, true)?.set_whole(Value::Numbers(Rc::new(numbers)));
        Ok(())
    }

    pub(super) fn convert(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        let here = self.read(from)?;
        if self.program.spec(from).role == Role::Gradient {
            self.written(from, &here.own())?;
        }
        self.put(here.own(), here.others, into)
    }

    /// Overwrites this rank's part of a buffer, and the others where both have them.
    fn put(&mut self, own: Value, others: Value, into: Buffer) -> Result<(), Broken> {
        let is_whole = self.program.spec(into).extent == Extent::Whole && others != Value::Unset;
        let target = self.touch(into, true)?;
        target.set(own);
        if is_whole {
            target.others = others;
        }
        Ok(())
    }

    /// Copies on the device: tiles that both buffers have, and the parts of other ranks where both have them.
    pub(super) fn copy_part(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        let here = self.read(from)?;
        let is_tile = |buffer| matches!(self.program.spec(buffer).extent, Extent::Tile(_));
        if is_tile(from) || is_tile(into) {
            return self.copy(&[from], &[into]);
        }
        self.put(here.own(), here.others, into)
    }

    pub(super) fn add(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        let (term, sum) = (self.read(from)?.own(), self.read(into)?.own());
        if let Some(more) = self.numbers(&term, false) {
            return more.into_iter().try_for_each(|of| self.add_number(of, into));
        }
        let is_summed = matches!(&term, Value::Gradient(terms) if !terms.over.is_empty());
        let term = match is_summed {
            true => self.terms(self.of(from), &term, true)?,
            false => self.written(from, &term)?,
        };
        let sum = self.sum(self.of(into), (&sum, is_summed), &term.runs)?;
        match is_summed {
            true => self.touch(into, true)?.set(sum),
            false => self.touch(into, true)?.set_whole(sum),
        }
        Ok(())
    }

    /// A sum, with more terms.
    pub(super) fn sum(
        &self,
        of: usize,
        (sum, is_summed): (&Value, bool),
        more: &BTreeSet<(u32, u16)>,
    ) -> Result<Value, Broken> {
        let sum = self.terms(of, sum, is_summed)?;
        let is_new = sum.runs.is_disjoint(more);
        expect(is_new, Invariant::Terms, || format!("chunk {of} has these terms already"))?;
        let runs = sum.runs.union(more).copied().collect();
        Ok(Value::Gradient(Rc::new(Terms { runs, ..(*sum).clone() })))
    }

    /// The chunks or stages of which a buffer has numbers of this phase.
    pub(super) fn numbers(&self, value: &Value, is_summed: bool) -> Option<BTreeSet<Part>> {
        match value {
            Value::Numbers(c) if c.phase == self.phase && c.is_summed == is_summed => Some(c.of.clone()),
            _ => None,
        }
    }

    /// Adds the numbers of a part of a chunk, or of a stage, to a buffer.
    fn add_number(&mut self, part: Part, into: Buffer) -> Result<(), Broken> {
        let before = self.read(into)?.own();
        let is_over = self.numbers(&before, true).is_some();
        let mut of = self.numbers(&before, false).unwrap_or_default();
        let is_new = of.insert(part) && !is_over;
        expect(is_new, Invariant::Norm, || format!("{part:?} is counted: {before}"))?;
        let numbers = Numbers { phase: self.phase, of, is_summed: false };
        self.touch(into, true)?.set_whole(Value::Numbers(Rc::new(numbers)));
        Ok(())
    }

    pub(super) fn look(&mut self, buffer: Buffer) -> Result<(), Broken> {
        let sum = self.read(buffer)?.own();
        self.complete(buffer, &sum, &self.groups(self.of(buffer)))
    }

    pub(super) fn count(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        self.look(from)?;
        self.add_number(self.part(from), into)
    }

    pub(super) fn total(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        let squares = self.read(from)?.own();
        let stage = self.of(from);
        let parts = self.rank.stages.iter().filter(|s| s.index == stage).flat_map(|s| self.counted(s));
        let is_complete = self.numbers(&squares, true) == Some(parts.collect());
        expect(is_complete, Invariant::Norm, || format!("the stage has {squares}"))?;
        self.add_number((stage, 0), into)
    }

    /// The parts of a stage that the norm counts, or that are looked at: where gradients stay out of reach, and `is_late` says that they are
    /// counted there, tile by tile.
    pub(super) fn parts(&self, stage: &StageChunks, is_late: impl Fn(&ChunkSpec) -> bool) -> BTreeSet<Part> {
        let policies = &self.rank.policies;
        let of_chunk = |c: usize| {
            let spec = &stage.chunks[c];
            let is_shown = stage.place(policies, c) == GradientPlace::Elsewhere
                && !policies.reaches(spec.gradients)
                && is_late(spec);
            let tiles = if is_shown { stage.counted_pieces(c) } else { vec![(0, 0, 0)] };
            tiles.into_iter().map(move |(tile, ..)| (stage.first_chunk + c, tile as u32))
        };
        (0..stage.trained).flat_map(of_chunk).collect()
    }

    fn counted(&self, stage: &StageChunks) -> BTreeSet<Part> {
        self.parts(stage, |spec| !spec.is_summed_over_data_alone)
    }

    /// Counts what is not finite.
    pub(super) fn count_not_finite(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        self.look(from)?;
        let counts = Value::NotFinite(self.phase);
        self.touch(into, true)?.set_whole(counts);
        Ok(())
    }

    /// The host reads what is not finite.
    pub(super) fn mask(&mut self, counts: Buffer) -> Result<(), Broken> {
        let found = self.read(counts)?.own();
        self.masked.insert(self.of(counts));
        let is_new = found == Value::NotFinite(self.phase);
        expect(is_new, Invariant::Update, || format!("{} has {found}", self.name(counts)))
    }

    /// The part of a chunk that is looked at.
    pub(super) fn look_at(&mut self, buffer: Buffer) -> Result<(), Broken> {
        let part = self.part(buffer);
        self.looked.insert(part);
        self.look(buffer)
    }
}
