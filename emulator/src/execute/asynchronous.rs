//! `cp.async`: copies from global to shared memory that end as late as they may, when the thread waits for them.
//!
//! From its start on, nobody may use the memory that a copy writes: neither before the thread has waited, nor, for
//! other threads, before a barrier behind that.

use crate::bits;
use crate::checks::{Accessor, Finding};
use crate::kernel::AsyncCopy;
use crate::memory::Fault;
use crate::registers::LANES;

use super::access::{GLOBAL, SHARED, addresses};
use super::block::{Block, Stop};
use super::spans::{Span, Spans};
use super::warp::{Copy, CopyGroup, Warp, lanes};

impl Block<'_> {
    /// Starts a copy for each lane.
    pub(super) fn async_copy(
        &mut self,
        warp: &mut Warp,
        copy: &AsyncCopy,
        active: u32,
        at: usize,
    ) -> Result<(), Stop> {
        let (to, from) = (addresses(warp, &copy.to), addresses(warp, &copy.from));
        let asked = copy.source_bytes.map(|slot| &warp.registers.words[usize::from(slot)].0);
        let source_bytes = |lane: usize| asked.map_or(copy.bytes, |row| row[lane] as usize).min(copy.bytes);
        let whole = lanes(active).filter(|&lane| source_bytes(lane) == copy.bytes);
        let whole = whole.fold(0u32, |mask, lane| mask | 1 << lane);
        let by = self.accessor(warp.number, at, false);
        let mut open = std::mem::take(&mut warp.open);
        let before = open.len();
        // Copies of lanes that follow each other at both ends are one.
        for sources in Spans::new(&from, whole, copy.bytes, false) {
            let mask = u32::MAX >> (LANES - sources.lanes) << sources.lane;
            for to in Spans::new(&to, mask, copy.bytes, false) {
                let from = from[to.lane];
                open.push(Copy { to, from, bytes: copy.bytes, source_bytes: copy.bytes, at });
            }
        }
        for lane in lanes(active & !whole) {
            let (to, source_bytes) = (Span::one(to[lane], lane), source_bytes(lane));
            open.push(Copy { to, from: from[lane], bytes: copy.bytes, source_bytes, at });
        }
        for copy in &open[before..] {
            self.begin_copy(copy, &by)?;
        }
        warp.open = open;
        Ok(())
    }

    fn begin_copy(&mut self, copy: &Copy, by: &Accessor) -> Result<(), Stop> {
        let place = self.place_of_write::<SHARED>(copy.to, copy.bytes, by)?;
        let (parts, count) = (self.parts::<SHARED>(), copy.to.bytes(copy.bytes));
        bits::remove(parts.written, place, count);
        bits::add(parts.pending, place, count);
        if !copy.from.is_multiple_of(copy.bytes as u64) {
            let detail = format!("a source of {} bytes", copy.bytes);
            return Err(self.stop(Fault { finding: Finding::Misaligned, detail }, copy.to.at(copy.from), by));
        }
        Ok(())
    }

    /// Makes a group of the copies that the lanes started since their last one.
    pub(super) fn async_commit(&mut self, warp: &mut Warp, active: u32) {
        let copies = take(&mut warp.open, active);
        warp.groups.push_back(CopyGroup { lanes: active, copies });
    }

    /// Ends all but the newest `pending` groups of each lane.
    pub(super) fn async_wait(
        &mut self,
        warp: &mut Warp,
        active: u32,
        pending: usize,
        at: usize,
    ) -> Result<(), Stop> {
        let mut newer = [0usize; LANES];
        let mut ended = Vec::new();
        for group in warp.groups.iter_mut().rev() {
            let mut ends = 0u32;
            for lane in lanes(group.lanes & active) {
                newer[lane] += 1;
                ends |= u32::from(newer[lane] > pending) << lane;
            }
            if ends != 0 {
                group.lanes &= !ends;
                ended.push(take(&mut group.copies, ends));
            }
        }
        warp.groups.retain(|group| group.lanes != 0);
        ended.into_iter().rev().flatten().try_for_each(|copy| self.land(warp.number, copy, at))
    }

    /// Ends a copy: its bytes are written now, by the threads that wait.
    fn land(&mut self, warp: usize, copy: Copy, at: usize) -> Result<(), Stop> {
        match copy.bytes {
            4 => self.land_sized::<4>(warp, copy, at),
            8 => self.land_sized::<8>(warp, copy, at),
            _ => self.land_sized::<16>(warp, copy, at),
        }
    }

    fn land_sized<const N: usize>(&mut self, warp: usize, copy: Copy, at: usize) -> Result<(), Stop> {
        let read = self.accessor(warp, copy.at, false);
        let mut bytes = [[0u8; N]; LANES];
        let from = copy.to.at(copy.from);
        if copy.source_bytes == N {
            self.read::<GLOBAL, N>(from, &read, &mut bytes)?;
        } else {
            for (address, byte) in (copy.from..).zip(&mut bytes[from.lane][..copy.source_bytes]) {
                let mut one = [[0u8; 1]; LANES];
                self.read::<GLOBAL, 1>(from.at(address), &read, &mut one)?;
                [*byte] = one[from.lane];
            }
        }
        let place = self.shared.place(copy.to.address, N, copy.to.bytes(N));
        let place = place.map_err(|fault| self.stop(fault, copy.to, &read))?;
        bits::remove(self.parts::<SHARED>().pending, place, copy.to.bytes(N));
        let write = self.accessor(warp, at, false);
        self.write::<SHARED, N>(copy.to, &write, &bytes)
    }

    /// Reports copies for which lanes that end did not wait.
    pub(super) fn unfinished_copies(&mut self, warp: &Warp, ended: u32, at: usize) {
        let groups = warp.groups.iter().flat_map(|group| &group.copies);
        let unfinished = warp.open.iter().chain(groups).find(|copy| copy.lanes() & ended != 0);
        if let Some(copy) = unfinished.copied().filter(|_| self.launch.checks.unwritten) {
            let by = self.accessor(warp.number, copy.at, false);
            let detail = format!(
                "the thread ends (PTX line {}) without a wait for it",
                self.launch.kernel.lines[at].0
            );
            self.note(Finding::UnfinishedCopy, &detail, copy.to, &by);
        }
    }
}

/// Takes the copies of the lanes of a mask out.
fn take(copies: &mut Vec<Copy>, mask: u32) -> Vec<Copy> {
    if copies.iter().all(|copy| copy.lanes() & !mask == 0) {
        return std::mem::take(copies);
    }
    let all = std::mem::take(copies).into_iter().flat_map(|copy| {
        copy.to.each(copy.bytes).map(move |to| {
            let offset = (to.lane - copy.to.lane) * copy.bytes;
            Copy { to, from: copy.from + offset as u64, ..copy }
        })
    });
    let (taken, others) = all.partition(|copy| copy.lanes() & !mask == 0);
    *copies = others;
    taken
}
