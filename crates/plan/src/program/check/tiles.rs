//! Symbolic updates and copies, tile by tile.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::program::action::{Buffer, Work};
use crate::program::chunks::GradientPlace;
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

    /// Updates a tile on the device, or what is updated at once.
    pub(super) fn update(
        &mut self,
        (gradient, parameters): (Buffer, Buffer),
        (read, states): (&[Buffer], &[Buffer]),
    ) -> Result<(), Broken> {
        let written = || [parameters].into_iter().chain(states.iter().copied());
        written().chain([gradient]).try_for_each(|buffer| self.check_reach(buffer))?;
        for buffer in read {
            match self.program.spec(*buffer).role {
                Role::Factor(_) => self.check_factor(*buffer)?,
                _ => drop(self.touch(*buffer, true)?),
            }
        }
        self.update_tile(gradient, &written().collect::<Vec<_>>())
    }

    /// The host updates a tile in its memory: `reads` are a gradient and its factor.
    pub(super) fn host_update(&mut self, reads: &[Buffer], writes: &[Buffer]) -> Result<(), Broken> {
        for buffer in reads.iter().chain(writes) {
            let is_here = self.program.spec(*buffer).memory == Memory::Host;
            expect(is_here, Invariant::Reach, || format!("{} is no host memory", self.name(*buffer)))?;
        }
        let [gradient, factor] = reads else {
            return Err((Invariant::Update, "a gradient and a factor are read".into()));
        };
        self.check_factor(*factor)?;
        self.update_tile(*gradient, writes)
    }

    fn check_factor(&mut self, factor: Buffer) -> Result<(), Broken> {
        let found = self.read(factor)?.own();
        let is_new = found == Value::Factor(self.phase);
        expect(is_new, Invariant::Version, || format!("{} has {found}", self.name(factor)))
    }

    /// Returns whether an update of a chunk may be issued: behind the decision, or within backward behind the count of its elements that
    /// are not finite.
    fn is_decided(&self, of: usize) -> bool {
        let (stage, c) = self.stage_of(of);
        match stage.place(&self.rank.policies, c) {
            GradientPlace::Update => self.masked.contains(&of),
            _ => self.applies == Some(true) || (self.rank.policies.in_backward && self.applies.is_some()),
        }
    }

    /// Updates a tile: parameters, states and master weights are `written`.
    fn update_tile(&mut self, gradient: Buffer, written: &[Buffer]) -> Result<(), Broken> {
        let of = self.of(gradient);
        expect(self.is_decided(of), Invariant::Update, || "the step is not applied".into())?;
        let operands = || [gradient].into_iter().chain(written.iter().copied());
        let cut = operands().find(|b| matches!(self.program.spec(*b).extent, Extent::Tile(_)));
        let tile = cut.map_or(0, |buffer| self.tiles_of(buffer).start);
        let is_new = self.updated.insert((of, tile));
        expect(is_new, Invariant::Update, || "it is updated twice".into())?;
        let over = self.groups(of);
        let sum = self.cell(gradient, tile, false)?.clone();
        self.complete(gradient, &sum, &over)?;
        let is_state = |role| matches!(role, Role::State(_) | Role::Master);
        let has_whole = |b: &Buffer| {
            let spec = self.program.spec(*b);
            is_state(spec.role) && spec.extent == Extent::Whole
        };
        let is_whole = written.iter().any(has_whole);
        if is_whole && cut.is_none() {
            let others = self.read(gradient)?.others;
            self.complete(gradient, &others, &over)?;
        }
        let (updates, landed) = (self.updates, self.landed);
        let has_master = self.rank.policies.precision.has_master();
        for buffer in written {
            let (before, after) = match self.program.spec(*buffer).role {
                role if is_state(role) => (Some(Value::States(updates)), Value::States(updates + 1)),
                Role::Parameters if !has_master => {
                    (Some(Value::Parameters(landed)), Value::Parameters(updates + 1))
                }
                Role::Parameters | Role::Updated => (None, Value::Parameters(updates + 1)),
                _ => {
                    self.touch(*buffer, true)?;
                    continue;
                }
            };
            let found = std::mem::replace(self.cell(*buffer, tile, true)?, after.clone());
            let fits = before.is_none_or(|before| found == before);
            expect(fits, Invariant::Version, || format!("it has {found}"))?;
            if is_whole {
                self.touch(*buffer, true)?.others = after;
            }
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
        let program = self.program;
        let (reads, writes) = (program.reads(work), program.writes(work));
        let memories = [reads, writes].map(|row| program.spec(row[0]).memory);
        let is_far = memories.contains(&Memory::Disk)
            && memories.contains(&Memory::Device)
            && !self.rank.policies.host_addressable;
        expect(!is_far, Invariant::Reach, || "disk is two copies away".into())?;
        let is_row = |row: &[Buffer]| {
            let spec = program.spec(row[0]);
            spec.is_resident && spec.role == Role::Sum && spec.memory != Memory::Device
        };
        match work {
            Work::FromTiles { into, .. } if is_row(reads) => self.bring(reads, into),
            Work::ToTiles { from, is_part, .. } if is_row(writes) => self.send(from, writes, is_part),
            _ => self.copy(reads, writes),
        }
    }

    /// The buffers of a row that have some of the elements from `start` on.
    fn covering(&self, row: &[Buffer], start: u64, elements: u64) -> Vec<Buffer> {
        let mut first = 0;
        let has = |buffer: &Buffer| {
            let own = first..first + self.program.spec(*buffer).elements;
            first = own.end;
            own.start < start + elements && start < own.end
        };
        row.iter().copied().filter(has).collect()
    }

    /// The contents of a stored sum where a piece of it belongs.
    pub(super) fn stored(&mut self, piece: Buffer) -> Result<Contents, Broken> {
        let BufferSpec { of, start, elements, .. } = *self.program.spec(piece);
        let is_home = |buffer: &Buffer| {
            let spec = self.program.spec(*buffer);
            spec.is_resident && (spec.role, spec.of) == (Role::Sum, of)
        };
        let row: Vec<Buffer> = self.program.numbers.iter().copied().filter(is_home).collect();
        let covering = self.covering(&row, start, elements);
        let values = covering.into_iter().map(|buffer| Ok(self.read(buffer)?.own()));
        Ok(Contents { tiles: values.collect::<Result<_, Broken>>()?, others: Value::Unset })
    }

    /// Brings elements of a stored gradient.
    fn bring(&mut self, row: &[Buffer], into: Buffer) -> Result<(), Broken> {
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
        if extent == Extent::Whole {
            target.set_whole(own)
        } else {
            target.set(own)
        }
        Ok(())
    }

    /// Sends a gradient, or a piece of a sum, to where it stays.
    fn send(&mut self, from: Buffer, row: &[Buffer], is_part: bool) -> Result<(), Broken> {
        let BufferSpec { role, start, elements, .. } = *self.program.spec(from);
        let here = self.read(from)?;
        let (own, others) = (here.own(), here.others);
        let elements = if is_part { self.rank.policies.part(elements) } else { elements };
        let mut covering = self.covering(row, start, elements);
        if role == Role::Summed {
            // The sum of the chunk is complete when all its pieces are written.
            covering = row.to_vec();
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
    pub(super) fn copy(&mut self, from: &[Buffer], into: &[Buffer]) -> Result<(), Broken> {
        let mut values = BTreeMap::new();
        for buffer in from {
            let tiles = self.tiles_of(*buffer);
            values.extend(tiles.zip(self.read(*buffer)?.tiles));
        }
        let whole = (from.len() == 1).then_some(from[0]).filter(|from| self.is_whole(*from));
        for buffer in into.iter().copied() {
            if let Some(whole) = whole.filter(|_| self.is_whole(buffer)) {
                let others = self.read(whole)?.others;
                self.touch(buffer, true)?.others = others;
            }
            // A tile that comes to a buffer of all leaves the others as they are.
            let is_tile = |buffer: &Buffer| matches!(self.program.spec(*buffer).extent, Extent::Tile(_));
            let keeps = from.iter().any(is_tile) && !is_tile(&buffer);
            for (place, tile) in self.tiles_of(buffer).enumerate() {
                let value = values.get(&tile).cloned();
                let here = &mut self.touch(buffer, true)?.tiles[place];
                *here = value.unwrap_or_else(|| if keeps { here.clone() } else { Value::Unset });
            }
        }
        Ok(())
    }
}
