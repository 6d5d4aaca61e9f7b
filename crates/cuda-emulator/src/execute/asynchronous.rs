//! `cp.async`: copies from global to shared memory that end as late as they may, when the thread waits for them.
//!
//! From its start on, nobody may use the memory that a copy writes: neither before the thread has waited, nor, for
//! other threads, before a barrier behind that.

use crate::checks::Finding;
use crate::kernel::AsyncCopy;
use crate::ptx::StateSpace;

use super::access::{Who, addresses};
use super::block::{Block, Stop};
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
        let by = self.accessor(warp.number, at, false);
        for lane in lanes(active) {
            let who = Who { by: &by, lane };
            let place = self.shared_for_writing(to[lane], copy.bytes, who)?;
            self.shared.mark_pending(place, copy.bytes);
            let asked =
                copy.source_bytes.map(|slot| warp.registers.words[usize::from(slot)].0[lane] as usize);
            let source_bytes = asked.unwrap_or(copy.bytes).min(copy.bytes);
            if from[lane] % copy.bytes as u64 != 0 {
                let detail = format!("a source of {} bytes", copy.bytes);
                let fault = crate::memory::Fault { finding: Finding::Misaligned, detail };
                return Err(self.stop(fault, from[lane], who));
            }
            warp.open.push(Copy {
                lane,
                to: to[lane],
                from: from[lane],
                bytes: copy.bytes,
                source_bytes,
                at,
            });
        }
        Ok(())
    }

    /// Makes a group of the copies that the lanes started since their last one.
    pub(super) fn async_commit(&mut self, warp: &mut Warp, active: u32) {
        let (copies, others) = warp.open.drain(..).partition(|copy| active >> copy.lane & 1 == 1);
        warp.open = others;
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
        let mut newer = [0usize; 32];
        let mut ended = Vec::new();
        for group in warp.groups.iter_mut().rev() {
            let mut ends = 0u32;
            for lane in lanes(group.lanes & active) {
                newer[lane] += 1;
                ends |= u32::from(newer[lane] > pending) << lane;
            }
            group.lanes &= !ends;
            let (copies, others) = group.copies.drain(..).partition(|copy| ends >> copy.lane & 1 == 1);
            group.copies = others;
            ended.push(copies);
        }
        warp.groups.retain(|group| group.lanes != 0);
        let copies: Vec<Copy> = ended.into_iter().rev().flat_map(|copies: Vec<Copy>| copies).collect();
        copies.into_iter().try_for_each(|copy| self.land(warp, copy, at))
    }

    /// Ends a copy: its bytes are written now, by the thread that waits.
    fn land(&mut self, warp: &mut Warp, copy: Copy, at: usize) -> Result<(), Stop> {
        match copy.bytes {
            4 => self.land_sized::<4>(warp, copy, at),
            8 => self.land_sized::<8>(warp, copy, at),
            _ => self.land_sized::<16>(warp, copy, at),
        }
    }

    fn land_sized<const N: usize>(&mut self, warp: &mut Warp, copy: Copy, at: usize) -> Result<(), Stop> {
        let (read, write) =
            (self.accessor(warp.number, copy.at, false), self.accessor(warp.number, at, false));
        let who = Who { by: &read, lane: copy.lane };
        let mut bytes = [0u8; N];
        if copy.source_bytes == N {
            bytes = self.read_global(copy.from, who)?;
        } else {
            for (byte, out) in bytes[..copy.source_bytes].iter_mut().enumerate() {
                [*out] = self.read_global(copy.from + byte as u64, who)?;
            }
        }
        let place = self.shared.place(copy.to, N).map_err(|fault| self.stop(fault, copy.to, who))?;
        self.shared.mark_written(place, N);
        self.write(warp, StateSpace::Shared, copy.to, bytes, Who { by: &write, lane: copy.lane })
    }

    /// Reports copies for which lanes that end did not wait.
    pub(super) fn unfinished_copies(&mut self, warp: &Warp, ended: u32, at: usize) {
        let groups = warp.groups.iter().flat_map(|group| &group.copies);
        let unfinished = warp.open.iter().chain(groups).find(|copy| ended >> copy.lane & 1 == 1);
        if let Some(copy) = unfinished.copied().filter(|_| self.launch.checks.unwritten) {
            let by = self.accessor(warp.number, copy.at, false);
            let who = Who { by: &by, lane: copy.lane };
            let detail = format!(
                "the thread ends (PTX line {}) without a wait for it",
                self.launch.kernel.lines[at].0
            );
            self.note(Finding::UnfinishedCopy, &detail, copy.to, who);
        }
    }
}
