//! Symbolic sums of gradients and of squares: which terms they have, and over which groups they are summed.

use std::collections::BTreeSet;
use std::rc::Rc;

use crate::program::action::{Buffer, SumGroup};
use crate::program::chunks::StageChunks;
use crate::program::list::{Extent, Role, Stop};

use super::Invariant;
use super::contents::{Numbers, Terms, Value};
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
        let is_complete = terms.runs.len() == all && terms.over == over;
        expect(is_complete, Invariant::Terms, || format!("{} has {value}", self.name(buffer)))
    }

    /// The groups over which the gradient of a chunk is summed in the end.
    pub(super) fn groups(&self, of: usize) -> Vec<SumGroup> {
        let has_terms = |stage: &StageChunks| stage.terms.chunks.iter().any(|c| stage.first_chunk + c == of);
        let terms = self.rank.stages.iter().any(has_terms).then_some(SumGroup::Tensor);
        let is_tied = self.rank.ties.iter().any(|tied| tied.elements > 0 && tied.chunks.contains(&of));
        let tied = is_tied.then_some(SumGroup::Tie);
        [Some(SumGroup::Data), terms, tied].into_iter().flatten().collect()
    }

    /// The group over which a buffer with terms is summed.
    fn axis(&self, buffer: Buffer) -> SumGroup {
        if self.program.spec(buffer).role == Role::Terms { SumGroup::Tensor } else { SumGroup::Tie }
    }

    pub(super) fn pack(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        let sum = self.read(from)?.own();
        let axis = self.axis(into);
        let over: Vec<_> = self.groups(self.of(from)).into_iter().take_while(|g| *g != axis).collect();
        self.complete(from, &sum, &over)?;
        self.add_number(self.of(from), into)
    }

    pub(super) fn unpack(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        let (numbers, axis) = (self.read(from)?.own(), self.axis(from));
        let (chunks, is_summed) = self.packed(from);
        let is_complete = self.numbers(&numbers, is_summed) == Some(chunks);
        expect(is_complete, Invariant::Terms, || format!("{} has {numbers}", self.name(from)))?;
        let here = self.read(into)?;
        let own = here.own();
        let terms = self.terms(self.of(into), &own, true)?;
        let is_new = !terms.over.contains(&axis);
        expect(is_new, Invariant::Terms, || format!("{} is summed already", self.name(into)))?;
        let over = terms.over.iter().copied().chain([axis]).collect();
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

    /// The chunks of which a buffer has terms in the end, and whether they are summed over other ranks.
    fn packed(&self, buffer: Buffer) -> (BTreeSet<usize>, bool) {
        let of = self.of(buffer);
        if self.program.spec(buffer).role == Role::Terms {
            let stages = self.rank.stages.iter().filter(|stage| stage.index == of);
            let chunks = stages.flat_map(|s| s.terms.chunks.iter().map(|c| s.first_chunk + c));
            return (chunks.collect(), true);
        }
        let tied = self.rank.ties.iter().find(|tied| tied.chunks.contains(&of));
        tied.map(|tied| (tied.chunks.iter().copied().collect(), tied.is_shared)).unwrap_or_default()
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
        if self.program.spec(into).stop == Stop::Home {
            return self.put(here.own(), here.others, into);
        }
        self.copy(from.0..from.0 + 1, into.0..into.0 + 1)
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
    pub(super) fn numbers(&self, value: &Value, is_summed: bool) -> Option<BTreeSet<usize>> {
        match value {
            Value::Numbers(c) if c.phase == self.phase && c.is_summed == is_summed => Some(c.of.clone()),
            _ => None,
        }
    }

    /// Adds the numbers of a chunk or stage to a buffer.
    fn add_number(&mut self, part: usize, into: Buffer) -> Result<(), Broken> {
        let before = self.read(into)?.own();
        let is_over = self.numbers(&before, true).is_some();
        let mut of = self.numbers(&before, false).unwrap_or_default();
        let is_new = of.insert(part) && !is_over;
        expect(is_new, Invariant::Norm, || format!("{part} is counted: {before}"))?;
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
        self.add_number(self.of(from), into)
    }

    pub(super) fn total(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        let squares = self.read(from)?.own();
        let stage = self.of(from);
        let trained = self.rank.stages.iter().find(|s| s.index == stage).map_or(0, |s| s.trained);
        let is_complete = self.numbers(&squares, true).is_some_and(|of| of.len() == trained);
        expect(is_complete, Invariant::Norm, || format!("the stage has {squares}"))?;
        self.add_number(stage, into)
    }
}
