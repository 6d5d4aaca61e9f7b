//! Symbolic updates and copies, tile by tile.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::program::action::{Buffer, Work};
use crate::program::list::Extent;
use crate::trace::Memory;

use super::Invariant;
use super::contents::Value;
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
        self.copy(work.reads(), work.writes())
    }

    /// Copies the tiles that buffers have in common.
    pub(super) fn copy(&mut self, from: Range<u32>, into: Range<u32>) -> Result<(), Broken> {
        let mut values = BTreeMap::new();
        for buffer in from.map(Buffer) {
            let tiles = self.tiles_of(buffer);
            values.extend(tiles.zip(self.read(buffer)?.tiles));
        }
        for buffer in into.map(Buffer) {
            for (place, tile) in self.tiles_of(buffer).enumerate() {
                let value = values.get(&tile).cloned().unwrap_or_default();
                self.touch(buffer, true)?.tiles[place] = value;
            }
        }
        Ok(())
    }
}
