//! Symbolic updates and copies, tile by tile.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::program::action::{Buffer, Work};
use crate::program::list::{BufferSpec, Extent, Role};
use crate::trace::Memory;

use super::Invariant;
use super::contents::{Contents, Value};
use super::walk::{Broken, Walk, expect};

impl Walk<'_> {
    /// Checks that kernels reach a buffer.
    pub(super) fn check_reach(&self, buffer: Buffer) -> Result<(), Broken> {
        let is_reached = self.rank.policies.reaches(self.program.spec(buffer).memory);
        expect(is_reached, Invariant::Reach, || format!("{} is out of reach", self.name(buffer)))
    }

    /// The tiles that a buffer has.
    fn tiles_of(&self, buffer: Buffer) -> Range<usize> {
        match self.program.spec(buffer).extent {
            Extent::Tile(tile) => tile as usize..tile as usize + 1,
            _ => 0..super::walk::tiles(self.rank, self.program.spec(buffer)),
        }
    }

    /// The contents of a tile of a buffer.
    fn cell(&mut self, buffer: Buffer, tile: usize, writes: bool) -> Result<&mut Value, Broken> {
        let tiles = self.tiles_of(buffer);
        let name = self.name(buffer);
        expect(tiles.contains(&tile), Invariant::Update, || format!("{name} has no tile {tile}"))?;
        Ok(&mut self.touch(buffer, writes)?.tiles[tile - tiles.start])
    }

    /// Updates a tile, or what is updated at once.
    pub(super) fn update(
        &mut self,
        gradient: Buffer,
        parameters: Buffer,
        states: &[Buffer],
    ) -> Result<(), Broken> {
        expect(self.applies == Some(true), Invariant::Update, || "the step is not applied".into())?;
        let of = self.of(parameters);
        let operands = || [gradient, parameters].into_iter().chain(states.iter().copied());
        operands().try_for_each(|buffer| self.check_reach(buffer))?;
        let cut = operands().find(|b| matches!(self.program.spec(*b).extent, Extent::Tile(_)));
        let tile = cut.map_or(0, |buffer| self.tiles_of(buffer).start);
        let is_new = self.updated.insert((of, tile));
        expect(is_new, Invariant::Update, || "it is updated twice".into())?;
        let over = self.groups(of);
        let sum = self.cell(gradient, tile, false)?.clone();
        self.complete(gradient, &sum, &over)?;
        let is_whole = states.iter().any(|b| self.program.spec(*b).extent == Extent::Whole);
        if is_whole && cut.is_none() {
            let others = self.read(gradient)?.others;
            self.complete(gradient, &others, &over)?;
        }
        let updates = self.updates;
        for state in states {
            let here = self.cell(*state, tile, true)?;
            let before = std::mem::replace(here, Value::States(updates + 1));
            expect(before == Value::States(updates), Invariant::Version, || format!("it has {before}"))?;
            if is_whole {
                self.touch(*state, true)?.others = Value::States(updates + 1);
            }
        }
        let is_unread = self.rank.policies.precision.has_master();
        let here = self.cell(parameters, tile, true)?;
        let before = std::mem::replace(here, Value::Parameters(updates + 1));
        let fits = is_unread || before == Value::Parameters(updates);
        expect(fits, Invariant::Version, || format!("it has {before}"))?;
        if is_whole {
            self.touch(parameters, true)?.others = Value::Parameters(updates + 1);
        }
        Ok(())
    }

    /// Writes parameters from master weights.
    pub(super) fn restore(&mut self, from: Buffer, into: Buffer) -> Result<(), Broken> {
        let found = self.read(from)?.own();
        let fits = found == Value::States(self.updates);
        expect(fits, Invariant::Version, || format!("it reads {found}"))?;
        let (is_whole, value) =
            (self.program.spec(from).extent == Extent::Whole, Value::Parameters(self.updates));
        let target = self.touch(into, true)?;
        if is_whole {
            target.set_whole(value)
        } else {
            target.set(value)
        }
        Ok(())
    }

    /// Copies between neighbouring memories.
    pub(super) fn copy_between(&mut self, work: Work) -> Result<(), Broken> {
        let memory = |buffer: u32| self.program.spec(Buffer(buffer)).memory;
        let memories = [work.reads().next().map_or(Memory::Device, memory), memory(work.target().0)];
        let is_far = memories.contains(&Memory::Disk)
            && memories.contains(&Memory::Device)
            && !self.rank.policies.host_addressable;
        expect(!is_far, Invariant::Reach, || "disk is two copies away".into())?;
        let is_row = |buffer: u32| {
            let spec = self.program.spec(Buffer(buffer));
            spec.is_resident && spec.role == Role::Sum && spec.memory != Memory::Device
        };
        match work {
            Work::FromTiles { from, into, .. } if is_row(from.0) => self.bring(work.reads(), into),
            Work::ToTiles { from, into, is_part, .. } if is_row(into.0) => {
                self.send(from, work.writes(), is_part)
            }
            _ => self.copy(work.reads(), work.writes()),
        }
    }

    /// The buffers of a row that have some of the elements from `start` on.
    fn covering(&self, row: Range<u32>, start: u64, elements: u64) -> Vec<Buffer> {
        let mut first = 0;
        let has = |buffer: &Buffer| {
            let own = first..first + self.program.spec(*buffer).elements;
            first = own.end;
            own.start < start + elements && start < own.end
        };
        row.map(Buffer).filter(has).collect()
    }

    /// The contents of a stored sum where a piece of it belongs.
    pub(super) fn stored(&mut self, piece: Buffer) -> Result<Contents, Broken> {
        let BufferSpec { of, start, elements, .. } = *self.program.spec(piece);
        let is_home = |spec: &BufferSpec| spec.is_resident && (spec.role, spec.of) == (Role::Sum, of);
        let all = 0..self.program.residents() as u32;
        let row: Vec<u32> = all.filter(|at| is_home(self.program.spec(Buffer(*at)))).collect();
        let row = row.first().map_or(0..0, |first| *first..*first + row.len() as u32);
        let covering = self.covering(row, start, elements);
        let values = covering.into_iter().map(|buffer| Ok(self.read(buffer)?.own()));
        Ok(Contents { tiles: values.collect::<Result<_, Broken>>()?, others: Value::Unset })
    }

    /// Brings elements of a stored gradient.
    fn bring(&mut self, row: Range<u32>, into: Buffer) -> Result<(), Broken> {
        let BufferSpec { role, extent, start, elements, .. } = *self.program.spec(into);
        let mut here = Contents::unset(0);
        let covering = self.covering(row, start, elements);
        for buffer in &covering {
            here.tiles.push(self.read(*buffer)?.own());
        }
        let own = here.own();
        if role == Role::Tied {
            let of = self.of(into);
            return self.pack_part((of, 0), (covering[0], &own), into);
        }
        let target = self.touch(into, true)?;
        if extent == Extent::Whole { target.set_whole(own) } else { target.set(own) }
        Ok(())
    }

    /// Sends a gradient, or a piece of a sum, to where it stays.
    fn send(&mut self, from: Buffer, row: Range<u32>, is_part: bool) -> Result<(), Broken> {
        let BufferSpec { role, start, elements, .. } = *self.program.spec(from);
        let here = self.read(from)?;
        let (own, others) = (here.own(), here.others);
        let elements = if is_part { self.rank.policies.part(elements) } else { elements };
        let mut covering = self.covering(row.clone(), start, elements);
        if role == Role::Summed {
            // The sum of the chunk is complete when all its pieces are written.
            covering = row.map(Buffer).collect();
            self.write_back(from, &own);
        }
        covering.into_iter().try_for_each(|buffer| {
            let is_whole = self.is_whole(buffer);
            let home = self.touch(buffer, true)?;
            home.set(own.clone());
            if is_whole {
                // A piece of a sum is the same on all ranks that have it.
                home.others = if role == Role::Summed { own.clone() } else { others.clone() };
            }
            Ok(())
        })
    }

    fn is_whole(&self, buffer: Buffer) -> bool {
        self.program.spec(buffer).extent == Extent::Whole
    }

    /// Copies the tiles that buffers have in common.
    pub(super) fn copy(&mut self, from: Range<u32>, into: Range<u32>) -> Result<(), Broken> {
        let mut values = BTreeMap::new();
        for buffer in from.clone().map(Buffer) {
            let tiles = self.tiles_of(buffer);
            values.extend(tiles.zip(self.read(buffer)?.tiles));
        }
        let whole = (from.len() == 1).then_some(Buffer(from.start)).filter(|from| self.is_whole(*from));
        for buffer in into.map(Buffer) {
            if let Some(whole) = whole.filter(|_| self.is_whole(buffer)) {
                let others = self.read(whole)?.others;
                self.touch(buffer, true)?.others = others;
            }
            for (place, tile) in self.tiles_of(buffer).enumerate() {
                let value = values.get(&tile).cloned().unwrap_or_default();
                self.touch(buffer, true)?.tiles[place] = value;
            }
        }
        Ok(())
    }
}
